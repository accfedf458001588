"""Elementwise functions of several tensors, computed piece by piece so that temporaries stay small."""

from collections.abc import Callable
from itertools import chain

import torch
from torch import Tensor


def in_chunks(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor, chunk: int) -> tuple[Tensor, ...]:
    """``function`` of the broadcast inputs, called with flat vectors of at most ``chunk`` elements.

    Args:
        function: takes as many vectors as there are inputs, all of one length and dtype, and returns such vectors.
        inputs: floating-point tensors of shapes that broadcast; computed in their common dtype, at least float32.
        chunk: elements per call.

    Returns:
        The function's results, in the broadcast shape.
    """
    dtype = torch.float32
    for x in inputs:
        dtype = torch.promote_types(dtype, x.dtype)
    inputs = torch.broadcast_tensors(*(x.to(dtype) for x in inputs))
    shape = inputs[0].shape
    flat = [x.reshape(-1) for x in inputs]
    if shape.numel() <= chunk:
        return tuple(part.reshape(shape) for part in function(*flat))
    parts = (function(*piece) for piece in zip(*(x.split(chunk) for x in flat), strict=True))
    first = next(parts)
    if any(part.requires_grad for part in first):
        return tuple(torch.cat(part).reshape(shape) for part in zip(first, *parts, strict=True))
    # written in place: keeping all parts to join them costs as much as computing them
    results = first[0].new_empty(len(first), shape.numel())
    for k, part in enumerate(chain([first], parts)):
        for result, x in zip(results, part, strict=True):
            result[k * chunk : (k + 1) * chunk] = x
    return tuple(result.reshape(shape) for result in results)
