"""Randomness belongs to (seed, round, client): a stream is derived from what it is for, never from a running one."""

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

RandomState = tuple[Any, Any, torch.Tensor]


def derive_seed(*words: int | str) -> int:
    """A seed in [0, 2^63) that depends on all words and their order: ``derive_seed(seed, round, client, "data")``."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator_for(*words: int | str) -> torch.Generator:
    """A CPU generator of its own for the stream named by ``words``."""
    return torch.Generator().manual_seed(derive_seed(*words))


def seed_streams(seed: int) -> None:
    """Seed every global stream a training step may draw from: torch (all devices in use), NumPy and Python."""
    seed_on_host(seed)
    # torch.manual_seed would also leave word for devices not in use, with a stack trace: 0.1 ms
    for devices in (torch.cuda, torch.xpu):
        if devices.is_initialized():
            devices.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


def host_state() -> RandomState:
    """The state of the host's global streams: Python, NumPy and torch's CPU generator."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_host_state(state: RandomState) -> None:
    """Put back what ``host_state`` returned."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


class HostStream:
    """A stream of the host's global randomness that is suspended while it is not in use.

    Reading a data set draws from the global streams at moments that depend on prefetching; under
    ``with stream:`` it draws from its own, and whoever else draws is not disturbed.
    """

    def __init__(self, seed: int) -> None:
        with isolated():
            seed_on_host(seed)
            self._state = host_state()
        self._outer: RandomState | None = None

    def __enter__(self) -> None:
        self._outer = host_state()
        set_host_state(self._state)

    def __exit__(self, *_: object) -> None:
        assert self._outer is not None
        self._state = host_state()
        set_host_state(self._outer)


def seed_on_host(seed: int) -> None:
    """Seed the host's streams only, leaving accelerators alone."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def isolated() -> Iterator[None]:
    """Whatever is drawn inside leaves the host's global streams as they were."""
    state = host_state()
    try:
        yield
    finally:
        set_host_state(state)


def secure_normal(n: int) -> torch.Tensor:
    """n standard normal numbers (n,), float64, from the operating system's cryptographic source.

    torch's generators are predictable from a few hundred of their outputs; here 52 bits of each number's own go through
    the inverse of the normal distribution function.
    """
    return torch.special.ndtri(secure_uniform(n))


def secure_uniform(n: int) -> torch.Tensor:
    """n numbers (n,) uniform in (0, 1), float64 with 52 bits, from the operating system's cryptographic source."""
    if n == 0:
        return torch.zeros(0, dtype=torch.float64)
    words = torch.frombuffer(bytearray(os.urandom(8 * n)), dtype=torch.int64)
    mantissas = words.bitwise_and_(2**52 - 1).bitwise_or_(1023 << 52)  # of numbers in [1, 2)
    return mantissas.view(torch.float64).sub_(1 - 2**-53)
