"""Spectral normalisation after a merge: its vectors belong to the merged weights, not to the mean of the clients'."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm

ITERATIONS = 15  # as torch's own initialisation


@torch.no_grad()
def settle_spectral_norms(module: nn.Module) -> bool:
    """Run the power method of every spectral norm in ``module`` on the weights that it holds now.

    Returns:
        Whether there is any.
    """
    found = False
    for submodule in module.modules():
        if isinstance(submodule, nn.utils.parametrize.ParametrizationList):
            for each in submodule:
                if isinstance(each, _SpectralNorm) and submodule.original.dim() > 1:
                    each._power_method(each._reshape_weight_to_matrix(submodule.original), ITERATIONS)
                    found = True
        for hook in submodule._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                for _ in range(ITERATIONS):
                    hook.compute_weight(submodule, do_power_iteration=True)
                found = True
    return found
