"""What a module keeps in ordinary attributes, or hides in them, against clients that have modules of their own."""

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.federated import FedAvg, FedProx
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, federation, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop


class Pool(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.pool: list[Tensor] = []
        self.steps = 0

    def training_step(self, batch, batch_idx: int) -> Tensor:
        self.steps += 1
        self.pool.append(batch[0].mean(0))
        del self.pool[:-3]
        own = super().training_step(batch, batch_idx)
        return own + 0.1 * self.body(torch.stack(self.pool)).square().mean()


def federated(module: Regression, **options) -> Regression:
    fit(module, federation(**options), rounds=3)
    return module


def test_a_replay_pool_is_each_clients_own():
    """The oracle gives every client a module of its own, whose pool it keeps from round to round."""
    start = Pool()
    pools: dict[int, tuple[list[Tensor], int]] = {}

    def work(module, batches, client: int, round_: int) -> None:
        module.pool, module.steps = pools.get(client, ([], 0))
        module.log = lambda *args, **kwargs: None
        optimizer = module.configure_optimizers()
        for i, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, i).backward()
            optimizer.step()
        pools[client] = [x.detach() for x in module.pool], module.steps

    expected = PlainLoop(work).run(start, rounds=3)
    torch.manual_seed(0)
    module = federated(Pool())
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-9, atol=1e-9)


class Gathering(Regression):
    """The documented way to an epoch's metric: outputs in a list, which the epoch's end reads and clears."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.outputs: list[Tensor] = []
        self.total, self.seen = torch.zeros(()), 0
        self.epochs: list[tuple[int, float, int]] = []

    def training_step(self, batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        self.total = self.total + 1.0
        self.seen += len(batch[0])
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs.append((len(self.outputs), float(self.total), self.seen))
        self.outputs.clear()
        self.total, self.seen = torch.zeros(()), 0


class Cleared(Gathering):
    def on_train_epoch_end(self) -> None:
        self.epochs.append((len(self.outputs), float(self.total), self.seen))

    def on_train_epoch_start(self) -> None:
        self.outputs.clear()
        self.total, self.seen = torch.zeros(()), 0


@pytest.mark.parametrize("kind", [Gathering, Cleared])
def test_the_epochs_end_finds_what_all_clients_gathered_and_what_is_cleared_is_gone(kind, tmp_path):
    """Also where the epoch's start clears it, and in a run that is resumed."""
    steps = sum(-(-n // 8) for n in SIZES)
    assert federated(kind()).epochs == [(steps, steps, sum(SIZES))] * 3
    saved = RoundCheckpoint(dirpath=str(tmp_path))
    fit(kind(), federation(), rounds=1, callbacks=[saved], enable_checkpointing=True)
    resumed = kind()
    fit(resumed, federation(), rounds=3, ckpt_path=str(tmp_path / "last.ckpt"))
    assert resumed.epochs == [(steps, steps, sum(SIZES))] * 2


class Iterating(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.numbers = (i for i in range(10_000))

    def training_step(self, batch, batch_idx: int) -> Tensor:
        next(self.numbers)
        return super().training_step(batch, batch_idx)


def test_what_cannot_be_kept_apart_is_named_once_and_the_servers_training_is_not_the_clients():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federated(Iterating())
    said = [str(w.message) for w in caught if "`numbers`" in str(w.message)]
    assert len(said) == 1
    assert "of Iterating cannot be copied: all clients share it" in said[0]
    steps = sum(-(-n // 8) for n in SIZES)
    module = Gathering()
    fit(module, federation(), rounds=3, algorithm=TrainsAtTheServer())
    assert module.epochs == [(steps, steps, sum(SIZES))] * 3


@pytest.mark.parametrize("sizes", [(20, 7, 34), (34, 7, 20)])
def test_the_order_of_clients_does_not_matter(sizes):
    """Each client's steps are counted from its own last round."""
    seen: list[int] = []

    class Counting(Pool):
        def training_step(self, batch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            seen.append(self.steps)
            return loss

    fit(Counting(), federation(sizes=sizes), rounds=2)
    per_client = [-(-n // 8) for n in sizes]
    first = [i + 1 for n in per_client for i in range(n)]
    second = [n + i + 1 for n in per_client for i in range(n)]
    assert seen == first + second


class TrainsAtTheServer(FedAvg):
    """Takes a step at the server after each merge."""

    def merge(self, server, report) -> None:
        super().merge(server, report)
        server.train(iter([[torch.ones(8, 3, dtype=torch.float64), torch.ones(8, 1, dtype=torch.float64)]]))


class Taught(Regression):
    """Distils from a moving average of itself that no optimizer and no ``parameters()`` knows."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.held = [copy.deepcopy(self.body).double()]

    def training_step(self, batch, batch_idx: int) -> Tensor:
        (teacher,) = self.held
        with torch.no_grad():
            aim = teacher(batch[0])
            for mine, own in zip(teacher.parameters(), self.body.parameters(), strict=True):
                mine.mul_(0.5).add_(0.5 * own)
        loss = super().training_step(batch, batch_idx)
        return loss + 0.3 * (self.body(batch[0]) - aim).square().mean()


class Banked(Regression):
    """Looks at a bank of old inputs, a buffer, and writes into it where an attribute points to.

    Args:
        late: whether the bank is registered in the first step, not in ``__init__``.
    """

    def __init__(self, late: bool = False) -> None:
        super().__init__(lr=0.01)
        self.pointer = 0
        if not late:
            self.register_buffer("bank", torch.zeros(4, 3, dtype=torch.float64))

    def training_step(self, batch, batch_idx: int) -> Tensor:
        if not hasattr(self, "bank"):
            self.register_buffer("bank", torch.zeros(4, 3, dtype=torch.float64))
        loss = super().training_step(batch, batch_idx) + 0.1 * self.body(self.bank.clone()).square().mean()
        self.bank[self.pointer % 4] = batch[0].mean(0)
        self.pointer += 1
        return loss


def apart(start: nn.Module, hidden: str, kept: tuple[str, ...] = ()) -> nn.Module:
    """The oracle: every client has a module of its own, whose hidden attribute lives on."""
    own = {}

    def work(module, batches, client: int, round_: int) -> None:
        vars(module)[hidden] = own.get(client, copy.deepcopy(vars(start)[hidden]))
        module.log = lambda *args, **kwargs: None
        optimizer = module.configure_optimizers()
        for i, batch in enumerate(batches):
            optimizer.zero_grad()
            module.training_step(batch, i).backward()
            optimizer.step()
        own[client] = vars(module)[hidden]

    return PlainLoop(work, kept=lambda name: name in kept).run(start, rounds=3)


def assert_alike(module: nn.Module, expected: nn.Module, without: str = "") -> None:
    for name, value in expected.state_dict().items():
        if name != without:
            torch.testing.assert_close(module.state_dict()[name], value, rtol=1e-9, atol=1e-9)


def test_hidden_teachers_and_banks_are_each_clients_own():
    module = Taught().double()
    expected = apart(copy.deepcopy(module), "held")
    fit(module, federation(), rounds=3)
    assert_alike(module, expected)
    module = Banked().double()
    expected = apart(copy.deepcopy(module), "pointer", kept=("bank",))
    fit(module, federation(), rounds=3, buffers={"bank": "local"})
    assert_alike(module, expected, without="bank")
    # every client finds none in its first round; the server's, merged, from then on
    late, early = Banked(late=True).double(), Banked().double()
    early.load_state_dict(late.state_dict(), strict=False)
    fit(late, federation(), rounds=3)
    fit(early, federation(), rounds=3)
    assert_alike(late, early)


class Unfreezing(Regression):
    """Trains its last layer alone in the first round."""

    def __init__(self, frozen: bool = True) -> None:
        super().__init__(lr=0.01)
        self.body[0].requires_grad_(not frozen)

    def on_train_epoch_start(self) -> None:
        self.body[0].requires_grad_(self.current_epoch > 0)


def test_what_no_algorithm_or_optimizer_can_reach_is_refused():
    with pytest.raises(UserError, match=r"body.0.weight, body.0.bias .*FedProx.*from the start"):
        fit(Unfreezing(), federation(), rounds=2, algorithm=FedProx(0.5))
    fit(Unfreezing(), federation(), rounds=2)  # FedAvg adds nothing

    class Hidden(Taught):
        def configure_optimizers(self):
            return torch.optim.SGD([*self.parameters(), *self.held[0].parameters()], lr=0.01)

    with pytest.raises(UserError, match="an optimizer trains a parameter that Hidden does not register"):
        fit(Hidden(), federation(), rounds=1)
