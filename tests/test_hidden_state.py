"""What a module hides from the federation, against clients that have modules of their own."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.federated import FedProx
from tests.federations import federation, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop


class Holder:
    def __init__(self, teacher: nn.Module) -> None:
        self.teacher = teacher


class Taught(Regression):
    """Distils from a moving average of itself that no optimizer and no ``parameters()`` knows.

    Args:
        where: what holds the teacher.
    """

    def __init__(self, where: str) -> None:
        super().__init__(lr=0.01)
        self.where = where
        teacher = copy.deepcopy(self.body).double()
        held: Any = {"list": [teacher], "tuple": (teacher,), "dict": {"a": teacher}, "object": Holder(teacher)}.get(
            where
        )
        self.held = held
        if where == "__dict__":
            self.__dict__["teacher"] = teacher

    def taught_by(self) -> nn.Module:
        if self.where == "__dict__":
            return self.teacher
        if self.where == "object":
            return self.held.teacher
        return self.held["a" if self.where == "dict" else 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        teacher = self.taught_by()
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

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "bank"):
            self.register_buffer("bank", torch.zeros(4, 3, dtype=torch.float64))
        loss = super().training_step(batch, batch_idx) + 0.1 * self.body(self.bank.clone()).square().mean()
        self.bank[self.pointer % 4] = batch[0].mean(0)
        self.pointer += 1
        return loss


def apart(start: nn.Module, hidden: str, kept: tuple[str, ...] = ()) -> nn.Module:
    """The oracle: every client has a module of its own, whose hidden attribute lives on."""
    own: dict[int, Any] = {}

    def work(module: Any, batches: list[Any], client: int, round_: int) -> None:
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


@pytest.mark.parametrize("where", ["list", "tuple", "dict", "object", "__dict__"])
def test_a_hidden_teacher_is_each_clients_own(where):
    torch.manual_seed(0)
    module = Taught(where).double()
    expected = apart(copy.deepcopy(module), "teacher" if where == "__dict__" else "held")
    fit(module, federation(), rounds=3)
    assert_alike(module, expected)


def test_a_bank_and_the_pointer_into_it_stay_together():
    torch.manual_seed(0)
    module = Banked().double()
    expected = apart(copy.deepcopy(module), "pointer", kept=("bank",))
    fit(module, federation(), rounds=3, buffers={"bank": "local"})
    assert_alike(module, expected, without="bank")


def test_a_buffer_that_each_client_registers_in_its_first_step():
    """Every client finds none in its first round; the server's, merged, from then on."""
    torch.manual_seed(0)
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


def test_an_algorithm_that_cannot_reach_what_is_unfrozen_later_says_so():
    with pytest.raises(UserError, match=r"body.0.weight, body.0.bias .*FedProx.*from the start"):
        fit(Unfreezing(), federation(), rounds=2, algorithm=FedProx(0.5))
    fit(Unfreezing(), federation(), rounds=2)  # FedAvg adds nothing


def test_an_optimizer_over_hidden_parameters_is_refused():
    class Hidden(Taught):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.parameters(), *self.taught_by().parameters()], lr=0.01)

    with pytest.raises(UserError, match="an optimizer trains a parameter that Hidden does not register"):
        fit(Hidden("list"), federation(), rounds=1)
