"""What fidelity costs under privacy for users: Frechet distance of generated digits against epsilon, at equal budgets.

340 simulated writers, a user each; delta 1e-5, one user's data set emptied. Distances are in the features of the
digits' classifier, to the images of 60 further writers.

    matched     one release of the users' mean embeddings; a generator matched to it on the server (as DP-MERF)
    points      the points herded to the same release
    FedAvg-GAN  DP-FedAvg-GAN, its noise calibrated to epsilon over all its rounds

A further method is a function of (data, epsilon, seed) in METHODS.

OMP_NUM_THREADS=1 python benchmarks/price_of_privacy.py --output benchmarks/results/price_of_privacy.md
"""

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import warnings
from collections.abc import Callable as Function
from functools import partial

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from side_by_side import markdown, options, publish
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule, WritersDataModule
from lit_epgan.engine import Algorithm, Mechanism
from lit_epgan.federated import FedAvgGAN, MatchedEmbedding
from lit_epgan.metrics.digits_classifier import DigitsClassifier, digits_classifier
from lit_epgan.metrics.generative import FeatureStatistics, frechet_distance
from lit_epgan.modules import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, Releases, noise_multiplier_for

DELTA = 1e-5
SAMPLES = 1000
NO_PRIVACY = float("inf")
Samples = dict[str, Tensor]


class Points(Callback):
    """Keeps what a release's points are when training ends."""

    herded: Tensor

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        federation = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))  # type: ignore[attr-defined]
        self.herded = federation.extra_samples(300)["herded"]


def federate(
    module: LightningModule,
    data: FederatedDataModule,
    algorithm: Algorithm,
    mechanism: Mechanism,
    rounds: int,
    *callbacks: Callback,
) -> None:
    """A run without traces."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=rounds,
            accelerator="cpu",
            callbacks=[FederationCallback(algorithm, mechanism=mechanism), *callbacks],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=data)


def clients(args: argparse.Namespace, seed: int, **options: int) -> FederatedDataModule:
    """The writers, as a federation of their own for each run."""
    data = WritersDataModule(args.writers, split_seed=args.split_seed, batch_size=20).load()
    return FederatedDataModule.from_datasets(data.train, batch_size=20, seed=seed, **options)


def gan(seed: int, **settings: object) -> GAN:
    """The same small networks for everybody."""
    seed_everything(seed, verbose=False)
    return GAN(MLPGenerator((1, 8, 8), 32, (128, 128)), MLPDiscriminator((1, 8, 8), (128, 128)), **settings)  # type: ignore


def release(args: argparse.Namespace, epsilon: float, seed: int) -> Samples:
    """One release by user: the generator matched to it, and its points."""
    z = noise_multiplier_for(epsilon, DELTA, lambda z: [Releases(z)]) if epsilon < NO_PRIVACY else 1e-6
    module = gan(seed)
    algorithm = MatchedEmbedding(args.matching_steps, frequencies=512, points=300, herding_steps=150, unit="user")
    points = Points()
    federate(module, clients(args, seed), algorithm, CentralNoise(1.0, z, delta=DELTA), 4, points)
    return {"matched": module.sample(SAMPLES), "points": points.herded.float()}


def fedavg_gan(args: argparse.Namespace, epsilon: float, seed: int) -> Samples:
    """DP-FedAvg-GAN with the noise that epsilon leaves it."""
    noise = {"target_epsilon": epsilon} if epsilon < NO_PRIVACY else {"noise_multiplier": 1e-6}
    module = gan(seed, objective="wgan-gp", optimizer="sgd", lr=0.02, lr_discriminator=0.02, average=None)
    data = clients(args, seed, clients_per_round=args.cohort)
    mechanism = CentralNoise(0.3, delta=DELTA, **noise)
    federate(module, data, FedAvgGAN(6, 32), mechanism, args.rounds)
    return {"FedAvg-GAN": module.sample(SAMPLES)}


METHODS: list[Function[[argparse.Namespace, float, int], Samples]] = [release, fedavg_gan]


def moments(extractor: DigitsClassifier, images: Tensor) -> FeatureStatistics:
    """Mean and covariance of the images' features."""
    features, _ = extractor.extract(images)
    return FeatureStatistics(features.mean(0).numpy(), features.T.cov().numpy())


def distances(args: argparse.Namespace, task: tuple[int, float, int]) -> dict[str, float]:
    """One method's distances at one epsilon and seed."""
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    method, epsilon, seed = task
    real = WritersDataModule(args.writers, split_seed=args.split_seed, batch_size=20).load().test
    assert isinstance(real, TensorDataset)
    extractor = digits_classifier()
    wanted = moments(extractor, real.tensors[0])
    made = METHODS[method](args, epsilon, seed)
    return {name: frechet_distance(moments(extractor, images), wanted) for name, images in made.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0, NO_PRIVACY])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--writers", type=int, default=340)
    parser.add_argument("--rounds", type=int, default=100, help="of FedAvg-GAN")
    parser.add_argument("--cohort", type=int, default=100, help="of FedAvg-GAN")
    parser.add_argument("--matching-steps", type=int, default=200, help="in each of three rounds")
    parser.add_argument("--split-seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    digits_classifier()  # trained once, before the processes ask for it
    tasks = [(m, e, s) for e in args.epsilons for m in range(len(METHODS)) for s in range(args.seeds)]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        measured = pool.map(partial(distances, args), tasks, chunksize=1)
    found: dict[float, dict[str, list[float]]] = {}
    for (_, epsilon, _), each in zip(tasks, measured, strict=True):
        for name, distance in each.items():
            found.setdefault(epsilon, {}).setdefault(name, []).append(distance)
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    rows = [[f"{epsilon:g}", *(_told(each[name]) for name in names)] for epsilon, each in found.items()]
    data = WritersDataModule(args.writers, split_seed=args.split_seed, batch_size=20).load()
    extractor = digits_classifier()
    own = torch.cat([each.tensors[0] for each in data.train.values()])  # type: ignore[attr-defined]
    floor = frechet_distance(moments(extractor, own), moments(extractor, data.test.tensors[0]))  # type: ignore
    notes = (
        f"{args.writers} writers of 20 images, delta {DELTA:g}, one user's data set emptied; {args.seeds} seeds, mean "
        f"± standard deviation. FedAvg-GAN: {args.rounds} rounds of {args.cohort} users drawn without replacement, "
        "Renyi divergences; the others: one release by everyone, exactly. The writers' own images have a distance of "
        f"{floor:.2f}."
    )
    publish(markdown("Frechet distance under privacy for users", ["epsilon", *names], rows, notes), args.output)


def _told(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"


if __name__ == "__main__":
    main()
