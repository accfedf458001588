"""A coin for each record: its rate, its independence, and batches without a record."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lit_epgan.datamodules.clients import CoinBatches, DatasetClient, emptied
from lit_epgan.randomness import secure_uniform


@pytest.mark.parametrize("seed", [None, 3])
def test_each_record_is_drawn_at_the_rate(seed: int | None) -> None:
    """Over 4,000 steps every one of 50 records has its rate 8 / 50, within five standard errors; sizes are binomial."""
    drawn = torch.zeros(4000, 50, dtype=torch.float64)
    for step, batch in enumerate(CoinBatches(seed)(50, 8, 4000, 1, 0, 0, 0)):
        assert len(set(batch)) == len(batch)
        drawn[step, batch] = 1
    rate = 8 / 50
    error = (rate * (1 - rate) / 4000) ** 0.5
    assert float((drawn.mean(0) - rate).abs().max()) < 5 * error
    sizes = drawn.sum(1)
    assert float(sizes.mean()) == pytest.approx(8, rel=0.03)
    assert float(sizes.var()) == pytest.approx(50 * rate * (1 - rate), rel=0.15)
    assert abs(float(torch.corrcoef(drawn.T).fill_diagonal_(0).abs().max())) < 0.1


def test_a_client_smaller_than_a_batch_gives_all_and_passes_have_as_many_steps_as_ever() -> None:
    assert list(CoinBatches()(3, 8, None, 2)) == [[0, 1, 2]] * 2
    assert len(list(CoinBatches()(50, 8, None, 2))) == 14


def test_the_smallest_number_that_can_come_is_a_coin_that_says_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda n, **options: torch.zeros(n, dtype=torch.float64))
    assert next(CoinBatches(3)(50, 8, 1, 1)) == list(range(50))


def test_coins_are_secret_unless_a_study_repeats_them() -> None:
    def drawn(seed: int | None, *stream: int) -> list[list[int]]:
        return list(CoinBatches(seed)(200, 20, 3, 1, *stream))

    assert drawn(None, 0, 1, 2) != drawn(None, 0, 1, 2)
    assert drawn(7, 0, 1, 2) == drawn(7, 0, 1, 2)
    assert drawn(7, 0, 1, 2) != drawn(7, 0, 1, 3)
    assert len(secure_uniform(0)) == 0
    assert 0 < float(secure_uniform(1000).min()) < float(secure_uniform(1000).max()) < 1


@pytest.mark.parametrize("workers", [0, 1])
def test_a_step_without_a_record_has_an_empty_batch_of_the_same_kind(workers: int) -> None:
    collate = torch.utils.data.default_collate if workers else None
    client = DatasetClient(TensorDataset(torch.ones(9, 2), torch.arange(9)), 4, collate, 0)
    client.draw = lambda *_: iter([[3, 4], [], [8]])  # type: ignore[assignment]
    batches = list(client.batches(3, 1, 0, 0, 0))
    assert [batch[1].tolist() for batch in batches] == [[3, 4], [], [8]]
    assert batches[1][0].shape == (0, 2)
    assert emptied({"x": torch.ones(2, 3)})["x"].shape == (0, 3)
    assert client.culprits(0, 3, 1, 0, 0, 0) == []
