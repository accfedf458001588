"""Several networks in one pass: disjoint layers of members that share the rest, and networks stacked for ``vmap``."""

import copy
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, replace_all_batch_norm_modules_, vmap

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.precision import no_autocast

Layer = nn.modules.batchnorm._BatchNorm


class DisjointLinear(nn.Module):
    """Linear layers of several members, of one shape, stacked: (members * b, inputs) -> (members * b, outputs)."""

    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        # (members, inputs, outputs): twice as fast in a batched product as the transposed
        self.weight = nn.Parameter(torch.stack([layer.weight.detach().T for layer in layers]))
        biases = [layer.bias.detach()[None] for layer in layers if layer.bias is not None]
        self.register_parameter("bias", nn.Parameter(torch.stack(biases)) if biases else None)

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(0, (len(self.weight), -1))
        if self.bias is None:
            return torch.bmm(blocks, self.weight).flatten(0, 1)
        return torch.baddbmm(self.bias, blocks, self.weight).flatten(0, 1)


class DisjointNorm(nn.Module):
    """One norm over the channels of all members side by side, (b, members * c, ...), so that each has its own:
    BatchNorm over members * c channels, or GroupNorm over members times its groups."""

    def __init__(self, norm: nn.Module, members: int) -> None:
        super().__init__()
        self.norm, self.members = norm, members

    def forward(self, x: Tensor) -> Tensor:
        """Normalise rows (members * b, c, ...) member by member."""
        side_by_side = x.unflatten(0, (self.members, -1)).transpose(0, 1).flatten(1, 2)
        normed: Tensor = self.norm(side_by_side)
        return normed.unflatten(1, (self.members, -1)).transpose(0, 1).flatten(0, 1)


def disjoint_names(network: nn.Module) -> Iterator[str]:
    """Names of the parameters that the members do not share; their entries are member by member."""
    for prefix, part in network.named_modules():
        if isinstance(part, DisjointLinear | DisjointNorm):
            yield from (f"{prefix}.{name}" for name, _ in part.named_parameters())


def check_blocks(rows: int, members: int) -> None:
    """Refuse rows that do not divide into equal blocks."""
    if rows % members:
        raise UserError(f"{rows} rows of noise do not divide among {members} generators: give each as many.")


class BatchStatistics(nn.Module):
    """A BatchNorm layer with another's weight, bias and eps that takes the batch's own mean and variance, and keeps
    none.

    y = (x - mean x) / sqrt(var x + eps) * weight + bias, per channel. ``torch.vmap`` follows it everywhere; it does not
    follow torch's own layer on a GPU where images lie channels last.
    """

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """``x`` (n, channels, ...), normalised."""
        return torch.native_batch_norm(x, self.weight, self.bias, None, None, True, 0.0, self.eps)[0]


def with_batch_statistics(network: nn.Module) -> nn.Module:
    """The network itself, each of its BatchNorm layers replaced; parameters keep their names.

    A layer with a ``forward`` of its own keeps it, and only forgets what it has gathered; so does a network that is a
    layer.
    """
    for part in network.modules():
        for name, child in part._modules.items():
            if isinstance(child, Layer) and type(child).forward is Layer.forward:
                setattr(part, name, BatchStatistics(child))
    return replace_all_batch_norm_modules_(network)


class ForgiverFirst(nn.Module):
    """D(x) = sum_k w_k(x) D_k(x), w(x) = softmax_k(lambda D_k(x)): F2A's aggregate (Yonetani et al. 2019).

    lambda = 0 is the mean of all discriminators, lambda -> infinity their maximum (F2U). All are evaluated as one
    stacked network, which looks like ``discriminator`` and has parameters by name for each; BatchNorm takes the batch's
    own statistics. Gradients reach lambda, ``forgiveness``, a scalar tensor.
    """

    def __init__(self, discriminator: nn.Module, parameters: Sequence[dict[str, Tensor]], forgiveness: Tensor) -> None:
        super().__init__()
        template = with_batch_statistics(copy.deepcopy(discriminator))
        # not submodules: they are no parameters of whoever holds this
        self.__dict__["template"] = template.requires_grad_(False)
        self.stacked = {name: torch.stack([each[name] for each in parameters]) for name in parameters[0]}
        self.forgiveness = forgiveness

    def forward(self, x: Tensor) -> Tensor:

        def one(parameters: dict[str, Tensor]) -> Tensor:
            return functional_call(
                self.__dict__["template"], parameters, (x.to(next(iter(parameters.values())).dtype),)
            )

        # autocast does not reach into vmap: the discriminators judge in their parameters' own precision
        with no_autocast(x.device):
            scores = vmap(one, randomness="different")(self.stacked)
        return (torch.softmax(self.forgiveness * scores, dim=0) * scores).sum(0)
