"""A bounded history of a network's parameters, held in buffers."""

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_epgan.lib.bounds import at_least, one_of, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import no_autocast
from lit_epgan.modules.objectives import Objective
from lit_epgan.networks.ensembles import disjoint_names, with_batch_statistics

Approximation = Literal["psa", "gma"]


class Snapshots(nn.Module):
    """The last ``size`` parameter vectors of a network, newest first; nothing but two floating-point buffers.

    Where several clients' buffers are averaged, place j becomes the weighted mean of the clients' j-th newest
    snapshots, of those that have one: ``filled`` averages to their weight w and ``vectors`` to w times their mean.

    Args:
        network: whose parameters are kept, trainable or not; only their names and shapes are read here.
        size: number of snapshots.

    Attributes:
        vectors: ``filled`` times the snapshots (size, parameters).
        filled: 1 where a snapshot has been taken, 0 before (size,).
    """

    vectors: Tensor
    filled: Tensor

    def __init__(self, network: nn.Module, size: int) -> None:
        super().__init__()
        self._shapes = {name: parameter.shape for name, parameter in network.named_parameters()}
        vector = _flat(network)
        self.register_buffer("vectors", vector.new_zeros(size, len(vector)))
        self.register_buffer("filled", vector.new_zeros(size))

    @torch.no_grad()
    def take(self, network: nn.Module) -> None:
        """Keep the network's parameters as they are; the oldest snapshot makes room."""
        self.vectors.copy_(torch.cat([_flat(network)[None], self.vectors[:-1]]))
        self.filled.copy_(torch.cat([torch.ones_like(self.filled[:1]), self.filled[:-1]]))

    def read(self) -> Tensor:
        """The snapshots (size, parameters); zeros where there is none yet."""
        return self.vectors / torch.where(self.filled > 0, self.filled, 1)[:, None]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """One snapshot (parameters,) as the network's named parameters: views."""
        parts = vector.split([shape.numel() for shape in self._shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)}


def _flat(network: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


class Prior(nn.Module):
    """Base of all priors; what it keeps between steps are buffers. The defaults are a uniform prior's."""

    @property
    def has_loss(self) -> bool:
        """Whether it adds to the generators' loss of samples."""
        return type(self).generator_loss is not Prior.generator_loss

    def build(self, generator: nn.Module, discriminator: nn.Module, objective: Objective) -> None:
        """Make room for what the prior keeps of the networks; the GAN calls this once."""

    def before_step(self, steps: int, generator: nn.Module, discriminator: nn.Module) -> None:
        """Before a training step; ``steps`` is the number of steps since the optimizers were fresh."""

    def generator_loss(self, generator: nn.Module, discriminator: nn.Module, fake: Tensor) -> Tensor | None:
        """What is added to the generators' loss of ``fake`` (n, *data_shape), which carries their graph."""
        return None

    def adjust_gradients(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change the gradients of one network in place before its optimizer's step."""


class UniformPrior(Prior):
    """p(theta) constant: the vanilla GAN."""


class GaussianPrior(Prior):
    """p(theta) = N(0, 1 / precision) for all generators and discriminators: BayesGAN (Saatchi and Wilson 2017).

    Adds precision * theta, the gradient of -log p, to every gradient of both networks.

    Args:
        precision: in units of the loss, which is a mean over records: a variance v over n records is 1 / (n v).
    """

    def __init__(self, precision: float = 1e-4) -> None:
        super().__init__()
        within("[0, inf)", self, precision=precision)
        self.precision = precision

    def adjust_gradients(self, parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """gradient <- gradient + precision theta."""
        torch._foreach_add_(gradients, parameters, alpha=self.precision)


class HistoryPrior(Prior):
    """The generators' prior is their distribution at the previous iteration: ProbGAN (He et al. 2019).

    ``psa``, partial summation: -log q^(t)(theta) = sum_{i < t} J_G(theta; D^(i)) with J_G the generator's loss (EP-GAN,
    eq. 47 as corrected in docs/errata): the generators are trained against earlier discriminators, too. Of these a
    bounded history is kept:

        loss = J_G(theta; D) + weight / H sum_{i = 1}^H J_G(theta; D^(i)),    H <= size

    BatchNorm in an earlier discriminator normalises by the batch, as in training.

    ``gma``, Gaussian mixture approximation: q^(t) is a mixture around its N samples, the last snapshot's generators:

        loss = J_G(theta; D) - weight mean_m log (1/N) sum_{n = 1}^N exp(-|| theta_m - theta_n^(t) ||^2 / (2 variance))

    with theta_m the disjoint part of member m and the part that all share.

    A snapshot is taken before steps 0, ``every``, 2 ``every``, ... of the optimizers' own count. The first one under
    federation is therefore the server's model, if the optimizers are reset for each client; the position in the history
    needs no counter, because the newest comes first. The callback's policy for ``buffers`` decides whose history it is:
    ``average``: one for all, place by place the weighted mean of the clients' newest, second newest, ... snapshots,
    which reaches over the rounds, however short (and adds ``size`` discriminators to every message); ``local``: each
    client's own; ``exclude``: empty whenever a client begins.

    Args:
        size: number of discriminators in psa's history; each costs a pass of the generated rows per step.
        every: steps from one snapshot to the next.
        weight: coefficient of what the prior adds to the loss.
        approximation: ``psa`` or ``gma``.
        variance: of gma's mixture components.
        one_each_step: psa's sum is estimated by one snapshot that each step draws: the same expectation, at the price
            of one pass.
    """

    snapshots: Snapshots

    def __init__(
        self,
        size: int = 4,
        every: int = 100,
        weight: float = 1.0,
        approximation: Approximation = "psa",
        variance: float = 1.0,
        one_each_step: bool = False,
    ) -> None:
        super().__init__()
        one_of(("psa", "gma"), self, approximation=approximation)
        at_least(1, self, size=size, every=every)
        within("[0, inf)", self, weight=weight)
        within("(0, inf)", self, variance=variance)
        self.size, self.every, self.weight = size, every, weight
        if one_each_step and approximation != "psa":
            raise UserError("HistoryPrior's one_each_step draws among psa's snapshots, and gma has only one.")
        self.approximation, self.variance, self.one_each_step = approximation, variance, one_each_step

    def build(self, generator: nn.Module, discriminator: nn.Module, objective: Objective) -> None:
        psa = self.approximation == "psa"
        self.snapshots = Snapshots(discriminator, self.size) if psa else Snapshots(generator, 1)
        self._objective = objective
        self._disjoint = set(disjoint_names(generator))
        self._members = getattr(generator, "members", 1)
        # a form without values, which the snapshots fill; in a tuple, so that it is no submodule
        self._discriminator = (with_batch_statistics(copy.deepcopy(discriminator)).train().to("meta"),)

    def before_step(self, steps: int, generator: nn.Module, discriminator: nn.Module) -> None:
        if steps % self.every == 0:
            self.snapshots.take(discriminator if self.approximation == "psa" else generator)

    def generator_loss(self, generator: nn.Module, discriminator: nn.Module, fake: Tensor) -> Tensor:
        """The prior's term, in the parameters' own precision; zero while there is no snapshot."""
        with no_autocast(fake.device):
            if self.approximation == "psa":
                return self.weight * self._past_objectives(discriminator, fake)
            return -self.weight * self._log_mixture(generator)

    def _past_objectives(self, discriminator: nn.Module, fake: Tensor) -> Tensor:
        """Mean over the snapshots i of J_G(theta; D^(i))."""
        (form,) = self._discriminator
        buffers = {name: discriminator.get_buffer(name) for name, _ in form.named_buffers()}

        def past_objective(vector: Tensor) -> Tensor:
            scores = functional_call(form, self.snapshots.named(vector) | buffers, (fake.to(vector.dtype),))
            return self._objective.generator_loss(scores)

        filled, vectors = self.snapshots.filled, self.snapshots.read()
        if self.one_each_step:
            # multinomial refuses a history that is still empty
            drawn = torch.searchsorted(filled.cumsum(0), torch.rand_like(filled[:1]) * filled.sum(), right=True)
            return past_objective(vectors[drawn.clamp_max(self.size - 1)][0]) * (filled[0] > 0)
        losses = vmap(past_objective, randomness="different")(vectors)
        return filled @ losses / filled.sum().clamp_min(torch.finfo(filled.dtype).tiny)

    def _log_mixture(self, generator: nn.Module) -> Tensor:
        """Mean over members m of log q^(t)(theta_m), up to a constant."""
        disjoint, shared = self._parts(dict(generator.named_parameters()))
        old_disjoint, old_shared = self._parts(self.snapshots.named(self.snapshots.read()[0]))
        distances = _squared_distances(disjoint, old_disjoint)
        mixture = torch.logsumexp(distances / (-2 * self.variance), 1).mean() - math.log(self._members)
        log_mixture = mixture - (shared - old_shared).square().sum() / (2 * self.variance)
        return log_mixture * (self.snapshots.filled[0] > 0)

    def _parts(self, named: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The disjoint parameters (members, ...) and those that all share (...)."""
        shared = [tensor.flatten() for name, tensor in named.items() if name not in self._disjoint]
        disjoint = [named[name].reshape(self._members, -1) for name in named if name in self._disjoint]
        empty = shared[0].new_zeros(self._members, 0)
        return torch.cat([empty, *disjoint], 1), torch.cat(shared)


def _squared_distances(moved: Tensor, old: Tensor) -> Tensor:
    """|| moved_m - old_n ||^2 for all pairs of rows (n, d); as precise where nothing has moved."""
    move, centred = moved - old, old - old.mean(0)
    along, gram = move @ centred.T, centred @ centred.T
    between = gram.diag()[:, None] - 2 * gram + gram.diag()
    return move.square().sum(1, keepdim=True) + 2 * (along.diag()[:, None] - along) + between
