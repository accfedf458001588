"""A generator on the server against all clients' own discriminators."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lit_epgan.engine import Broadcast, Client, Exchange, Message, Rounds, Server, merged
from lit_epgan.federated.fedavg_gan import DiscriminatorPart, FedAvgGAN, taking_turns
from lit_epgan.lib.errors import UserError
from lit_epgan.networks.ensembles import ForgiverFirst

PREFIX = "discriminator."


class F2A(FedAvgGAN):
    """Forgiver-first aggregation (Yonetani et al. 2019), run as a federation with FedAvg-GAN's rounds.

        client   trains its *own* discriminator D_k, which is never averaged, and sends how it changed
        server   trains the generator against sum_k w_k D_k, w = softmax_k(lambda D_k(G(z))): a sample is judged by
                 those who find it the most real, since a client that has never seen a class rejects it

    lambda >= 0 is learnt beside the generator, down the gradient of its loss plus ``penalty`` / 2 lambda^2: a lambda
    that grows without bound would leave one discriminator to learn from.

    Price: the server must see each client's network by itself, so the messages do not sum (no secure aggregation);
    its work grows with the number of clients; FedAvg-GAN's bytes.

    Args:
        server_steps: the generator's steps in a round.
        batch_size: rows of the server's batches.
        forgiveness: lambda at the beginning.
        penalty: weight of lambda^2 / 2.
        lr: step size of lambda's gradient descent.

    Raises:
        UserError: if an argument is out of its range, or the module offers no ``turns``.
    """

    class Report(Message):
        """What leaves a client: its own discriminator's change, which the server sees by itself."""

        discriminator: Tensor = merged("stack", like="discriminator")

    def __init__(
        self,
        server_steps: int = 6,
        batch_size: int = 32,
        forgiveness: float = 0.1,
        penalty: float = 0.1,
        lr: float = 0.1,
    ) -> None:
        super().__init__(server_steps, batch_size)
        if forgiveness < 0 or penalty < 0 or lr < 0:
            raise UserError(
                f"F2A's forgiveness, penalty and lr are {forgiveness}, {penalty} and {lr}; none may be negative"
            )
        self.forgiveness, self.penalty, self.lr = forgiveness, penalty, lr

    def start(self, server: Server) -> None:
        """lambda, and the discriminator that every client begins with."""
        if getattr(server.module, "compiled", False):
            raise UserError("F2A puts another network in the discriminator's place: leave the module's compiled false")
        super().start(server)
        server.state.setdefault("forgiveness", server.parameters.new_full((), self.forgiveness))
        if "discriminator" not in server.state:
            server.state["discriminator"] = DiscriminatorPart(server.flat, server.module).read(server.parameters)

    def round(self, server: Server) -> Rounds:
        """The generator out, the discriminators' changes back, one by one; then the generator's training."""
        part, state = DiscriminatorPart(server.flat, server.module), server.state
        report = yield Exchange(
            {"generator": part.rest(server.parameters), "discriminator": state["discriminator"]},
            kept={"discriminator": 0},
        )
        for k, change in report.discriminator.items():
            known = state.get(f"discriminator.{k}", state["discriminator"])
            state[f"discriminator.{k}"] = known + change.to(known.dtype)
        self._forgive(server, part)

    def train(self, client: Client, sent: Broadcast) -> Message:
        """The client's own discriminator goes on from its last round, beside the server's generator."""
        part = DiscriminatorPart(client.flat, client.module)
        before = client.state.get("discriminator", sent["discriminator"])
        with taking_turns(client.module, "discriminator"):
            client.fit(part.joined(before, sent["generator"]))
        change = part.read(client.parameters) - before
        client.state["discriminator"] = before + change  # as the server adds it up
        return self.Report(discriminator=change)

    def _forgive(self, server: Server, part: DiscriminatorPart) -> None:
        discriminator: nn.Module = server.module.discriminator  # type: ignore[assignment]
        forgiveness = server.state["forgiveness"].clone().requires_grad_()
        aggregate = ForgiverFirst(discriminator, self._discriminators(server, part), forgiveness)
        discriminator.__dict__["forward"] = aggregate  # in its place, whatever the module calls it for
        try:
            self.train_generator(server, self._steps(server, forgiveness))
        finally:
            del discriminator.__dict__["forward"]
        server.state["forgiveness"] = forgiveness.detach()

    def _discriminators(self, server: Server, part: DiscriminatorPart) -> list[dict[str, Tensor]]:
        """The parameters of every client's discriminator, by name."""
        vector, found = server.parameters.clone(), []
        for k in range(server.clients):
            if f"discriminator.{k}" in server.state:
                part.write(vector, server.state[f"discriminator.{k}"])
                named = server.flat.as_dict(vector)
                found.append({n.removeprefix(PREFIX): v for n, v in named.items() if n.startswith(PREFIX)})
        return found

    def _steps(self, server: Server, forgiveness: Tensor) -> Iterator[list[Tensor]]:
        """The server's batches; between them lambda takes its own step."""
        for batch in self.batches(server):
            yield batch
            with torch.no_grad():  # the generator's backward pass has reached lambda, too
                assert forgiveness.grad is not None
                forgiveness -= self.lr * (forgiveness.grad + self.penalty * forgiveness)
                forgiveness.clamp_(min=0.0)
            forgiveness.grad = None
