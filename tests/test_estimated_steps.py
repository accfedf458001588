"""``trainer.estimated_stepping_batches`` in a federation: a OneCycle made with it ends where a client's steps end."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import IterableDataset, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.errors import UserError


class OneCycle(LightningModule):
    """Notes the estimate."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rates.append(self.optimizers().param_groups[0]["lr"])  # type: ignore[union-attr]
        return (batch[0] @ self.weight - 1).square().mean()

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=int(self.estimate))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


rates: list[float] = []  # of every step, in the order in which the clients work


def fit(sizes: tuple[int, ...] = (20, 20), policy: Any = "reset", accumulate: int = 1, **options: Any) -> OneCycle:
    sets = [TensorDataset(torch.ones(n, 3)) for n in sizes]
    data = FederatedDataModule.from_datasets(sets, batch_size=5, **options)
    module = OneCycle()
    rates.clear()
    run = trainer(policy, accumulate_grad_batches=accumulate)
    run.fit(module, datamodule=data)
    assert type(run) is Trainer
    return module


def trainer(policy: Any = "reset", **options: Any) -> Trainer:
    return Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[FederationCallback(optimizer_state=policy)], **options,
    )  # fmt: skip


def cycle(steps: int) -> list[float]:
    """The rates of one cycle, from torch's own schedule."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule, own = OneCycleLR(optimizer, 0.1, total_steps=steps), []
    for _ in range(steps):
        own.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step() if len(own) < steps else None
    return own


def test_a_client_goes_through_one_whole_cycle_in_every_round() -> None:
    fit(local_steps=7)
    assert rates == pytest.approx(cycle(7) * 2 * 3)
    fit()
    assert rates == pytest.approx(cycle(4) * 2 * 3)  # 20 records in batches of 5


def test_a_client_that_keeps_its_schedule_goes_through_one_in_all_rounds() -> None:
    whole = cycle(7 * 3)
    rounds = [whole[7 * r : 7 * (r + 1)] for r in range(3)]
    expected = [rate for own in rounds for rate in own * 2]
    fit(local_steps=7, policy="keep")
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"sizes": (20, 45)}, 9),  # the largest client's
        ({"sizes": (20, 45), "max_local_steps": 6}, 6),
        ({"local_epochs": 2}, 8),
        ({"local_steps": 3, "warmup_steps": 11}, 11),
        ({"local_steps": 3, "warmup_steps": 11, "policy": "keep"}, 11 + 2 * 3),
        ({"local_steps": 7, "accumulate": 2}, 4),  # a client's last batch always steps
    ],
)
def test_the_estimate(options: dict[str, Any], steps: int) -> None:
    assert fit(**options).estimate == steps


class Stream(IterableDataset):
    """Does not say how long it is."""

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        return iter([(torch.ones(3),)] * 10)


def test_what_nobody_knows_is_refused() -> None:
    data = FederatedDataModule.from_datasets([Stream()], batch_size=5)
    with pytest.raises(UserError, match=r"batches is not known: .* set the data module's local_steps"):
        trainer().fit(OneCycle(), datamodule=data)
