"""What is measured in ``memorisation.py``: two trainings of a seed, what they give to others, and attacks on it."""

import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from scipy.stats import norm
from torch import Tensor, nn

from evidence.attacks import (
    auc,
    by_inner_product,
    by_least_squares,
    by_nearest,
    by_search,
    copying_score,
    nearer_to_training,
    true_positive_rate,
)
from lit_epgan.bayes.factor import SENSITIVITY
from lit_epgan.callbacks import FederationCallback
from lit_epgan.cli.lightning_cli import FederatedCLI
from lit_epgan.federated.function_space.generator_sites import SITE, SiteTensors, known_sites
from lit_epgan.lib.randomness import generator_for
from lit_epgan.networks.average import frozen_copy
from lit_epgan.privacy import GaussianMechanism
from lit_epgan.runs.config_files import resolve_configs

B = ["--config", "digits_generator_sites.yaml"]
C = [*B, "--config", "algorithms/embedding_sites.yaml", "--model.lr", "1e-3"]
QUIET = [
    *("--trainer.callbacks", "[]", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false"),
    *("--trainer.enable_progress_bar", "false", "--data.split", "by_seed"),
]
COPIES, FRESH = "the training images (all copies)", "test images (control)"
Found = dict[str, dict[str, float]]  # by what is seen or how it is attacked, by measure
Phi = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a seed's trainings and of what is looked at.

    Attributes:
        rounds, warmup_steps, local_steps: of both trainings; a client's steps in the first round and in a later one.
        samples: of each client's generator; of the federation's generator as many as of all clients together.
        compared: samples whose nearest images are looked for.
        draws: of training images, and of the releases' noise.
        noise: noise multipliers of a release.
        herding_steps, search_steps: of the points of C, and of the search through a generator.
    """

    rounds: int
    warmup_steps: int
    local_steps: int
    samples: int
    compared: int
    draws: int
    noise: tuple[float, ...]
    herding_steps: int
    search_steps: int


@dataclass
class Images:
    """Each client's training images and the test images of its digit, as rows (n, 64) in double precision."""

    train: list[Tensor]
    test: list[Tensor]

    @property
    def halves(self) -> tuple[list[Tensor], list[Tensor]]:
        """Every other test image of each digit, and the rest."""
        return [part[::2] for part in self.test], [part[1::2] for part in self.test]


class Generator(NamedTuple):
    """A generator as others have it, noise (n, latent_dim), and its samples of that noise (n, 64)."""

    network: nn.Module
    noise: Tensor
    samples: Tensor


@dataclass
class Given(Callback):
    """Keeps what others are given in a run, when training ends.

    Attributes:
        n: samples of each client's generator; of the federation's generator as many in all.
        sites: each client's generator, where they are given.
        generator: the federation's.
        herded: points, where there are any.
        phi: the features whose sums clients release, where they do.
    """

    n: int
    sites: list[Generator] = field(default_factory=list)
    generator: Generator | None = None
    herded: Tensor | None = None
    phi: Phi | None = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))  # type: ignore[attr-defined]
        server, tensors = callback.server, SiteTensors(pl_module, "average")
        self.generator = sampled(pl_module, self.n * server.clients, server.seed)
        for k in known_sites(server):
            tensors.load(server.state[f"{SITE}{k}"])
            self.sites.append(sampled(pl_module, self.n, server.seed, k))
        if hasattr(callback.algorithm, "release"):
            release = callback.algorithm.release
            self.herded, self.phi = rows(release.herded(server.state)), release.phi


def sampled(module: Any, n: int, *stream: int) -> Generator:
    """A copy of the module's evaluated generator as it is now, and n samples."""
    network = frozen_copy(module.average).eval()
    noise = torch.randn(n, module.latent_dim, generator=generator_for("attacked", *stream))
    with torch.no_grad():
        return Generator(network, noise, rows(network(noise)))


class Watched(FederatedCLI):
    """A run from its configuration, with one callback more."""

    def __init__(self, words: list[str], given: Given) -> None:
        self.given = given
        super().__init__(resolve_configs(["fit", *words]))

    def before_fit(self) -> None:
        """Add it."""
        self.trainer.callbacks.append(self.given)  # type: ignore[attr-defined]


def rows(images: Tensor) -> Tensor:
    return images.flatten(1).double()


def trained(words: list[str], sizes: Sizes, seed: int) -> tuple[Given, Images]:
    """What a run gives to others, and the images that it trained on and did not."""
    steps = ["--data.warmup_steps", sizes.warmup_steps, "--data.local_steps", sizes.local_steps]
    with tempfile.TemporaryDirectory() as folder:
        where = ["--trainer.max_epochs", sizes.rounds, "--trainer.default_root_dir", folder]
        run = Watched(
            [str(word) for word in (*words, *QUIET, *steps, *where, "--seed_everything", seed)], Given(sizes.samples)
        )
    data = run.datamodule.data
    train = [_all(each) for each in data.train.values()]
    test, labels = data.test.fetch(list(range(len(data.test))))
    digits = [int(each[1][0]) for each in train]
    return run.given, Images([rows(x) for x, _ in train], [rows(test[labels == digit]) for digit in digits])


def _all(dataset: Any) -> tuple[Tensor, Tensor]:
    images, labels = dataset.fetch(list(range(len(dataset))))
    return images, labels


# Samples --------------------------------------------------------------------------------------------------------------


def seen_in(samples: Sequence[Tensor], images: Images, sizes: Sizes, seed: int) -> dict[str, float]:
    """Memorisation and membership by samples, those that an attacker on each client's images looks at.

    Args:
        samples: for each client (n, 64); of those that are the same for all one copy is counted.
        images: the records.
        sizes: how many are compared, and how often training images are drawn.
        seed: of these draws.
    """
    distinct = samples[:1] if all(each is samples[0] for each in samples) else samples
    some = torch.cat([each[: -(-sizes.compared // len(distinct))] for each in distinct])
    near = nearer_to_training(some, images.train, images.test, generator_for(seed, "draws"), sizes.draws)
    score = copying_score(some, images.train, torch.cat(images.test))
    scored = [
        (by_nearest(train, each), by_nearest(test, each))
        for train, test, each in zip(images.train, images.test, samples, strict=True)
    ]
    return {"nearer": near.share, "ratio": near.ratio, "C_T": score} | attack(in_medians(scored))


def in_medians(scored: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Scores by distance, each client's in its candidates' median, so that one threshold suits all."""
    medians = [(pair, float(torch.cat(pair).median().abs()) or 1.0) for pair in scored]
    return [(members / median, others / median) for (members, others), median in medians]


def attack(scored: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The mean over clients of the AUC; how many are found at 1 % of false alarms, by one threshold for all."""
    members, others = (torch.cat([pair[side] for pair in scored]) for side in (0, 1))
    return {"AUC": statistics.fmean(auc(*pair) for pair in scored), "found": true_positive_rate(members, others)}


def searched(generators: Sequence[Generator], images: Images, steps: int) -> dict[str, float]:
    """Membership by a search through the generator that an attacker on each client's images has."""
    scored = [
        (by_search(train.float(), network, noise, steps), by_search(test.float(), network, noise, steps))
        for train, test, (network, noise, _) in zip(images.train, images.test, generators, strict=True)
    ]
    return attack(in_medians(scored))


def by_samples(sizes: Sizes, seed: int) -> tuple[Found, Given, Images]:
    """Of all generators and points of a seed."""
    herding = ["--federation.algorithm.herding_steps", str(sizes.herding_steps)]
    (b, images), (c, _) = trained(B, sizes, seed), trained([*C, *herding], sizes, seed)
    assert b.generator is not None
    assert c.generator is not None
    assert c.herded is not None
    clients, (some, rest) = len(images.train), images.halves
    found = {COPIES: seen_in(images.train, images, sizes, seed)}
    found[FRESH] = seen_in(some, Images(images.train, rest), sizes, seed)
    for name, generators in {
        "each client's generator, B (union of sites)": b.sites,
        "generator after the last round, B": [b.generator] * clients,
        "generator after the last round, C": [c.generator] * clients,
    }.items():
        found[name] = seen_in([each.samples for each in generators], images, sizes, seed)
        found[f"{name}: searched"] = searched(generators, images, sizes.search_steps)
    found["herded points, C"] = seen_in([c.herded] * clients, images, sizes, seed)
    return found, c, images


# Embeddings -----------------------------------------------------------------------------------------------------------


def by_embeddings(phi: Phi, images: Images, z: float, sizes: Sizes, seed: int) -> Found:
    """Attacks on the sums that clients release with noise z, and on these sums' sum: means over draws of the noise."""
    members, others = (features(phi, part) for part in (images.train, images.test))
    sigma, mechanism, draws = z * SENSITIVITY, GaussianMechanism(z, noise_seed=seed), sizes.draws if z else 1
    sums = [
        torch.stack([mechanism.release(own.sum(0), SENSITIVITY, "draw", draw, k) for draw in range(draws)])
        for k, own in enumerate(members)
    ]
    clients, noise_of_all = list(zip(members, others, sums, strict=True)), sigma * math.sqrt(len(sums))
    everyone = torch.cat(members), torch.cat(others), torch.stack(sums).sum(0)
    found = {
        "inner product, a client's sum": [inner(*client) for client in clients],
        "least squares, a client's sum": [squares(*client, sigma) for client in clients],
        "least squares, the sum over clients": [squares(*everyone, noise_of_all)],
    }
    means = {name: over_draws(scored) for name, scored in found.items()}
    return means | {"bound: all other records known, a client's release": bound(z)}


@torch.no_grad()
def features(phi: Phi, parts: Sequence[Tensor]) -> list[Tensor]:
    """Of each client's images (n, 64) the features (n, D)."""
    return [phi(x.float().unflatten(1, (1, 8, 8))).double() for x in parts]


def inner(members: Tensor, others: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (draws, n) of who knows half of the test images to be none of the client's."""
    reference, means = others[::2].mean(0), totals / len(members)
    inside, outside = (
        torch.stack([by_inner_product(x, mean, reference) for mean in means]) for x in (members, others[1::2])
    )
    return inside, outside


def squares(members: Tensor, others: Tensor, totals: Tensor, sigma: float) -> tuple[Tensor, Tensor]:
    """Scores (draws, n) of who holds all images and does not know which of them are the client's."""
    share = len(members) / (len(members) + len(others))
    scores = by_least_squares(torch.cat([members, others]), totals, share, sigma)
    return scores[:, : len(members)], scores[:, len(members) :]


def over_draws(scored: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Means of what an attack finds, from each client's scores (draws, n) of members and others."""
    found = [attack([(members[d], others[d]) for members, others in scored]) for d in range(len(scored[0][0]))]
    return {measure: statistics.fmean(each[measure] for each in found) for measure in found[0]}


def bound(z: float) -> dict[str, float]:
    """Of every attack on one release of the Gaussian mechanism: two Gaussians 1 / z standard deviations apart."""
    if not z:
        return {"AUC": 1.0, "found": 1.0}
    return {"AUC": float(norm.cdf(1 / (z * math.sqrt(2)))), "found": float(norm.cdf(norm.ppf(0.01) + 1 / z))}
