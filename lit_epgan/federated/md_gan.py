"""A generator on the server, a discriminator at each client, and between them samples and gradients of samples."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine import Broadcast, Client, Exchange, Message, Rounds, Server, merged
from lit_epgan.federated.fedavg_gan import DiscriminatorPart, FedAvgGAN, taking_turns
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for


class MDGAN(FedAvgGAN):
    """MD-GAN (Hardy, Le Merrer and Sericola 2019, algorithm 1 with its k = 1): a round is one step of the generator.

        server   sends two batches of samples, X_d and X_g, the same to every client
        client   trains its *own* discriminator D_k, its records against X_d, for its local steps; sends how the
                 generator's loss changes with the samples, F_k = dJ_G(X_g; D_k) / dX_g
        server   steps the generator down sum_k n_k F_k / sum_k n_k . dX_g / dtheta

    Every ``swap_every`` rounds the clients of the round hand their discriminators on, each to the next in a circle
    drawn anew. The paper's clients do so among themselves; here a message goes through the server, which sees each.

    Give the federation ``optimizer_state: keep`` and the data one local step (the paper's L). A module must offer
    what FedAvgGAN asks for, ``latent_dim``, and ``player_loss(player, batch)``, as ``lit_epgan.modules.GAN`` does.

    Price: two batches of samples down and one batch of gradients up in a round, and as many rounds as the generator
    takes steps. Gradients sum over clients, so that secure aggregation applies where discriminators are not swapped.

    Args:
        batch_size: samples of a batch.
        swap_every: rounds from one swap to the next; None: discriminators stay where they are. The paper's: as many
            as a client's records have batches.

    Raises:
        UserError: an argument below 1; a module that lacks what is needed, is compiled, has labels, or has a prior with
            a loss of its own, which would ask the discriminator about samples.
    """

    class Report(Message):
        """What leaves a client: F_k (n, *data_shape), and in a swap's round the discriminator's change, which the
        server sees by itself."""

        feedback: Tensor = merged("mean")
        handed_on: Tensor | None = merged("stack", default=None)

    def __init__(self, batch_size: int = 32, swap_every: int | None = None) -> None:
        super().__init__(1, batch_size)
        at_least(1, self, swap_every=swap_every)
        self.swap_every = swap_every

    def build(self, module: nn.Module, seed: int) -> None:
        """Check that samples and their gradients say all of a generator's step."""
        super().build(module, seed)
        missing = [name for name in ("latent_dim", "player_loss") if not hasattr(module, name)]
        if missing:
            raise UserError(f"MDGAN needs a module with {' and '.join(missing)}; {type(module).__name__} has none")
        wrong = {
            "compiled": (getattr(module, "compiled", False), "puts samples in the generator's place", "leave it false"),
            "labels": (getattr(module, "labels", 0), "sends samples without labels", "take lit_epgan.modules.GAN"),
            "prior": (
                getattr(getattr(module, "prior", None), "has_loss", False),
                "has no discriminator on the server for its loss to ask",
                "leave it out, or take a GaussianPrior",
            ),
        }
        for name, (found, why, instead) in wrong.items():
            if found:
                raise UserError(f"MDGAN {why}, and the module has {name!r}: {instead}")

    def start(self, server: Server) -> None:
        super().start(server)
        server.state.setdefault("swaps", torch.tensor(0))

    def round(self, server: Server) -> Rounds:
        """Samples out, their gradients back, and the generator's step."""
        shown, judged = (self._noise(server, name) for name in ("shown", "judged"))
        with server.holding(), torch.no_grad():
            generator: nn.Module = server.module.generator  # type: ignore[assignment]
            samples = {"shown": generator(shown), "judged": generator(judged)}
        last = self.swap_every is not None and (server.round + 1) % self.swap_every == 0
        first = DiscriminatorPart(server.flat, server.module).read(server.parameters)  # a round leaves it as it is
        report = yield Exchange(
            lambda k: {**samples, **self._own(server, k, first), "hand_on": torch.tensor(last)},
            kept={"discriminator": int(server.state["swaps"])},
            answer=self.Report if self.swap_every is not None else _Feedbacks,
        )
        if report.feedback is not None:
            self._step(server, judged, report.feedback.to(server.parameters))
        if last:
            self._swap(server, first, report.handed_on)

    def train(self, client: Client, sent: Broadcast) -> Message:
        """The own discriminator's steps against the server's samples; then how these should change."""
        module, part = client.module, DiscriminatorPart(client.flat, client.module)
        handed, swap = sent["discriminator"], sent["swap"]
        swapped = int(client.state.get("swap", swap)) != int(swap)
        own = handed if swapped else client.state.get("discriminator", handed)
        shown, judged = sent["shown"], sent["judged"].clone().requires_grad_()
        with taking_turns(module, "discriminator"):
            with generating(module, lambda noise: shown[torch.arange(len(noise), device=shown.device) % len(shown)]):
                client.fit(part.joined(own, torch.zeros_like(part.rest(client.parameters))))
            with generating(module, lambda noise: judged), torch.enable_grad():
                (feedback,) = torch.autograd.grad(module.player_loss("generator", [judged]), judged)  # type: ignore[operator]
        client.state["discriminator"] = part.read(client.parameters)
        client.state["swap"] = swap.clone()
        if not sent["hand_on"]:
            return self.Report(feedback=feedback)
        return self.Report(feedback=feedback, handed_on=client.state["discriminator"] - handed)

    def _noise(self, server: Server, name: str) -> Tensor:
        """Noise (n, latent_dim), as many rows for each of several generators."""
        members: int = getattr(server.module, "members", 1)
        rows, latent = members * -(-self.batch_size // members), server.module.latent_dim
        stream = generator_for(server.seed, server.round, name)
        return torch.randn(rows, latent, generator=stream).to(server.parameters)  # type: ignore[call-overload]

    def _own(self, server: Server, client: int, first: Tensor) -> dict[str, Tensor]:
        """The discriminator that a client was handed last, by which swap; before any, everybody's first."""
        state = server.state
        return {
            "discriminator": state.get(f"discriminator.{client}", first),
            "swap": state.get(f"swap.{client}", torch.tensor(0)),
        }

    def _step(self, server: Server, noise: Tensor, feedback: Tensor) -> None:
        """The generator's step on the samples of ``noise``, whose loss has the gradient ``feedback``."""
        generator, discriminator = server.module.generator, server.module.discriminator
        steps, forward = list(self.batches(server)), generator.forward  # type: ignore[union-attr]
        # in their places, whatever the module calls them for
        generator.__dict__["forward"] = lambda _: forward(noise)
        discriminator.__dict__["forward"] = lambda x: _Feedback.apply(x, feedback)
        try:
            self.train_generator(server, steps)
        finally:
            for network in (generator, discriminator):
                del network.__dict__["forward"]

    def _swap(self, server: Server, first: Tensor, changes: Mapping[int, Tensor]) -> None:
        """Each client's discriminator goes to the next in a circle of those who handed one on."""
        own = {k: self._own(server, k, first)["discriminator"] + change.to(first) for k, change in changes.items()}
        order = torch.randperm(len(own), generator=generator_for(server.seed, server.round, "swap")).tolist()
        circle = [list(own)[place] for place in order]
        server.state["swaps"] = server.state["swaps"] + 1
        for giver, taker in zip(circle, [*circle[1:], *circle[:1]], strict=True):
            server.state[f"discriminator.{taker}"] = own[giver]
            server.state[f"swap.{taker}"] = server.state["swaps"].clone()


class _Feedbacks(Message):
    """MDGAN's report where no discriminator is handed on: it sums."""

    feedback: Tensor = merged("mean")


@contextmanager
def generating(module: nn.Module, samples: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within, a module's generator makes these samples, whatever the module calls it for."""
    generator: nn.Module = module.generator  # type: ignore[assignment]
    generator.__dict__["forward"] = samples
    try:
        yield
    finally:
        del generator.__dict__["forward"]


class _Feedback(torch.autograd.Function):
    """Scores of no meaning, whose gradient with respect to the samples is the given one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, feedback: Tensor) -> Tensor:
        ctx.save_for_backward(feedback)
        return x.new_zeros(len(x), 1)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None
