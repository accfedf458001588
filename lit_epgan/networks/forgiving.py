"""Many discriminators as one that listens to the most forgiving of them."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from lit_epgan.networks.batch_statistics import with_batch_statistics
from lit_epgan.precision import no_autocast


class ForgiverFirst(nn.Module):
    """D(x) = sum_k w_k(x) D_k(x), w(x) = softmax_k(lambda D_k(x)): F2A's aggregate (Yonetani et al. 2019).

    lambda = 0 is the mean of all discriminators, lambda -> infinity their maximum (F2U). All are evaluated as one
    stacked network; BatchNorm takes the batch's own statistics.

    Args:
        discriminator: what they all look like: samples (n, *data_shape) -> scores (n, heads).
        parameters: the values of its parameters, by name, for each of them.
        forgiveness: lambda, a scalar tensor; gradients reach it.
    """

    def __init__(self, discriminator: nn.Module, parameters: Sequence[dict[str, Tensor]], forgiveness: Tensor) -> None:
        super().__init__()
        template = with_batch_statistics(copy.deepcopy(discriminator))
        # not submodules: they are no parameters of whoever holds this
        self.__dict__["template"] = template.requires_grad_(False)
        self.stacked = {name: torch.stack([each[name] for each in parameters]) for name in parameters[0]}
        self.forgiveness = forgiveness

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n, heads)."""

        def one(parameters: dict[str, Tensor]) -> Tensor:
            scores: Tensor = functional_call(
                self.__dict__["template"], parameters, (x.to(next(iter(parameters.values())).dtype),)
            )
            return scores

        # autocast does not reach into vmap: the discriminators judge in their parameters' own precision
        with no_autocast(x.device):
            scores = vmap(one, randomness="different")(self.stacked)
        return (torch.softmax(self.forgiveness * scores, dim=0) * scores).sum(0)
