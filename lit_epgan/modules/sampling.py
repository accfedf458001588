"""The evaluation half of a generative module: samples of its generators, and what Lightning's predict loop asks for."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules.manual_optimization import rows_of
from lit_epgan.networks.average import has_batch_norm, recompute_batch_norm
from lit_epgan.networks.modes import evaluating


def agreed_latent_dim(given: int | None, generator: nn.Module) -> int:
    """The noise's dimension: what is given, or what the generator says of itself. UserError: neither is there, or they
    differ."""
    own = getattr(generator, "latent_dim", None)
    dimension = own if given is None else given
    if dimension is None:
        raise UserError("the generator does not say its latent_dim: give the model's latent_dim.")
    if own not in (None, dimension) or dimension < 1:
        raise UserError(f"the model's latent_dim is {dimension}, but its generator takes {own}: leave it out.")
    return int(dimension)


def check_shape(data: Sequence[int] | None, generated: Sequence[int]) -> None:
    """Refuse data that the generator does not imitate."""
    if data is not None and tuple(data) != tuple(generated):
        raise UserError(
            f"the data have the shape {tuple(data)}, the generator makes {tuple(generated)}: change the networks' "
            "data_shape, or channels and image_size, or the data's (of a folder: --data.color and --data.image_size)."
        )


class Sampling(LightningModule):
    """A module with ``generator``: noise (n, latent_dim) -> samples (n, *data_shape).

    Attributes:
        generator: the network that is trained; of several ``members`` rows are equal blocks, block i for member i.
        average: the moving average of its parameters, or None.
        latent_dim: dimension of the noise.
        members: number of generators.
    """

    generator: nn.Module
    average: nn.Module | None
    latent_dim: int
    members: int
    _limits: Mapping[str, int | float | None] = MappingProxyType({})  # the trainer's, while it fetches fewer
    _refreshed: list[Tensor] | None = None  # the evaluated generator's tensors when its statistics were recomputed

    def setup(self, stage: str) -> None:
        """Have Lightning fetch a single held-out batch where no step looks at any: callbacks judge the samples."""
        for step, limit in (("validation_step", "limit_val_batches"), ("test_step", "limit_test_batches")):
            if getattr(type(self), step) is Sampling._look_at_none and getattr(self.trainer, limit):
                self._limits = {**self._limits, limit: getattr(self.trainer, limit)}
                setattr(self.trainer, limit, 1)

    def on_fit_start(self) -> None:
        """Refuse data of another shape than the generator's, where the data module says its ``shape``."""
        # without new BatchNorm statistics: a resumed run's would be those of another moment
        drawn = self._draw(1, generator_for("shape"))
        check_shape(getattr(self.trainer.datamodule, "shape", None), drawn.shape[1:])  # type: ignore[attr-defined]

    def teardown(self, stage: str) -> None:
        """Give the trainer its own limits back, for whatever it evaluates next."""
        for limit, given in self._limits.items():
            setattr(self.trainer, limit, given)
        self._limits = {}

    @property
    def evaluated_generator(self) -> nn.Module:
        """The network that is sampled from: the average if there is one, else the generator."""
        return self.generator if self.average is None else self.average

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """Samples (n, *data_shape) of the evaluated generators in evaluation mode, without gradients.

        Rows are the generators' in turn. BatchNorm statistics are first recomputed from noise: whoever merged or loaded
        parameters, they fit. Without ``generator`` the noise is the global stream's.
        """
        self.refresh_statistics()
        return self._draw(n, generator)

    def sample_each(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """As ``sample``, n samples of every generator: (members, n, *data_shape)."""
        self.refresh_statistics()
        return self._draw_each(n, generator)

    def refresh_statistics(self) -> None:
        """Recompute the evaluated generator's BatchNorm statistics from noise of a stream of its own.

        Once for every state of the generator: a round's metrics and pictures ask for samples again and again.
        """
        if not has_batch_norm(self.evaluated_generator):
            return
        tensors = [*self.evaluated_generator.parameters(), *self.evaluated_generator.buffers()]
        if self._refreshed is None or not all(map(_same, tensors, self._refreshed)):
            rows = self.members * max(64, 250 // self.members)
            noise = self._evaluation_noise(4 * rows, generator_for("batch norm statistics"))
            recompute_batch_norm(self.evaluated_generator, noise.split(rows))
            self._refreshed = [tensor.detach().clone() for tensor in tensors]

    def _look_at_none(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Nothing: a GAN is judged by its samples, which callbacks look at."""

    validation_step = test_step = _look_at_none

    def on_predict_start(self) -> None:
        self.refresh_statistics()

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self._draw(len(rows_of(batch).x), None)

    def forward(self, noise: Tensor) -> Tensor:
        """Samples (n, *data_shape) of ``noise`` (n, latent_dim), equal blocks of rows for the evaluated generators."""
        return self.evaluated_generator(noise)

    def _draw(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self._in_turn(self._noise_in_turn(n, generator))[:n]

    def _draw_each(self, n: int, generator: torch.Generator | None) -> Tensor:
        return self._of(self._evaluation_noise(n * self.members, generator))

    def _noise_in_turn(self, n: int, generator: torch.Generator | None) -> Tensor:
        """Noise (n or a few more, latent_dim), as many rows for every generator."""
        return self._evaluation_noise(-(-n // self.members) * self.members, generator)

    def _in_turn(self, noise: Tensor) -> Tensor:
        """Samples (n, *data_shape) of noise (n, latent_dim) whose rows are the generators' in turn."""
        return self._of(noise).transpose(0, 1).flatten(0, 1)

    @torch.no_grad()
    def _of(self, noise: Tensor) -> Tensor:
        """Samples (members, n, *data_shape) of noise (n * members, latent_dim) whose rows are the generators' in turn.

        The noise comes in one piece, so that the samples do not depend on how memory divides the work.
        """
        noise = noise.unflatten(0, (-1, self.members)).transpose(0, 1)
        with evaluating(self.evaluated_generator):
            parts = [
                self.evaluated_generator(part.flatten(0, 1)).unflatten(0, part.shape[:2])
                for part in noise.split(max(1, 500 // self.members), dim=1)
            ]
        return torch.cat(parts, 1)

    def _evaluation_noise(self, n: int, generator: torch.Generator | None) -> Tensor:
        device = None if generator is None else generator.device
        like = next(self.generator.parameters())
        return torch.randn(n, self.latent_dim, generator=generator, device=device).to(like)


def _same(tensor: Tensor, kept: Tensor) -> bool:
    return tensor.device == kept.device and tensor.dtype == kept.dtype and torch.equal(tensor, kept)
