"""A federated algorithm: what clients are sent, what they do, what the server makes of it; networks of its own."""

import difflib
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine.client import Client
from lit_epgan.engine.messages import Broadcast, Message, Report, Weighted, merged
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.samplers import Sampler
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed, isolated, seed_on_host

if TYPE_CHECKING:
    from lit_epgan.engine.mechanisms import Plan

NEAR = 0.75  # how alike two names are, of 1
OURS = "lit_epgan."


def _no_training(batches: Iterable[Any]) -> None:
    raise RuntimeError("a server trains in its round, during a fit")


def _no_holding() -> AbstractContextManager[None]:
    raise RuntimeError("a server trains in its round, during a fit")


@dataclass
class Server:
    """What the server holds. Clients never see it: they see what an exchange sends.

    Attributes:
        parameters: the flat vector (d,) of the server's model.
        flat: where the parameters lie in it.
        module: the server's own copy of the module.
        clients: number of clients of the federation.
        seed: the federation's seed.
        round: the round's number, from 0.
        chains: the round's cohort, as the sampler drew it.
        state: the algorithm's own tensors; checkpointed.
        train: trains the server's model on the server: from ``parameters``, with fresh optimizers (or the server's own,
            where clients keep theirs), the module's own training step on each batch; ``parameters`` then holds the
            result.
        holding: a context in which the module holds ``parameters``, ready to be trained; what it holds in the end is
            the server's.
    """

    parameters: Tensor
    flat: FlatParameters
    module: nn.Module
    clients: int
    seed: int
    round: int = 0
    chains: list[list[int]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    train: Callable[[Iterable[Any]], None] = _no_training
    holding: Callable[[], AbstractContextManager[None]] = _no_holding

    @property
    def cohort(self) -> list[int]:
        """The clients of the round."""
        return [k for chain in self.chains for k in chain]


@dataclass(frozen=True)
class Exchange:
    """One question to the cohort.

    Attributes:
        sent: all that a client gets to see of the server, by name; or a function of the client's index that gives it.
        question: the name of the algorithm's method that a client answers it by.
        training: whether the module trains to answer it; without, no batch is read and no optimizer steps.
        answer: the class of the message that answers it; the algorithm's ``Report`` by default.
        beside: the classes of those that algorithms around this one send beside it.
        to: the clients that are asked; the whole cohort by default.
        kept: names of entries that a client keeps, with their versions: one is sent, and billed, to each client once.
        merge: whether the server's buffers, frozen parameters and networks of the algorithm are moved by the answers;
            otherwise what came of them waits for the next exchange that merges.
    """

    sent: Broadcast | Callable[[int], Broadcast]
    question: str = "train"
    training: bool = True
    answer: type[Message] | None = None
    beside: tuple[type[Message], ...] = ()
    to: Sequence[int] | None = None
    kept: Mapping[str, int] = field(default_factory=dict)
    merge: bool = True

    def sent_to(self, client: int) -> dict[str, Tensor]:
        """What one client is sent: ``broadcast``'s answer, with what is the client's alone."""
        return dict(self.sent(client) if callable(self.sent) else self.sent)


Rounds = Generator[Exchange, Any, None]
"""A round of the server: it yields exchanges, and is sent the merged message of each."""


class Algorithm:
    """Base of all federated algorithms; the defaults are FedAvg's.

    A round asks the cohort once: ``broadcast`` says what is sent, ``train`` is one client's work from top to bottom,
    and ``merge`` takes what all clients sent, merged field by field as ``Report`` declares. An algorithm that asks more
    than once writes ``round``. Nothing of a client is kept on the algorithm, and nothing of the server reaches a client
    but what is sent: so one round can be run within a process, over several ranks, or between institutions.

    Attributes:
        on_server: submodules whose buffers clients neither change nor need: they are not sent.
        clipped: whether its messages still mean something where a mechanism clips them.
    """

    class Report(Message):
        """What leaves a client.

        Attributes:
            change: theta_k - theta (d,).
        """

        change: Tensor = merged("mean", like="parameters")

    on_server: Sequence[str] = ()
    clipped = True

    def selects(self, module: nn.Module) -> bool:
        """Whether clients look at some of their records only, as those of a class: whether one has any is secret."""
        return False

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict | None:
        """On the server and wherever clients work, when the module is on its device: check it, make what is public.

        Args:
            module: the module, with the parameters that everybody starts from.
            seed: the federation's.

        Returns:
            Networks of the algorithm's own, trained through what is added to the loss, merged by n_k and checkpointed.

        Raises:
            UserError: the module lacks what the algorithm needs.
        """
        return None

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        """The optimizer of the algorithm's own networks; started afresh for each client."""
        return torch.optim.Adam(networks.parameters(), lr=1e-3)

    def leave(self, module: nn.Module) -> None:
        """When the fit is over, or was broken off: leave the module as an ordinary one."""

    def sampler(self, sampler: Sampler) -> Sampler:
        """The sampler of the algorithm's rounds, from the one that the federation is set to."""
        return sampler

    def trains(self, round_: int) -> bool:
        """Whether an exchange of the round is answered by training; otherwise no client reads a batch."""
        return True

    def exchanges(self, start: int, stop: int) -> int:
        """How many exchanges rounds ``start`` to ``stop`` - 1 have at most; an accountant reads it."""
        return max(0, stop - start)

    def start(self, server: Server) -> None:
        """Before the first round (and after a resume, with ``server.state`` as it was): check settings, add state."""

    def begin(self, plan: "Plan") -> None:
        """Before a fit's first round, where clients work; for noise of the clients' own, which has a price.

        Raises:
            UserError: what is planned must not be done.
        """

    def end(self) -> None:
        """After the fit, where clients work: also of one that has broken off."""

    def broadcast(self, server: Server) -> Broadcast:
        """What a client is sent: theta (d,)."""
        return {"parameters": server.parameters}

    def train(self, client: Client, sent: Broadcast) -> Message:
        """One client's round.

        Args:
            client: who trains.
            sent: what it was sent.
        """
        client.fit(sent["parameters"])
        return self.Report(change=client.change)

    def merge(self, server: Server, report: Any) -> None:
        """theta <- theta + sum_k n_k (theta_k - theta) / sum_k n_k (McMahan et al. 2017, algorithm 1).

        Args:
            server: who merges.
            report: the cohort's ``Report``, merged.
        """
        server.parameters += report.change

    def round(self, server: Server) -> Rounds:
        """One round: the cohort is asked once."""
        report = yield Exchange(self.broadcast(server))
        self.merge(server, report)

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """Further sample sets worth evaluating beside the server's model, by name: n of each from ``start`` on."""
        return {}

    def labelled_samples(self, server: Server, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        """The first n of those of ``samples`` whose labels are known, and their labels (n,), by name."""
        return {}

    def guarantee(self) -> str | None:
        """What the algorithm itself guarantees for what leaves a client, in a sentence; None if nothing."""
        return None


class Around(Algorithm):
    """Base of algorithms that go around another one, which also merges the parameters.

    Both keep their tensors in the same ``state`` of client and server, under names of their own.

    Args:
        inner: the algorithm that it goes around; FedAvg by default.
    """

    def __init__(self, inner: Algorithm | None = None) -> None:
        self.inner = inner if inner is not None else Algorithm()

    @property
    def on_server(self) -> Sequence[str]:  # type: ignore[override]
        """Submodules whose buffers are not sent, as the inner algorithm has them."""
        return self.inner.on_server

    @property
    def Report(self) -> type[Message]:  # type: ignore[override]  # noqa: N802  it stands for a class
        """The class of the inner algorithm's message."""
        return self.inner.Report

    def __getattr__(self, question: str) -> Any:
        if question.startswith("_") or question == "inner":
            raise AttributeError(question)
        return getattr(self.inner, question)  # the methods that answer the inner algorithm's own questions


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that calls the inner algorithm's."""

    @functools.wraps(getattr(Algorithm, name))
    def method(self: Around, *arguments: Any, **named: Any) -> Any:
        return getattr(self.inner, name)(*arguments, **named)

    return method


PASSED_ON = "selects build network_optimizer leave sampler trains exchanges start begin end train round guarantee"
for _name in (*PASSED_ON.split(), "samples", "labelled_samples"):
    setattr(Around, _name, _passed_on(_name))


def passing(rounds: Rounds, out: Callable[[Exchange], Exchange], back: Callable[[Exchange, Message], None]) -> Rounds:
    """Another algorithm's round, with a look at what passes.

    Args:
        rounds: the round.
        out: gives the exchange that is yielded in an exchange's place.
        back: takes, from each merged message, the part that stands beside the other algorithm's.
    """
    asked = next(rounds, None)
    while asked is not None:
        report = yield out(asked)
        back(asked, report)
        try:
            asked = rounds.send(report)
        except StopIteration:
            return


def check_server_training(algorithm: Algorithm, server_steps: int, batch_size: int) -> None:
    """Refuse to train on the server without steps or without rows.

    Raises:
        UserError: one of them is below 1.
    """
    if server_steps < 1 or batch_size < 1:
        raise UserError(
            f"{type(algorithm).__name__}: server_steps and batch_size are {server_steps} and {batch_size}; "
            "both must be at least 1"
        )


def check_hooks(kind: type, base: type) -> None:
    """Refuse a user's class with a method whose name is nearly a hook's, where the class lacks the hook itself.

    Args:
        kind: the class.
        base: whose methods are the hooks.

    Raises:
        UserError: names the method and the hook.
    """
    own = [each for each in kind.__mro__ if issubclass(each, base) and not each.__module__.startswith(OURS)]
    if not own:
        return
    given = {name for each in own for name, value in vars(each).items() if isinstance(value, FunctionType)}
    known = {name for each in kind.__mro__ if each not in own for name in dir(each)}
    hooks = [name for name in dir(base) if not name.startswith("_") and name not in given]
    for name in sorted(given - known):
        close = [] if name.startswith("_") else difflib.get_close_matches(name, hooks, n=1, cutoff=NEAR)
        if close:
            raise UserError(
                f"{kind.__name__}.{name} is never called: did you mean the hook {close[0]}? A method of your own may "
                f"be called _{name}."
            )


NETWORKS = "networks"


class AlgorithmNetworks:
    """The algorithm's own networks; none for most algorithms, and then free of cost.

    Args:
        algorithm: builds them, and their optimizer.
        module: the module, on its device.
        like: a tensor of the device and the precision that they compute in.
        seed: the federation's; every rank and every site builds the same networks.

    Attributes:
        server: the server's networks as one flat vector; None if there are none.
    """

    def __init__(self, algorithm: "Algorithm", module: nn.Module, like: Tensor, seed: int) -> None:
        self._algorithm = algorithm
        with isolated(), torch.enable_grad():
            seed_on_host(derive_seed(seed, "networks"))
            self._modules = algorithm.build(module, seed)
        self.server: Tensor | None = None
        if self._modules is not None:
            self._flat = FlatParameters.of(self._modules.to(like))
            self.server = self._flat.vector.clone()

    def broadcast(self) -> Broadcast:
        """What a client that trains must be sent of them."""
        return {} if self.server is None else {NETWORKS: self.server}

    def load(self, received: Broadcast) -> None:
        """Start from the received networks, or the server's own, with a fresh optimizer."""
        if self.server is None or self._modules is None:
            return
        if received.get(NETWORKS, self.server) is not self.server:
            self.server.copy_(received[NETWORKS])
        self._flat.load(self.server)
        self._optimizer = self._algorithm.network_optimizer(self._modules)
        self._optimizer.zero_grad()

    def step(self) -> None:
        """One step down the gradients that have gathered."""
        if self.server is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()

    def changes(self, weight: float) -> Report:
        """How far they are from the server's, weighted by ``weight``."""
        return {} if self.server is None else {NETWORKS: Weighted(self._flat.vector - self.server, weight)}

    def apply(self, change: Tensor) -> None:
        """Move the server's networks by the clients' mean change ``change`` (d,)."""
        assert self.server is not None
        self.server += change
