"""Pickles that hold nothing but arrays, text, numbers, lists and dicts, read so that none can run code."""

import io
import pickle
from typing import Any

import numpy as np

_empty_array: Any = np.empty(0).__reduce__()[0]  # what a pickled array begins with, whatever numpy's version calls it


def read_plain_pickle(content: bytes) -> Any:
    """What a pickle holds; text of Python 2 is read as Latin-1.

    Raises:
        pickle.UnpicklingError: it asks for anything but arrays and plain values.
    """
    return _PlainUnpickler(io.BytesIO(content), encoding="latin1").load()


def _as_bytes(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in Python 2's protocol."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes are written in {encoding!r}")
    return text.encode("latin1")


_KNOWN: dict[str, Any] = {
    "numpy.ndarray": np.ndarray,
    "numpy.dtype": np.dtype,
    "numpy.core.multiarray._reconstruct": _empty_array,
    "numpy._core.multiarray._reconstruct": _empty_array,
    "_codecs.encode": _as_bytes,
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is no array")
        return _KNOWN[f"{module}.{name}"]
