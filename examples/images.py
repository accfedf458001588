"""Images in a folder, a subfolder for each owner, and one small GAN of all of them.  python examples/images.py"""

from pathlib import Path

import torch
from lightning.pytorch import Trainer, seed_everything
from PIL import Image
from sklearn.datasets import load_digits

from lit_epgan.callbacks import FederationCallback, SampleGrid
from lit_epgan.datamodules import FolderDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import FedAvg, GeneratorSites
from lit_epgan.modules import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
FOLDER = Path("runs/images")
digits = load_digits()


def write_images() -> None:
    """Each digit as a PNG of 8 x 8 grey pixels: data/OWNER/NUMBER.png. Each owner has one kind of digit."""
    for number, (pixels, kind) in enumerate(zip(digits.images, digits.target, strict=True)):
        owner = FOLDER / "data" / f"owner-{kind}"
        owner.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 15).astype("uint8")).save(owner / f"{number}.png")


def train(algorithm: Algorithm, lr: float) -> GAN:
    """A GAN after a first round of 300 steps at each owner and five rounds of 50."""
    seed_everything(0, verbose=False)
    data = FolderDataModule(str(FOLDER / "data"), 8, "grayscale", batch_size=32, warmup_steps=300, local_steps=50)
    gan = GAN(MLPGenerator((1, 8, 8)), MLPDiscriminator((1, 8, 8)), lr=lr, r1=0.5)
    callbacks = [FederationCallback(algorithm), SampleGrid(every_n_epochs=6)]
    run = FOLDER / type(algorithm).__name__
    Trainer(max_epochs=6, callbacks=callbacks, default_root_dir=run, accelerator="cpu", **QUIET).fit(gan, data)
    return gan


write_images()
real = torch.tensor(digits.data * 15 / 127.5 - 1).float()
print("% of 1,000 samples nearest to an image of each digit, 0 to 9")
for algorithm, lr in ((FedAvg(), 1e-3), (GeneratorSites(), 2e-3)):
    drawn = train(algorithm, lr).sample(1000, torch.Generator().manual_seed(0)).flatten(1)
    nearest = torch.tensor(digits.target)[torch.cdist(drawn, real).argmin(1)]
    shares = [f"{100 * (nearest == kind).float().mean():5.1f}" for kind in range(10)]
    print(f"{type(algorithm).__name__:14} {' '.join(shares)}")
