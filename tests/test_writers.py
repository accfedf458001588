"""Simulated writers: hands that differ, the same for the same seed, and a fault that is where it should be."""

from typing import Any

import pytest
import torch

from lit_epgan.datamodules import WritersDataModule
from lit_epgan.datamodules.writers import by_hand
from lit_epgan.errors import UserError


def written(**settings: Any) -> dict[str, tuple[torch.Tensor, ...]]:
    data = WritersDataModule(clients=12, images=5, held_out_writers=3, batch_size=5, **settings)
    return {name: each.tensors for name, each in data.load().train.items()}


def test_everybody_writes_by_a_hand_of_their_own() -> None:
    first, again, other = written(), written(seed=3), written(split_seed=8)
    assert list(first) == [f"writer-{k:02d}" for k in range(12)]
    for name, (x, y) in first.items():
        assert x.shape == (5, 1, 8, 8)
        assert y.shape == (5,)
        assert float(x.min()) >= -1
        assert float(x.max()) <= 1
        assert torch.equal(x, again[name][0])
        assert not torch.equal(x, other[name][0])


def test_those_held_out_take_part_in_nothing() -> None:
    data = WritersDataModule(clients=4, images=5, held_out_writers=3, batch_size=5, inverted=1.0).load()
    x, _ = data.test.tensors
    assert len(x) == 15
    assert float(x.mean()) < 0  # dark, as none of them is inverted


def test_what_is_validated_on_is_no_clients_and_not_tested_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no hand at all an image shows which one it is; the digits have hardly any twice."""
    monkeypatch.setattr("lit_epgan.datamodules.writers.HAND", (0.0, 0.0, 0.0, 0.0))
    settings = {"clients": 100, "images": 40, "held_out_writers": 40, "batch_size": 5}
    data = WritersDataModule(val_fraction=0.5, **settings).load()
    clients = {image.numpy().tobytes() for each in data.train.values() for image in each.tensors[0]}
    val, test = ({image.numpy().tobytes() for image in each.tensors[0]} for each in (data.val, data.test))
    assert not clients & val
    assert not clients & test
    assert not val & test
    assert 700 < len(clients) < 719  # half of 1,437
    without = WritersDataModule(**settings).load()
    assert without.val is without.test


@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.5, 6), (1.0, 12)])
def test_the_fault_inverts_all_images_of_a_share_of_the_writers(share: float, count: int) -> None:
    clean, faulty = written(), written(inverted=share)
    inverted = [name for name in clean if torch.equal(faulty[name][0], -clean[name][0])]
    assert len(inverted) == count
    assert all(torch.equal(faulty[name][0], clean[name][0]) for name in clean if name not in inverted)


def test_a_hand_shifts_thickens_and_slants() -> None:
    """One pixel a column to the left is a quarter of half of eight; no hand at all changes nothing but the range."""
    ink = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(by_hand(ink, 0, 0, 0, 0), 2 * ink - 1)
    torch.testing.assert_close(by_hand(ink, 0, 0, 0.25, 0)[..., :-1], 2 * ink[..., 1:] - 1)
    torch.testing.assert_close(by_hand(ink, 0, 0, 0, 0.25)[..., :-1, :], 2 * ink[..., 1:, :] - 1)
    assert (by_hand(ink, 0, -0.2, 0, 0) >= 2 * ink - 1 - 1e-6).all()
    bar = torch.zeros(1, 1, 8, 8)
    bar[..., 3:5] = 1
    slanted = by_hand(bar, 0.5, 0, 0, 0)[0, 0] + 1
    columns = (slanted * torch.arange(8.0)).sum(1) / slanted.sum(1)
    assert (columns.diff() < 0).all()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"clients": 0}, r"data\.clients"),
        ({"images": 0}, r"data\.images"),
        ({"inverted": 1.5}, r"data\.inverted"),
        ({"val_fraction": 1.0}, r"data\.val_fraction"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        WritersDataModule(**{"batch_size": 5, **settings})
