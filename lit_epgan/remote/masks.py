"""Additive masks: each client's numbers look random, and their sum is the sum of what was masked.

A number v becomes a fixed-point number modulo 2^64, and each pair of clients shares a pad p that only the two know:

    y_k = round(2^32 v_k) + sum_{j > k} p_kj - sum_{j < k} p_jk   (mod 2^64),
    sum_k y_k = sum_k round(2^32 v_k)                             (mod 2^64)

Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", section 4, without the
second mask of section 4.2: a client that is missing cannot be replaced.

Of K clients each number may be at most 2^30 / K in size, so that their sum does not wrap. Rounding costs a sum at most
K 2^-33; integers are exact.
"""

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

SCALE = 2.0**32
CHUNK = 2**20  # words of a pad that are made at a time, 8 MB

Words = NDArray[np.uint64]
Numbers = NDArray[np.float64]


def largest(clients: int) -> float:
    """The largest size of a number of which ``clients`` may be summed: 2^62 / K in fixed point, half of what fits."""
    return 2.0**62 / SCALE / clients


def fixed_point(numbers: Numbers) -> Words:
    """round(2^32 v) modulo 2^64, of numbers (n,) that are at most ``largest`` in size."""
    return np.rint(numbers * SCALE).astype(np.int64).view(np.uint64)


def floating_point(words: Words) -> Numbers:
    """The numbers (n,) that fixed-point words (n,) stand for; words from 2^63 on are negative."""
    return words.view(np.int64) / SCALE


def pad_key(secret: bytes, about: bytes) -> bytes:
    """The 32 bytes that a pad grows from, by HKDF-SHA256.

    Args:
        secret: what two clients share.
        about: what the pad is for: another purpose gives another pad.
    """
    return HKDF(SHA256(), 32, None, about).derive(secret)


def add_pad(words: Words, key: bytes, adds: bool) -> None:
    """Add a pad to words (n,), or subtract it, in place.

    The pad is the keystream of ChaCha20 (RFC 8439). A key serves for one pad: then a fixed nonce is safe.

    Args:
        words: what is masked.
        key: as ``pad_key`` gives it.
        adds: whether the pad is added; the other client of the pair subtracts it.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for start in range(0, len(words), CHUNK):
        part = words[start : start + CHUNK]
        pad = np.frombuffer(stream.update(bytes(part.nbytes)), "<u8")
        (np.add if adds else np.subtract)(part, pad, out=part)
