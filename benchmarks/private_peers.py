"""DP-SGD against Opacus, and DP-FedAvg against pfl: same model, data and noise, in one run; accuracies and seconds.

pip install opacus; pip install --no-deps --target PEER pfl multiprocess dill prv-accountant  # it pins dp-accounting
OMP_NUM_THREADS=1 PYTHONPATH=PEER python benchmarks/private_peers.py --output benchmarks/results/private_peers.md

Where pfl is not installed, its rows are left out, and the notes say so.
"""

import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from opacus_peer import opacus, opacus_epsilon, opacus_in_trainer
from private_task import (
    BATCH,
    BOUND,
    COHORT,
    DELTA,
    EPOCHS,
    EPSILON,
    IMAGES,
    LOCAL_RATE,
    NOISE,
    NORM,
    RATE,
    RECORDS,
    ROUNDS,
    WRITERS,
    Result,
    Stopwatch,
    accuracy,
    classifier,
    digits,
    trainer,
)
from side_by_side import markdown, options, publish
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule, WritersDataModule
from lit_epgan.engine import Mechanism
from lit_epgan.modules import Classifier
from lit_epgan.privacy import CentralNoise, RecordNoise, Releases, noise_multiplier_for, spent


def federated(
    seed: int, data: FederatedDataModule, lr: float, rounds: int, mechanism: Mechanism, side_by_side: bool = False
) -> tuple[Any, float]:
    watch, module = Stopwatch(), classifier(seed, lr)
    trainer(rounds, FederationCallback(mechanism=mechanism, side_by_side=side_by_side), watch).fit(
        module, datamodule=data
    )
    return module.eval(), watch.seconds


# One client's records -------------------------------------------------------------------------------------------------


def ours(seed: int, z: float, train: TensorDataset, test: TensorDataset) -> Result:
    data = FederatedDataModule.from_datasets([train], batch_size=BATCH, seed=seed)
    mechanism = RecordNoise(BOUND, z, delta=DELTA)
    module, seconds = federated(seed, data, RATE, EPOCHS, mechanism)
    return accuracy(module, test), seconds


# Many users -----------------------------------------------------------------------------------------------------------


def writers(seed: int) -> WritersDataModule:
    data = WritersDataModule(WRITERS, IMAGES, clients_per_round=COHORT, batch_size=10, local_epochs=1, seed=seed)
    _ = data.data
    return data


def our_fedavg(seed: int, side_by_side: bool) -> Result:
    data = writers(seed)
    mechanism = CentralNoise(NORM, NOISE, delta=DELTA)
    module, seconds = federated(seed, data, LOCAL_RATE, ROUNDS, mechanism, side_by_side)
    return accuracy(module, data.data.test), seconds  # type: ignore[arg-type]


class ForPfl(nn.Module):
    """The classifier as pfl wants it."""

    def __init__(self, module: Classifier) -> None:
        super().__init__()
        self.network = nn.Sequential(module.backbone, module.head)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return F.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
        return {}


def pfl_fedavg(seed: int) -> Result:
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    np.random.seed(seed)
    data = writers(seed).data
    generator = torch.Generator().manual_seed(seed)

    def shuffled(name: str) -> Dataset:
        order = torch.randperm(IMAGES, generator=generator)
        return Dataset([tensor[order] for tensor in data.train[name].tensors], user_id=name)  # type: ignore[attr-defined]

    def cohorts() -> Iterator[str]:
        names = list(data.train)
        while True:
            yield from (names[k] for k in torch.randperm(len(names), generator=generator)[:COHORT].tolist())

    users = cohorts()
    module = ForPfl(classifier(seed, LOCAL_RATE))
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    noise = CentrallyAppliedPrivacyMechanism(GaussianMechanism(NORM, NOISE))
    train = FederatedDataset(shuffled, lambda: next(users))
    backend = SimulatedBackend(train, train, postprocessors=[noise])
    start = time.process_time()
    FederatedAveraging().run(
        NNAlgorithmParams(ROUNDS, 10**9, COHORT, 0),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=10, local_num_epochs=1, local_learning_rate=LOCAL_RATE, local_max_grad_norm=None
        ),
        NNEvalHyperParams(local_batch_size=None),
        send_metrics_to_platform=False,
    )
    return accuracy(module.eval(), data.test), time.process_time() - start  # type: ignore[arg-type]


# Side by side ---------------------------------------------------------------------------------------------------------


def compared(candidates: dict[str, Callable[[int], Result]], seeds: int) -> dict[str, list[Result]]:
    """Every candidate's results, one seed after another, candidates in turn; a first turn is not counted."""
    results: dict[str, list[Result]] = {name: [] for name in candidates}
    for seed in range(-1, seeds):
        for name, run in candidates.items():
            result = run(max(seed, 0))
            if seed >= 0:
                results[name].append(result)
    return results


def rows(results: dict[str, list[Result]], guarantee: str) -> list[list[str]]:
    peer = statistics.median(seconds for _, seconds in list(results.values())[-1])
    found = []
    for name, own in results.items():
        accuracies, seconds = zip(*own, strict=True)
        spread = f"{statistics.fmean(accuracies):.3f} ± {statistics.stdev(accuracies):.3f}"
        median = statistics.median(seconds)
        found.append([name, guarantee, spread, f"{median:.2f}", f"{median / peer:.2f}"])
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="at least two")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("pfl").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    steps = EPOCHS * RECORDS // BATCH
    kind = Releases(1.0, steps, "poisson", BATCH / RECORDS, unit="record")
    z = noise_multiplier_for(EPSILON, DELTA, lambda z: [kind.with_noise(z, steps)])
    train, test = digits()
    by_record: dict[str, Callable[[int], Result]] = {
        "RecordNoise, a federation of one client": lambda seed: ours(seed, z, train, test),
        "Opacus in a Lightning Trainer": lambda seed: opacus_in_trainer(seed, z, train, test),
        "Opacus in a plain loop": lambda seed: opacus(seed, z, train, test),
    }
    table = rows(compared(by_record, args.seeds), f"records, epsilon {EPSILON:g}")
    by_user: dict[str, Callable[[int], Result]] = {
        "CentralNoise": lambda seed: our_fedavg(seed, side_by_side=False),
        "CentralNoise, side_by_side": lambda seed: our_fedavg(seed, side_by_side=True),
        "pfl, GaussianMechanism": pfl_fedavg,
    }
    try:
        import pfl  # noqa: F401
    except ImportError as error:
        by_user.popitem()
        missing = f" pfl is not installed ({error}): its row is missing."
    else:
        missing = ""
    users = spent([Releases(NOISE, ROUNDS, "fixed", COHORT / WRITERS, WRITERS)], DELTA).epsilon
    table += rows(compared(by_user, args.seeds), f"users, epsilon {users:.3g}")
    prv, rdp = opacus_epsilon(z)
    notes = (
        f"Digits, an MLP with one hidden layer of 64, SGD, delta {DELTA:g}; {args.seeds} seeds, candidates in turn, "
        "mean and standard deviation of the test accuracy, median seconds of processor time of the training alone. "
        f"Records: {RECORDS} of them at one client, {steps} steps at a rate of {BATCH / RECORDS:.4f}, norm {BOUND:g}, "
        f"noise multiplier {z:.4f} by our accountant for epsilon {EPSILON:g} (Opacus's: {prv:.3f} by PRV, {rdp:.3f} by "
        f"Renyi divergences). Coins and noise come from the operating system's source; Opacus's and pfl's from "
        f"generators that can be predicted. Users: {WRITERS} writers, {COHORT} a round, {ROUNDS} "
        f"rounds, norm {NORM:g}, noise multiplier {NOISE:g}. Bars: accuracies within their spread, at most the peer's "
        f"seconds.{missing}"
    )
    header = ["", "guarantee", "accuracy", "seconds", "to the last peer's"]
    publish(markdown("Private training beside its peers", header, table, notes), args.output)


if __name__ == "__main__":
    main()
