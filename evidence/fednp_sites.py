"""FedNP's site updates in closed form and by quadrature: a round of all clients at once, and a client with its steps.

OMP_NUM_THREADS=1 python -m evidence.fednp_sites --output evidence/results/fednp_sites.md
OMP_NUM_THREADS=1 python -m evidence.fednp_sites --latent 16 --output evidence/results/fednp_sites_16.md
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from benchmarks.side_by_side import interleaved, markdown, options, publish
from evidence.tilted_moments import BOUND, reference
from lit_epgan.bayes import GaussianFactor, tilted_moments, tilted_moments_quadrature
from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules.images import ImageDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import FedAvg, FedNP
from lit_epgan.modules.supervised import Classifier
from lit_epgan.networks.mlp import MLPBackbone

Moments = Callable[..., tuple[Tensor, ...]]
POINTS = {100: "639", 1_000: "650", 10_000: "721"}  # and the paper's milliseconds
TOGETHER = 100  # rounds of the fast methods in one turn
CLOSED = "closed form, 3 terms"
QUADRATURE = "quadrature, 100 points"


class Sites:
    """q = p0 prod_k g_k with a site for every client, one stacked pair of tensors (K, ...); they begin uniform, so q
    begins as p0 (...)."""

    def __init__(self, prior: GaussianFactor, clients: int) -> None:
        self.clients, self.posterior = clients, prior
        self.factors = GaussianFactor.uniform(torch.stack([prior.precision] * clients))

    def site(self, k: int) -> GaussianFactor:
        """g_k."""
        return GaussianFactor(self.factors.precision[k], self.factors.precision_mean[k])

    def cavity(self, k: int) -> GaussianFactor:
        """q / g_k."""
        return self.posterior / self.site(k)

    @property
    def cavities(self) -> GaussianFactor:
        """All clients' cavities (K, ...)."""
        return self.posterior / self.factors

    def update(self, k: int, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """Put client k's new site into q."""
        step = self._step(tilted, damping)
        self.posterior = self.posterior * step
        self.factors.precision[k] += step.precision
        self.factors.precision_mean[k] += step.precision_mean

    def update_all(self, tilted: GaussianFactor, damping: float = 1.0) -> None:
        """Parallel EP: all clients' tilted distributions (K, ...), formed with the same q, at once."""
        step = self._step(tilted, damping)
        self.posterior = self.posterior * GaussianFactor(step.precision.sum(0), step.precision_mean.sum(0))
        self.factors = self.factors * step

    def _step(self, tilted: GaussianFactor, damping: float) -> GaussianFactor:
        """(tilted / q)^d."""
        whole = tilted / self.posterior
        return whole if damping == 1 else whole**damping


def slopes(clients: int) -> Tensor:
    """f ~ N(0, 4) for every client (clients, 1)."""
    return 2 * torch.randn(clients, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def one_round(q: Sites, f: Tensor, moments: Moments) -> GaussianFactor:
    """All clients' sites renewed at once; their cavities (clients, latent)."""
    cavities = q.cavities
    _, mean, variance = moments(*cavities.moments, f)
    q.update_all(GaussianFactor.from_moments(mean, variance))
    return cavities


def some_rounds(q: Sites, f: Tensor, moments: Moments, rounds: int) -> None:
    """One round alone would be timed with the caches that the method before it leaves behind."""
    for _ in range(rounds):
        one_round(q, f, moments)


def fresh(clients: int, latent: int) -> Sites:
    """z ~ N(0, I) without any site."""
    like = torch.zeros(latent, dtype=torch.float64)
    return Sites(GaussianFactor(torch.ones_like(like), like), clients)


def errors(moments: Moments, f: Tensor, latent: int, rounds: int) -> tuple[float, float]:
    """Largest error of mean (in cavity standard deviations) and variance (relative) in all rounds."""
    q, worst = fresh(len(f), latent), (0.0, 0.0)
    for _ in range(rounds):
        cavity = one_round(q, f, moments)
        mean, variance, slope = (t.flatten() for t in (cavity.mean, cavity.variance, f.expand(-1, latent)))
        exact_mean, exact_variance = reference(mean, variance, slope)
        _, found_mean, found_variance = moments(mean, variance, slope)
        of_mean = float(((found_mean - exact_mean).abs() / variance.sqrt()).max())
        worst = (max(worst[0], of_mean), max(worst[1], float((found_variance / exact_variance - 1).abs().max())))
    return worst


class RoundSeconds(Callback):
    """Processor time of each round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *_: Any) -> None:
        self._begin = time.process_time()

    def on_train_epoch_end(self, *_: Any) -> None:
        self.seconds.append(time.process_time() - self._begin)


def client_update(algorithm: Algorithm) -> float:
    """Processor seconds of a client: ten, 20 local steps each of the digits' classifier, after a first round."""
    module = Classifier(MLPBackbone(hidden=[64]), nn.Linear(64, 10))
    data = ImageDataModule(partition="iid", clients=10, batch_size=16, local_steps=20)
    clock = RoundSeconds()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    callbacks = [FederationCallback(algorithm), clock]
    trainer = Trainer(max_epochs=2, accelerator="cpu", limit_val_batches=0, callbacks=callbacks, **quiet)
    trainer.fit(module, datamodule=data)
    return clock.seconds[1] / 10


def client_updates(candidates: dict[str, Algorithm], repeats: int) -> dict[str, float]:
    """Medians of interleaved repetitions."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(repeats):
        for name, algorithm in candidates.items():
            seconds[name].append(client_update(algorithm))
    return {name: statistics.median(own) for name, own in seconds.items()}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--latent", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--updates", type=int, default=5, help="repetitions of the clients' updates")
    args = parser.parse_args()
    methods: dict[str, Moments] = {f"closed form, {t} terms": partial(tilted_moments, terms=t) for t in (3, 4, 5)}
    together = dict.fromkeys(methods, TOGETHER)
    algorithms: dict[str, Algorithm] = {"FedAvg": FedAvg(), CLOSED: FedNP("backbone", "head", terms=3)}
    for points in POINTS:
        name = f"quadrature, {points} points"
        methods[name] = partial(tilted_moments_quadrature, points=points)
        together[name] = max(1, TOGETHER * 100 // points)
        algorithms[name] = FedNP("backbone", "head", moments="quadrature", points=points)
    f = slopes(args.clients)
    candidates = {
        name: partial(some_rounds, fresh(args.clients, args.latent), f, own, together[name])
        for name, own in methods.items()
    }
    turns = interleaved(candidates, args.repeats, clock=time.process_time)
    seconds = {name: own / together[name] for name, own in turns.items()}
    updates = {name: f"{1e3 * own:.0f}" for name, own in client_updates(algorithms, args.updates).items()}
    published = {CLOSED: "306", **{f"quadrature, {points} points": paper for points, paper in POINTS.items()}}
    rows = [["FedAvg", "", "", "", "", updates["FedAvg"], ""]]
    for name, moments in methods.items():
        worst = errors(moments, f, args.latent, args.rounds)
        cells = [
            f"{1e3 * seconds[name]:.2f}",
            f"{seconds[QUADRATURE] / seconds[name]:.3g}",
            *(f"{e:.0e}" for e in worst),
        ]
        rows.append([name, *cells, updates.get(name, ""), published.get(name, "")])
    header = [
        "",
        "a round, ms",
        "**times faster**",
        "error of mean",
        "of variance",
        "a client's update, ms",
        "paper, ms",
    ]
    notes = (
        f"A round of site updates: {args.clients} clients x latent dimension {args.latent} at once, float64, "
        f"f ~ N(0, 4), processor time, medians of {args.repeats} interleaved turns of {TOGETHER} rounds, of fewer "
        "where there are more than 100 points; largest error over "
        f"{args.rounds} rounds, of the mean in cavity standard deviations, of the variance relative, against the "
        "trapezoidal rule with 2,000 "
        "points. A client's update: 20 local steps of the digits' classifier (MLP) and its report, medians of "
        f"{args.updates} interleaved repetitions. Beside it the FedNP paper's table 6 (ResNet-18, GPU). Bar: 5 times "
        f"faster than 100 points at errors of at most {BOUND:g}."
    )
    publish(markdown("FedNP's site updates", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
