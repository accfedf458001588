"""Rows whose mean features are those of given records, under one random network after another."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_epgan.embedding.feature_maps import FlatFeatures
from lit_epgan.randomness import generator_for, isolated, seed_on_host


def matched_rows(
    by_class: list[Tensor],
    per_class: int,
    networks: Callable[[], nn.Module],
    steps: int,
    rate: float,
    matched: int,
    generator: torch.Generator,
) -> Tensor:
    """Rows S_c (classes, per_class, ...) whose mean features, by class, are those of the records X_c:

    min_S sum_c || mean_{x in X_c} h(x) - mean_{s in S_c} h(s) ||^2, with a new network h at every step (distribution
    matching, Zhao and Bilen 2023; in federations Xiong et al. 2023).

    Args:
        by_class: the records (n_c, ...) of each class.
        per_class: rows of each.
        networks: gives a new network h, x (n, ...) -> features (n, d), at every call.
        steps: of Adam, each with a network of its own.
        rate: the first step's length; it falls linearly to nothing.
        matched: records of a class that a step looks at, at most.
        generator: CPU stream of the noise that rows begin as, and of the records that are looked at.
    """
    like = by_class[0]
    start = torch.randn(len(by_class), per_class, *like.shape[1:], generator=generator)
    rows = start.to(like).requires_grad_()
    optimizer = torch.optim.Adam([rows], lr=rate)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)
        chosen = [x[torch.randperm(len(x), generator=generator)[:matched].to(x.device)] for x in by_class]
        with torch.enable_grad():
            network = networks()
            wanted = [each.mean(0) for each in network(torch.cat(chosen)).split([len(x) for x in chosen])]
            means = network(rows.flatten(0, 1)).unflatten(0, rows.shape[:2]).mean(1)
            loss = (means - torch.stack(wanted)).square().sum()
            (rows.grad,) = torch.autograd.grad(loss, rows)
        optimizer.step()
    return rows.detach()


def new_networks(network: nn.Module, seed: int) -> Callable[[], nn.Module]:
    """Gives, at every call, a copy of the network that is initialised afresh, in evaluation mode, on its device.

    So a BatchNorm among its layers passes its input on.

    Args:
        network: x (n, ...) -> features, whose layers have ``reset_parameters``; it stays as it is.
        seed: of all the copies' parameters.
    """
    device, seeds = next(network.parameters()).device, generator_for(seed)
    copied = FlatFeatures(copy.deepcopy(network).cpu())

    def new() -> nn.Module:
        with isolated():
            seed_on_host(int(torch.randint(2**62, (), generator=seeds)))
            for part in copied.modules():
                if callable(reset := getattr(part, "reset_parameters", None)):
                    reset()
        return copy.deepcopy(copied).to(device)

    return new
