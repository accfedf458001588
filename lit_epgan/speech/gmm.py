"""Gaussian mixtures of the phone states: statistics that sum over clients, and what is learnt from their sum."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lit_epgan.randomness import derive_seed
from lit_epgan.speech.features import Frames
from lit_epgan.speech.hmm import PDFS, PhoneModels
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.splitting import split, split_targets

LEAST_OCCUPANCY, LEAST_VARIANCE, LEAST_WEIGHT = 3.0, 1e-3, 1e-5


@dataclass
class Statistics:
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

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class Mixtures:
    """A mixture of Gaussians with diagonal covariances for every pdf; Kaldi's own object within.

    Args:
        mean, variance: of all frames (D,): every pdf begins as that one Gaussian (a flat start).
    """

    def __init__(self, mean: NDArray[np.float64], variance: NDArray[np.float64]) -> None:
        self.model = speech_package("kaldi_hmm_gmm").AmDiagGmm()
        for _ in range(PDFS):
            self.model.add_pdf(_mixture(np.ones(1), mean[None], 1 / variance[None]))

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "Mixtures":
        """What ``state`` was taken of."""
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
        """Their number in all mixtures together."""
        return int(self.model.num_gauss)

    def statistics(self, utterances: list[Frames], alignments: list[list[int]], phones: PhoneModels) -> Statistics:
        """The E-step on one client's frames, given which transition each belongs to.

        Args:
            utterances: cepstra (frames, D).
            alignments: transitions (frames,) of each; an utterance without an alignment has none, and is left out.
            phones: what the transitions are of.
        """
        kept = [(x, a) for x, a in zip(utterances, alignments, strict=True) if a]
        sizes = [self.model.num_gauss_in_pdf(j) for j in range(PDFS)]
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        dimension = self.model.dim
        total = Statistics(
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

    def learn(self, statistics: Statistics, gaussians: int | None = None) -> None:
        """The M-step on all clients' statistics, then more Gaussians where there are many frames.

            weight = n_g / sum n,   mean = first / n_g,   variance = second / n_g - mean^2, at least .001

        A Gaussian of fewer than ``LEAST_OCCUPANCY`` frames keeps its mean and variance.

        Args:
            statistics: their sum.
            gaussians: wanted in all mixtures together; without it there are as many as before.
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
            mixture.set_weights((weights / weights.sum()).astype(np.float32))
            inverse = np.where(enough, 1 / variance, mixture.inv_vars).astype(np.float32)
            mixture.set_invvars_and_means(inverse, np.where(enough, mean, mixture.means).astype(np.float32))
            mixture.compute_gconsts()
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
    mixture.set_weights(weights.astype(np.float32))
    mixture.set_invvars_and_means(inverse_variances.astype(np.float32), means.astype(np.float32))
    mixture.compute_gconsts()
    return mixture


def _posteriors(mixture: Any, x: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Posteriors (n, G) of the mixture's Gaussians for frames x (n, D), and the sum of the log likelihoods."""
    log = mixture.gconsts + x @ mixture.means_invvars.T - 0.5 * x**2 @ mixture.inv_vars.T
    highest = log.max(1, keepdims=True)
    likelihood = np.exp(log - highest)
    total = likelihood.sum(1, keepdims=True)
    return likelihood / total, float((highest + np.log(total)).sum())
