"""The states of random generators: torch's, NumPy's and Python's."""

from random import Random
from typing import Any

import numpy as np
import torch

from lit_epgan.snapshots.foreign import UnrestorableError


def random_state(value: Any) -> Any:
    """The state of a random generator; None if it is none."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) is Random:
        return value.getstate()
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.state if isinstance(value, np.random.BitGenerator) else None


def random_type(value: Any) -> str:
    """The name of a random generator's kind."""
    if isinstance(value, torch.Generator):
        return f"torch {value.device}"
    bits = value.bit_generator if isinstance(value, np.random.Generator) else None
    return f"{type(value).__name__} {type(bits).__name__}" if bits is not None else type(value).__name__


def new_random(name: str) -> Any:
    """A new random generator of a kind."""
    first, _, second = name.partition(" ")
    if first == "torch":
        return torch.Generator(second)
    if first in ("Random", "RandomState"):
        return Random() if first == "Random" else np.random.RandomState()
    bits = getattr(np.random, second or first, None)
    if not (isinstance(bits, type) and issubclass(bits, np.random.BitGenerator)):
        raise UnrestorableError(f"a {name}")
    return np.random.Generator(bits()) if second else bits()
