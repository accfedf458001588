"""A generator on the server against all clients' own discriminators."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, Server
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.federated.report import Report
from lit_epgan.networks.forgiving import ForgiverFirst

PREFIX = "discriminator."


class F2A(FedAvgGAN):
    """Forgiver-first aggregation (Yonetani et al. 2019), run as a federation with FedAvg-GAN's rounds.

        client   trains its *own* discriminator D_k, which is never averaged, and sends it
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
        self.forgiveness = forgiveness
        self.penalty = penalty
        self.lr = lr

    def start_fit(self, server: Server) -> None:
        super().start_fit(server)
        if getattr(server.module, "compiled", False):
            raise UserError("F2A puts another network in the discriminator's place: leave the module's compiled false")
        server.state.setdefault("forgiveness", server.parameters.new_full((), self.forgiveness))

    def start_client(self, client: Client) -> None:
        super().start_client(client)
        if "discriminator" in client.state:
            self._write(client.parameters, client.state["discriminator"])

    def client_download(self, client: Client) -> Report:
        vector = client.server.parameters
        return {"generator": vector[: vector.numel() - len(self._read(vector))]}  # as many numbers; it has its own D

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        client.state["discriminator"] = self._read(client.parameters)

    def client_report(self, client: Client) -> Report:
        return {f"discriminator.{client.index}": client.state["discriminator"]}

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        server.state.update({name: value.to(server.parameters.dtype) for name, value in total.items()})
        discriminator: nn.Module = server.module.discriminator  # type: ignore[assignment]
        self._forgiveness = server.state["forgiveness"].clone().requires_grad_()
        aggregate = ForgiverFirst(discriminator, self._discriminators(server), self._forgiveness)
        discriminator.__dict__["forward"] = aggregate  # in its place, whatever the module calls it for
        try:
            self._train_generator(server)
        finally:
            del discriminator.__dict__["forward"]
        server.state["forgiveness"] = self._forgiveness.detach()

    def _discriminators(self, server: Server) -> list[dict[str, Tensor]]:
        """The parameters of every client's discriminator, by name."""
        vector, found = server.parameters.clone(), []
        for k in range(server.clients):
            if f"discriminator.{k}" in server.state:
                self._write(vector, server.state[f"discriminator.{k}"])
                named = server.flat.as_dict(vector)
                found.append({n.removeprefix(PREFIX): v for n, v in named.items() if n.startswith(PREFIX)})
        return found

    def _batches(self, server: Server) -> Iterator[list[Tensor]]:
        forgiveness = self._forgiveness
        for batch in super()._batches(server):
            yield batch
            with torch.no_grad():  # the generator's backward pass has reached lambda, too
                assert forgiveness.grad is not None
                forgiveness -= self.lr * (forgiveness.grad + self.penalty * forgiveness)
                forgiveness.clamp_(min=0.0)
            forgiveness.grad = None
