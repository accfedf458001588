"""The generative methods that ``price_of_privacy.py`` compares: a training of each at an epsilon, a rate and a seed."""

import logging
import tempfile
import warnings
from collections.abc import Callable as Function
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import Dataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule, ImageDataModule, WritersDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.hardship import Hardship
from lit_epgan.datamodules.images import SHAPES, ImageSetName
from lit_epgan.engine import Algorithm, Mechanism, NormClipping
from lit_epgan.federated import EmbeddingOnServer, FedAvgGAN, GeneratorSites, MatchedEmbedding
from lit_epgan.modules import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, RecordNoise, Releases, noise_multiplier_for

DELTA = 1e-5
NO_NOISE = float("inf")
SPLIT_SEED = 7
ASIDE = 0.25  # of the training images, on which learning rates are chosen
SERVER_BATCH = 32
POINTS = 200
CLOTHES = {"writers": 20, "iid": 1000, "one_class": 1000}  # of a user, of an institution
Samples = dict[str, Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of all trainings.

    Attributes:
        writers: users.
        rounds, cohort: of DP-FedAvg-GAN for users.
        local_steps: of each institution, over all rounds.
        server_steps: of every generator that is trained on the server after a release.
        samples: that are drawn of a model.
        dataset: the images.
    """

    writers: int
    rounds: int
    cohort: int
    local_steps: int
    server_steps: int
    samples: int = 1000
    dataset: ImageSetName = "digits"


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        method: a name in METHODS.
        data: ``writers``, a user each, who holds clothes at random where those are the images; ``iid`` or
            ``one_class``, ten institutions.
        epsilon: infinite without noise.
        rate: the learning rate.
        seed: of everything but noise for privacy.
        tuning: on three quarters of the training images.
    """

    method: str
    data: str
    epsilon: float
    rate: float
    seed: int
    tuning: bool = False


def split(case: Case, sizes: Sizes) -> ClientData:
    """Who holds which images; those set aside are ``val`` when rates are chosen."""
    aside = ASIDE if case.tuning else 0.0
    if case.data == "writers" and sizes.dataset == "digits":
        return WritersDataModule(sizes.writers, split_seed=SPLIT_SEED, val_fraction=aside).load()
    dealt: Any = {"partition": "iid", "clients": sizes.writers} if case.data == "writers" else {"partition": case.data}
    data = ImageDataModule(sizes.dataset, split_seed=SPLIT_SEED, val_fraction=aside, **dealt).load()
    return data if sizes.dataset == "digits" else Hardship(CLOTHES[case.data]).on(data, SPLIT_SEED)


def images(data: Any) -> Tensor:
    """All images (n, C, H, W) of a data set, or of several by name."""
    sets: list[Dataset] = list(data.values()) if isinstance(data, dict) else [data]
    return torch.stack([each[k][0] for each in sets for k in range(len(each))])  # type: ignore


def federation(case: Case, sizes: Sizes, **options: Any) -> FederatedDataModule:
    options = {"batch_size": 20 if case.data == "writers" else 32} | options
    return FederatedDataModule.from_datasets(split(case, sizes).train, seed=case.seed, **options)


def federate(module: LightningModule, data: FederatedDataModule, rounds: int, *callbacks: Callback) -> None:
    """A run without traces."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=list(callbacks),
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=data)


def gan(case: Case, shape: tuple[int, int, int] = SHAPES["digits"], **settings: Any) -> GAN:
    """The same networks for everybody, the discriminator small, for noise grows with its parameters' number.

    By default they are trained as in ``configs/digits.yaml``.
    """
    seed_everything(case.seed, verbose=False)
    settings = {"lr": case.rate, "r1": 0.5} | settings
    return GAN(MLPGenerator(shape, 32, (128, 128)), MLPDiscriminator(shape, (64,)), **settings)


@cache
def z_of_one_release(epsilon: float) -> float:
    """Its noise multiplier."""
    return noise_multiplier_for(epsilon, DELTA, lambda z: [Releases(z)])


# One release ----------------------------------------------------------------------------------------------------------


class Points(Callback):
    """Keeps what a release's points are when training ends."""

    herded: Tensor

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        federation = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))  # type: ignore[attr-defined]
        self.herded = federation.extra_samples(POINTS)["herded"]


def after_a_release(algorithm: type[Algorithm], case: Case, sizes: Sizes, **settings: Any) -> tuple[GAN, Tensor]:
    """The module and the points of an algorithm that releases once, then works on the server for one round."""
    settings |= {"frequencies": 512, "points": POINTS, "herding_steps": 60, "server_steps": sizes.server_steps}
    noised = case.epsilon < NO_NOISE
    mechanism: Mechanism | None = None
    if case.data == "writers":
        settings["unit"] = "user"
        mechanism = CentralNoise(1.0, z_of_one_release(case.epsilon), delta=DELTA) if noised else NormClipping(1.0)
    elif noised:
        settings |= {"noise_multiplier": z_of_one_release(case.epsilon), "delta": DELTA}
    module, points = gan(case, SHAPES[sizes.dataset]), Points()
    federate(module, federation(case, sizes), 2, FederationCallback(algorithm(**settings), mechanism=mechanism), points)
    return module, points.herded.float()


def matched(case: Case, sizes: Sizes) -> Samples:
    """DP-MERF: a generator matched to the release; and the points, which have no learning rate."""
    module, points = after_a_release(MatchedEmbedding, case, sizes, lr=case.rate, batch_size=100)
    return {"matched generator (DP-MERF)": module.sample(sizes.samples), "herded points": points}


def on_points(case: Case, sizes: Sizes) -> Samples:
    """The private release of embedding sites: a GAN on the points."""
    module, _ = after_a_release(EmbeddingOnServer, case, sizes, batch_size=SERVER_BATCH)
    return {"GAN on the points": module.sample(sizes.samples)}


# Rounds ---------------------------------------------------------------------------------------------------------------


def fedavg_gan_for_users(case: Case, sizes: Sizes) -> Samples:
    """DP-FedAvg-GAN, a step of the server for a pass of the users; the bound on a report goes with the rate."""
    bound = 15 * case.rate
    noised = CentralNoise(bound, target_epsilon=case.epsilon, delta=DELTA) if case.epsilon < NO_NOISE else None
    module = gan(case, SHAPES[sizes.dataset], objective="wgan-gp", optimizer="sgd", average=None, r1=0.0)
    data = federation(case, sizes, clients_per_round=sizes.cohort)
    callback = FederationCallback(FedAvgGAN(1, SERVER_BATCH), mechanism=noised or NormClipping(bound))
    federate(module, data, sizes.rounds, callback)
    return {"DP-FedAvg-GAN": module.sample(sizes.samples)}


def record_noise(case: Case) -> Mechanism | None:
    """DP-SGD at every client; without noise nothing is clipped either."""
    return RecordNoise(1.0, target_epsilon=case.epsilon, delta=DELTA) if case.epsilon < NO_NOISE else None


def fedavg_gan_for_records(case: Case, sizes: Sizes) -> Samples:
    """FedAvg-GAN, as in ``configs/digits_fedavg_gan.yaml``: as many steps of the server as of a client."""
    module, steps = gan(case, SHAPES[sizes.dataset]), min(6, sizes.local_steps)
    data, rounds = federation(case, sizes, local_steps=steps), -(-sizes.local_steps // steps)
    callback = FederationCallback(FedAvgGAN(steps, SERVER_BATCH), "keep", mechanism=record_noise(case))
    federate(module, data, rounds, callback)
    return {"FedAvg-GAN, DP-SGD": module.sample(sizes.samples)}


def generator_sites(case: Case, sizes: Sizes) -> Samples:
    """Half of the steps alone, the others in five rounds against each other's generators."""
    module, later = gan(case, SHAPES[sizes.dataset]), max(1, sizes.local_steps // 10)
    data = federation(case, sizes, warmup_steps=max(1, sizes.local_steps - 5 * later), local_steps=later)
    federate(module, data, 6, FederationCallback(GeneratorSites(pool=500), mechanism=record_noise(case)))
    return {"generator sites, DP-SGD": module.sample(sizes.samples)}


RELEASED = "writers", "iid"  # the sum of records' releases, and of their noise, is the same however they are dealt out
DEALT = "iid", "one_class"
# the function, the learning rates that are tried, the data
METHODS: dict[str, tuple[Function[[Case, Sizes], Samples], tuple[float, ...], tuple[str, ...]]] = {
    "matched": (matched, (1e-3 / 3, 1e-3, 3e-3), RELEASED),
    "on points": (on_points, (1e-3 / 3, 1e-3, 3e-3), ("iid",)),
    "FedAvg-GAN for users": (fedavg_gan_for_users, (6e-4, 2e-3, 6e-3, 2e-2, 6e-2, 1.8e-1), ("writers",)),
    "FedAvg-GAN for records": (fedavg_gan_for_records, (1e-3, 3e-3, 9e-3, 2.7e-2, 8.1e-2), DEALT),
    "generator sites": (generator_sites, (2e-3 / 3, 2e-3, 6e-3, 1.8e-2, 5.4e-2, 1.62e-1), DEALT),
}
