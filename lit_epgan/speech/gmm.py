"""Gaussian mixtures of the phone states, trained on alignments: what leaves a client are sums, and no audio."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed
from lit_epgan.speech.frames import Frames
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.phones import PDFS, SELF_LOOP_SCALE, Lexicon, PhoneModels

PERTURBATION, POWER, LEAST_COUNT = 0.01, 0.2, 20.0  # as in Kaldi's recipes
LEAST_OCCUPANCY, LEAST_VARIANCE, LEAST_WEIGHT = 3.0, 1e-3, 1e-5
ACOUSTIC_SCALE = 0.1  # Kaldi's recipes'
RETRY_BEAM = 4  # times the beam
SETTLING = 6  # iterations at the end in which no Gaussian is split
FEWEST = SETTLING + 2  # iterations with which any is
REALIGN = (1, 2, 3, 4, 6, 8, 10, 12)  # iterations, as in Kaldi's recipes; after them every third


def split_targets(occupancy: Sequence[float], wanted: int) -> list[int]:
    """Gaussians of each mixture when all have ``wanted``: the next one goes where occupancy^.2 / Gaussians is highest.

    A mixture of which every Gaussian would have no more than 20 frames gets no further one, as in Kaldi; nor is there
    one to get when all are such.
    """
    targets = [1] * len(occupancy)
    queue = [(-(frames**POWER), j) for j, frames in enumerate(occupancy)]
    heapq.heapify(queue)
    total = len(targets)
    while total < wanted and queue:
        _, j = heapq.heappop(queue)
        if (targets[j] + 1) * LEAST_COUNT < occupancy[j]:
            targets[j] += 1
            total += 1
            heapq.heappush(queue, (-(occupancy[j] ** POWER) / targets[j], j))
    return targets


def split(mixture: Any, target: int, rng: np.random.Generator) -> None:
    """Halve the heaviest Gaussian until there are so many; its halves' means lie .01 r s to either side, r ~ N(0, I).

    The mixture is Kaldi's, and is changed in place. Kaldi's own splitting takes a seed that is not ours to choose, and
    so no two alignments of a corpus would be alike.
    """
    weights, means, inverse = (
        np.array(part, np.float64) for part in (mixture.weights, mixture.means, mixture.inv_vars)
    )
    while len(weights) < target:
        heaviest = int(weights.argmax())
        weights[heaviest] /= 2
        step = PERTURBATION * rng.standard_normal(means.shape[1]) / np.sqrt(inverse[heaviest])
        weights, inverse = np.append(weights, weights[heaviest]), np.vstack([inverse, inverse[heaviest]])
        means = np.vstack([means, means[heaviest] + step])
        means[heaviest] -= step
    mixture.resize(len(weights), means.shape[1])
    _fill(mixture, weights, means, inverse)


@dataclass
class MixtureStatistics:
    """What a client reports of its frames: sums, so that clients' statistics add up to those of all their audio.

    Attributes:
        occupancy: of every Gaussian (G,).
        first, second: sums of posterior times x and x^2 (G, D).
        transitions: how often each transition was taken (T + 1,).
        log_likelihood: sum over frames.
        frames: their number.
    """

    occupancy: NDArray[np.float64]
    first: NDArray[np.float64]
    second: NDArray[np.float64]
    transitions: NDArray[np.float64]
    log_likelihood: float = 0.0
    frames: int = 0

    def __add__(self, other: "MixtureStatistics") -> "MixtureStatistics":
        return MixtureStatistics(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Mixtures:
    """A mixture of Gaussians with diagonal covariances for every pdf; Kaldi's own object within. Every pdf begins as
    the one Gaussian of all frames' mean and variance (D,) (a flat start)."""

    def __init__(self, mean: NDArray[np.float64], variance: NDArray[np.float64]) -> None:
        self.model = speech_package("kaldi_hmm_gmm").AmDiagGmm()
        for _ in range(PDFS):
            self.model.add_pdf(_mixture(np.ones(1), mean[None], 1 / variance[None]))

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "Mixtures":
        dimension = state["means"].shape[1]
        mixtures = cls(np.zeros(dimension), np.ones(dimension))
        mixtures.model = speech_package("kaldi_hmm_gmm").AmDiagGmm()
        sizes = state["sizes"].tolist()
        parts = zip(*(state[name].split(sizes) for name in ("weights", "means", "inv_vars")), strict=True)
        for weights, means, inverse in parts:
            mixtures.model.add_pdf(_mixture(weights.numpy(), means.numpy(), inverse.numpy()))
        return mixtures

    def state(self) -> dict[str, Tensor]:
        """All Gaussians, pdf by pdf: weights (G,), means and inverse variances (G, D), and sizes (pdfs,)."""
        mixtures = [self.model.get_pdf(j) for j in range(PDFS)]
        return {
            "sizes": torch.tensor([each.num_gauss for each in mixtures]),
            "weights": torch.from_numpy(np.concatenate([each.weights for each in mixtures])),
            "means": torch.from_numpy(np.concatenate([each.means for each in mixtures])),
            "inv_vars": torch.from_numpy(np.concatenate([each.inv_vars for each in mixtures])),
        }

    @property
    def gaussians(self) -> int:
        return int(self.model.num_gauss)

    def statistics(
        self, utterances: list[Frames], alignments: list[list[int]], phones: PhoneModels
    ) -> MixtureStatistics:
        """The E-step on one client's cepstra (frames, D), given which transition of ``phones`` each frame belongs to.

        An utterance without an alignment is left out.
        """
        kept = [(x, a) for x, a in zip(utterances, alignments, strict=True) if a]
        sizes = [self.model.num_gauss_in_pdf(j) for j in range(PDFS)]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        dimension = self.model.dim
        total = MixtureStatistics(
            np.zeros(offsets[-1]),
            np.zeros((offsets[-1], dimension)),
            np.zeros((offsets[-1], dimension)),
            np.zeros(phones.transitions.num_transition_ids + 1),
        )
        if not kept:
            return total
        frames = np.concatenate([x for x, _ in kept]).astype(np.float64)
        path = np.concatenate([a for _, a in kept])
        np.add.at(total.transitions, path, 1.0)
        total.frames = len(frames)
        pdf = phones.pdfs[path - 1]
        for j in np.unique(pdf):
            x, rows = frames[pdf == j], slice(offsets[j], offsets[j + 1])
            posteriors, log_likelihood = _posteriors(self.model.get_pdf(int(j)), x)
            total.occupancy[rows] = posteriors.sum(0)
            total.first[rows], total.second[rows] = posteriors.T @ x, posteriors.T @ x**2
            total.log_likelihood += log_likelihood
        return total

    def learn(self, statistics: MixtureStatistics, gaussians: int | None = None) -> None:
        """The M-step on all clients' statistics, then more Gaussians where there are many frames.

            weight = n_g / sum n,   mean = first / n_g,   variance = second / n_g - mean^2, at least .001

        A Gaussian of fewer than ``LEAST_OCCUPANCY`` frames keeps its mean and variance. ``statistics`` are their sum,
        ``gaussians`` how many are wanted in all mixtures together; without it there are as many as before.
        """
        row, occupancy = 0, []
        for j in range(PDFS):
            mixture = self.model.get_pdf(j)
            rows = slice(row, row + mixture.num_gauss)
            row = rows.stop
            n = statistics.occupancy[rows]
            occupancy.append(n.sum())
            if n.sum() < LEAST_OCCUPANCY:
                continue
            enough = (n >= LEAST_OCCUPANCY)[:, None]
            safe = np.maximum(n, LEAST_OCCUPANCY)[:, None]
            mean = statistics.first[rows] / safe
            variance = np.maximum(statistics.second[rows] / safe - mean**2, LEAST_VARIANCE)
            weights = np.maximum(n / n.sum(), LEAST_WEIGHT)
            inverse = np.where(enough, 1 / variance, mixture.inv_vars)
            _fill(mixture, weights / weights.sum(), np.where(enough, mean, mixture.means), inverse)
        if gaussians is not None:
            rng = np.random.default_rng(derive_seed(0, "split", gaussians))
            for j, target in enumerate(split_targets(occupancy, gaussians)):
                if (mixture := self.model.get_pdf(j)).num_gauss < target:
                    split(mixture, target, rng)

    def decodable(self, cepstra: Frames, phones: PhoneModels, scale: float) -> Any:
        """What Kaldi's decoders read of an utterance's cepstra (frames, D), likelihoods to the power ``scale``."""
        khg = speech_package("kaldi_hmm_gmm")
        return khg.DecodableAmDiagGmmScaled(self.model, phones.transitions, cepstra, scale)


def _mixture(weights: NDArray, means: NDArray, inverse_variances: NDArray) -> Any:
    mixture = speech_package("kaldi_hmm_gmm").DiagGmm(*means.shape)
    _fill(mixture, weights, means, inverse_variances)
    return mixture


def _fill(mixture: Any, weights: NDArray, means: NDArray, inverse_variances: NDArray) -> None:
    mixture.set_weights(weights.astype(np.float32))
    mixture.set_invvars_and_means(inverse_variances.astype(np.float32), means.astype(np.float32))
    mixture.compute_gconsts()


def _posteriors(mixture: Any, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Posteriors (n, G) of the mixture's Gaussians for frames x (n, D), and the sum of the log likelihoods."""
    log = mixture.gconsts + x @ mixture.means_invvars.T - 0.5 * x**2 @ mixture.inv_vars.T
    highest = log.max(1, keepdims=True)
    likelihood = np.exp(log - highest)
    total = likelihood.sum(1, keepdims=True)
    return likelihood / total, float((highest + np.log(total)).sum())


@dataclass
class AlignedClient:
    """One client's cepstra (frames, 39) and the training graph of each utterance, with the alignments that never leave
    it: the transition of each frame, empty where no path was found."""

    cepstra: Sequence[Frames]
    graphs: Sequence[Any]
    alignments: list[list[int]] = field(default_factory=list)

    def align_equally(self) -> None:
        """Each utterance's states share its frames equally."""
        kaldifst = speech_package("kaldifst")
        self.alignments = []
        for number, (graph, x) in enumerate(zip(self.graphs, self.cepstra, strict=True)):
            found, path = kaldifst.equal_align(graph, len(x), number + 1, 10)
            self.alignments.append(list(kaldifst.get_linear_symbol_sequence(path)[1]) if found else [])

    def align(self, mixtures: Mixtures, phones: PhoneModels, beam: float = 10.0) -> None:
        """The best path of each utterance; one that fails keeps the alignment it had."""
        paths = [
            aligned(graph, mixtures.decodable(x, phones, ACOUSTIC_SCALE), phones, beam)
            for graph, x in zip(self.graphs, self.cepstra, strict=True)
        ]
        before = self.alignments or [[] for _ in paths]
        self.alignments = [path or old for path, old in zip(paths, before, strict=True)]


def aligned(graph: Any, decodable: Any, phones: PhoneModels, beam: float = 10.0) -> list[int]:
    """The transitions of the best path through a training graph; empty if none was found."""
    khg = speech_package("kaldi_hmm_gmm")
    weighted = graph.copy()  # the probabilities are added in place
    khg.add_transition_probs(
        trans_model=phones.transitions,
        disambig_syms=[],
        transition_scale=1.0,
        self_loop_scale=SELF_LOOP_SCALE,
        fst=weighted,
    )
    config = khg.AlignConfig(beam, RETRY_BEAM * beam, False)
    result = khg.align_utterance_wrapper(config, "", ACOUSTIC_SCALE, weighted, decodable, 0, 0, 0, 0.0, 0)
    return list(result[5])


def training_graphs(lexicon: Lexicon, phones: PhoneModels, texts: Sequence[str]) -> list[Any]:
    """The graph of all state sequences of each text."""
    khg = speech_package("kaldi_hmm_gmm")
    options = khg.TrainingGraphCompilerOptions(0.0, 0.0, True)
    plain = lexicon.transducer(disambiguated=False)
    compiler = khg.TrainingGraphCompiler(phones.transitions, phones.tree, plain, lexicon.disambiguation, options)
    return [compiler.compile_graph_from_text(lexicon.numbers(text)) for text in texts]


def train_mixtures(
    clients: Sequence[AlignedClient], phones: PhoneModels, iterations: int = 24, gaussians: int = 1000
) -> Mixtures:
    """Viterbi training from a flat start; what leaves a client are sums.

    In each iteration every client aligns its own audio (at first often, later seldom), takes its
    statistics and forgets nothing; the server adds them up, updates mixtures and transition probabilities, and until
    six iterations before the end splits Gaussians.

    Args:
        clients: they end with the alignments of the last iteration that made them anew.
        phones: learns its transition probabilities.
        iterations: of expectation and maximisation.
        gaussians: that all mixtures together grow towards, as far as there are iterations: of 1,000 they reach 951
            in 24 iterations.

    Raises:
        UserError: no utterance could be aligned.
    """
    mixtures = flat_start(clients)
    for client in clients:
        client.align_equally()
    growing = max(1, iterations - SETTLING)
    for iteration in range(iterations):
        if iteration in REALIGN or (iteration > max(REALIGN) and iteration % 3 == 0):
            for client in clients:
                client.align(mixtures, phones)
        reports = [mixtures.statistics(list(c.cepstra), c.alignments, phones) for c in clients]
        total = reduce(add, reports)
        if total.frames == 0:
            raise UserError("no utterance could be aligned with its text: check that texts and audio belong together.")
        phones.learn(total.transitions)
        wanted = PDFS + (gaussians - PDFS) * iteration // growing
        mixtures.learn(total, max(PDFS, wanted) if iteration < growing else None)
    return mixtures


def flat_start(clients: Sequence[AlignedClient]) -> Mixtures:
    """One Gaussian everywhere: mean and variance of all frames, from sums over clients."""
    n = sum(len(x) for client in clients for x in client.cepstra)
    first = sum(x.sum(0, dtype=np.float64) for client in clients for x in client.cepstra)
    second = sum((x.astype(np.float64) ** 2).sum(0) for client in clients for x in client.cepstra)
    mean = np.asarray(first / n)
    return Mixtures(mean, np.asarray(second / n) - mean**2)
