"""What algorithms without gradients share: the module's particles, the inference that moves them, and where it is."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.bayes import Simulator
from lit_epgan.bayes.inference import Inference, Stage
from lit_epgan.engine import Algorithm, Around, Broadcast, Client, Exchange, Message, Rounds, Server, merged
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed, generator_for

PREFIX = "inference."
NOBODY = (
    "no client of the round has answered for any record: each was left out, or has none of the class that the module's "
    "label names"
)


class Answers(Message):
    """One number (m,) for each simulated data set, weighted by how many records were looked at."""

    numbers: Tensor = merged("mean")


class GradientFree(Around):
    """Base of algorithms that move the particles of a module with ``simulator``, ``particles`` and ``summarise``.

    Rounds before ``from_round`` are the inner algorithm's: they train what summarises records. From then on nothing is
    trained, and the module's other parameters stay as they are.

    Args:
        inner: trains the summary; FedAvg by default.
        from_round: the first round without training, from 0.
        inference: ``frequencies``, ``moves``, ``even``, ``surplus`` and ``most_records`` of Inference.
    """

    def __init__(self, inner: Algorithm | None = None, from_round: int = 0, **inference: Any) -> None:
        super().__init__(inner)
        at_least(0, self, from_round=from_round)
        self.from_round, self._settings = from_round, inference
        self.inference: Inference

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict | None:
        """The features, the same for everybody. UserError: the module holds no particles of a simulator."""
        simulator = getattr(module, "simulator", None)
        if not isinstance(simulator, Simulator) or not hasattr(module, "summarise"):
            raise UserError(
                f"{type(module).__name__} has no simulator: {type(self).__name__} moves the particles of a module such "
                "as lit_epgan.modules.Posterior"
            )
        particles: Any = module.particles
        self.inference = Inference.of(simulator, derive_seed(seed, "features"), len(particles), **self._settings)
        return super().build(module, seed)

    def selects(self, module: nn.Module) -> bool:
        """Whether the module is a model of one class, so that other records are not looked at."""
        return getattr(module, "label", None) is not None or super().selects(module)

    def trains(self, round_: int) -> bool:
        """Before ``from_round``, as the inner algorithm."""
        return round_ < self.from_round and super().trains(round_)

    def exchanges(self, start: int, stop: int) -> int:
        trained = super().exchanges(start, min(stop, self.from_round))
        return trained + max(0, stop - max(start, self.from_round)) * self.questions()

    def questions(self) -> int:
        """How many a generation has at most."""
        return 1

    def round(self, server: Server) -> Rounds:
        if server.round < self.from_round:
            yield from super().round(server)
            return
        yield from self.generation(server)

    def generation(self, server: Server) -> Rounds:
        """One generation of the inference: it yields what it asks of the clients and is sent their sums."""
        raise NotImplementedError

    def asks(self, server: Server, question: str, sent: Broadcast, answer: type[Message] = Answers) -> Exchange:
        """A question without training. What was trained to summarise records goes with it, once to each client."""
        if not self.from_round:
            return Exchange(sent, question, training=False, answer=answer)
        trained, kept = {"parameters": server.parameters, **sent}, {"parameters": self.from_round}
        return Exchange(trained, question, training=False, answer=answer, kept=kept)

    def stage(self, server: Server) -> Stage | None:
        """Where inference is; None before its first generation."""
        held = {n.removeprefix(PREFIX): v.cpu() for n, v in server.state.items() if n.startswith(PREFIX)}
        return Stage.of(held) if held else None

    def keep(self, server: Server, stage: Stage) -> None:
        """Put a generation's particles into the module, and the rest beside it."""
        server.state |= {PREFIX + name: tensor for name, tensor in stage.tensors().items()}
        (where,) = server.flat.named("particles")
        server.parameters[where] = stage.particles.theta.flatten().to(server.parameters)

    @staticmethod
    def generator(server: Server) -> torch.Generator:
        return generator_for(server.seed, "inference", server.round)


def mean_answer(answers: Answers) -> Tensor:
    """The mean of the clients' answers, by their numbers of records. UserError: nobody has answered for any record."""
    if answers.weight is None or not float(answers.weight):
        raise UserError(NOBODY)
    return answers.numbers.cpu()


@torch.no_grad()
def summaries(client: Client) -> Iterator[Tensor]:
    """Summaries (n, d) of the client's records, batch by batch; of one class where the module is a model of one."""
    module: Any = client.module
    label: int | None = getattr(module, "label", None)
    for batch in client.data():
        x = batch if isinstance(batch, Tensor) else batch[0]
        yield module.summarise(x if label is None else x[batch[1] == label]).cpu()
