"""What several Markov chains say of themselves: have they met, and how many independent draws are they worth?"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def split_r_hat(chains: Array) -> Array:
    """Gelman and Rubin's R-hat of halved chains (Gelman et al. 2013, equation 11.4); near 1 where chains have met.

    Args:
        chains: (chains, draws, q), of q quantities.

    Returns:
        (q,).
    """
    half = chains.shape[1] // 2
    halves = np.concatenate([chains[:, :half], chains[:, -half:]])
    within = halves.var(1, ddof=1).mean(0)
    between = halves.mean(1).var(0, ddof=1)
    return np.sqrt((half - 1) / half + between / within)


def effective_sample_size(chains: Array) -> Array:
    """Independent draws that would give the means as exactly (Gelman et al. 2013, equations 11.7 and 11.8).

    The sum of the autocorrelations ends where pairs of them are no longer positive (Geyer 1992).

    Args:
        chains: (chains, draws, q), of q quantities.

    Returns:
        (q,).
    """
    count, draws, _ = chains.shape
    covariance = _autocovariance(chains).mean(0)
    within = covariance[0] * draws / (draws - 1)
    total = covariance[0] + chains.mean(1).var(0, ddof=1 if count > 1 else 0)
    correlation = 1 - (within - covariance) / total
    pairs = correlation[: draws // 2 * 2].reshape(draws // 2, 2, -1).sum(1)
    positive = np.logical_and.accumulate(pairs > 0)
    time = 2 * np.where(positive, pairs, 0).sum(0) - 1
    return np.asarray(count * draws / np.maximum(time, 1 / np.log10(count * draws)))  # chains that alternate


def _autocovariance(chains: Array) -> Array:
    """(chains, lags, q), by Fourier transforms."""
    draws = chains.shape[1]
    spectrum = np.fft.rfft(chains - chains.mean(1, keepdims=True), 2 * draws, axis=1)
    return np.asarray(np.fft.irfft(np.abs(spectrum) ** 2, axis=1)[:, :draws] / draws)
