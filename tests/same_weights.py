"""Two models, compared tensor by tensor."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor


def last_checkpoint(run: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return loaded


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], relative: float = 1e-6) -> None:
    """At most ``relative`` of a tensor's largest value apart; 0: the same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        apart = relative * float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(found[name], value, rtol=relative, atol=apart, msg=name)
