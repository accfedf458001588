"""Bayes' rule at every client: what its own labels' frequencies say is taken out of what it learns."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, Server
from lit_epgan.federated.composed import Composed
from lit_epgan.federated.features import Features
from lit_epgan.federated.report import Report

COUNTS = "label_counts"


def log_ratio(own: Tensor, everyone: Tensor) -> Tensor:
    """log p_k(y) / p(y) (classes,) of a client's and everyone's counts (classes,), 0 where nobody has a label.

    The client's counts are smoothed by one record that is spread as everyone's are.
    """
    p = everyone / everyone.sum()
    p_k = (own + p) / (own.sum() + 1)
    return torch.where(p > 0, (p_k / p).log(), torch.zeros_like(p))


class LabelPriors(Composed):
    """Around any algorithm for classifiers: clients whose labels differ learn one posterior.

    By Bayes' rule a client with label frequencies p_k sees p_k(y | x) proportional to p(y | x) p_k(y) / p(y), where
    p(x | y) is the same everywhere. So in training, and only there, its scores are

        s(x, y) + strength log p_k(y) / p(y)

    before the softmax, and s learns the posterior under everyone's frequencies p, which all clients share: the logit
    adjustment of Menon et al. 2021 (equation 10), client by client, as in Zhang et al. 2022 (FedLC), relative to p so
    that nothing changes in evaluation. Where labels are alike it is the inner algorithm.

    Price: in its first round a client counts its labels in one pass over its records and sends the counts, which tell
    how often it has each class; the sum over clients comes with every broadcast. The first round is the inner's.

    Args:
        scores: dotted name of the submodule whose outputs are scores with classes in the last dimension. The labels
            are a batch's second entry, int64, negative for none.
        inner: the algorithm that it goes around; FedAvg by default.
        strength: 1 for Bayes' rule.

    Raises:
        UserError: a negative strength, no such submodule, or a batch without labels below its number of classes.
    """

    def __init__(self, scores: str, inner: FederatedAlgorithm | None = None, strength: float = 1.0) -> None:
        super().__init__(inner)
        if not strength >= 0:
            raise UserError(f"LabelPriors' strength is {strength}; it must be 0 (the inner algorithm) or more")
        self.scores, self.strength = scores, strength
        self._handle: RemovableHandle | None = None

    def start_fit(self, server: Server) -> None:
        self._classes = Features(server.module, self.scores).width
        server.state.setdefault(COUNTS, self._none(server))
        super().start_fit(server)

    def client_download(self, client: Client) -> Report:
        return {**super().client_download(client), COUNTS: client.server.state[COUNTS]}

    def start_client(self, client: Client) -> None:
        self._is_new = COUNTS not in client.state
        if self._is_new:
            client.state[COUNTS] = self._count(client)
        everyone = client.server.state[COUNTS]
        if everyone.any():  # first, for the inner algorithm may look at gradients
            shift = self.strength * log_ratio(client.state[COUNTS], everyone)
            self._shift = shift.to(client.server.parameters)
            submodule = client.server.module.get_submodule(self.scores)
            self._handle = submodule.register_forward_hook(self._add)
        super().start_client(client)

    def end_client(self, client: Client) -> None:
        self._leave()
        super().end_client(client)

    def client_report(self, client: Client) -> Report:
        report = super().client_report(client)
        return {**report, COUNTS: client.state[COUNTS]} if self._is_new else report

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        if COUNTS in total:
            server.state[COUNTS] = server.state[COUNTS] + total.pop(COUNTS)
        super().server_update(server, total)

    def end_fit(self, server: Server) -> None:
        self._leave()
        super().end_fit(server)

    def _leave(self) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + self._shift if module.training else output

    def _none(self, server: Server) -> Tensor:
        return torch.zeros(self._classes, dtype=torch.float64, device=server.parameters.device)

    def _count(self, client: Client) -> Tensor:
        counts = self._none(client.server)
        for batch in client.data():
            labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
            if labels is None or labels.is_floating_point() or (labels >= self._classes).any():
                raise UserError(
                    f"LabelPriors needs whole numbers below {self._classes}, as {self.scores!r} has scores, as a "
                    "batch's second entry"
                )
            counts += torch.bincount(labels[labels >= 0], minlength=self._classes)
        return counts
