"""Bayes' rule at every client: what its own labels' frequencies say is taken out of what it learns."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lit_epgan.engine import (
    Algorithm,
    Around,
    Broadcast,
    Client,
    Exchange,
    Report,
    Rounds,
    Server,
    Total,
    Work,
    passing,
)
from lit_epgan.errors import UserError
from lit_epgan.federated.features import Features

COUNTS = "label_counts"


def log_ratio(own: Tensor, everyone: Tensor) -> Tensor:
    """log p_k(y) / p(y) (classes,) of a client's and everyone's counts (classes,), 0 where nobody has a label.

    The client's counts are smoothed by one record that is spread as everyone's are.
    """
    p = everyone / everyone.sum()
    p_k = (own + p) / (own.sum() + 1)
    return torch.where(p > 0, (p_k / p).log(), torch.zeros_like(p))


class LabelPriors(Around):
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

    def __init__(self, scores: str, inner: Algorithm | None = None, strength: float = 1.0) -> None:
        super().__init__(inner)
        if not strength >= 0:
            raise UserError(f"LabelPriors' strength is {strength}; it must be 0 (the inner algorithm) or more")
        self.scores, self.strength = scores, strength

    def start(self, server: Server) -> None:
        """No label counted."""
        classes = Features(server.module, self.scores).width
        none = torch.zeros(classes, dtype=torch.float64, device=server.parameters.device)
        server.state.setdefault(COUNTS, none)
        super().start(server)

    def round(self, server: Server) -> Rounds:
        """The inner algorithm's, with everyone's counts out and new clients' counts back."""

        def out(exchange: Exchange) -> Exchange:
            if not exchange.training:
                return exchange
            return replace(exchange, sent=lambda k: exchange.sent_to(k) | {COUNTS: server.state[COUNTS]})

        def back(exchange: Exchange, total: Total) -> None:
            if COUNTS in total:
                server.state[COUNTS] = server.state[COUNTS] + total.sums.pop(COUNTS)

        yield from passing(super().round(server), out, back)

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The shift of the scores ahead of the inner algorithm, which may look at gradients."""
        inner = super().works(question, client, received)
        return [Shifted(self, client, received), *inner] if COUNTS in received else inner


class Shifted(Work):
    """A client's training with its label frequencies taken out of its scores."""

    def __init__(self, settings: LabelPriors, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings = settings
        self._handle: RemovableHandle | None = None

    def begin(self) -> None:
        """Count the own labels, once; shift the scores once everyone's are known."""
        client, everyone = self.client, self.received[COUNTS]
        self._is_new = COUNTS not in client.state
        if self._is_new:
            client.state[COUNTS] = self._count(everyone)
        if everyone.any():
            shift = self.settings.strength * log_ratio(client.state[COUNTS], everyone)
            self._shift = shift.to(client.parameters)
            self._handle = client.module.get_submodule(self.settings.scores).register_forward_hook(self._add)

    def report(self) -> Report:
        """The counts, once."""
        return {COUNTS: self.client.state[COUNTS]} if self._is_new else {}

    def end(self) -> None:
        """The scores are the module's own again."""
        self.leave()

    def leave(self) -> None:
        """The scores are the module's own again."""
        if self._handle is not None:
            self._handle.remove()
        self._handle = None

    def _add(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + self._shift if module.training else output

    def _count(self, everyone: Tensor) -> Tensor:
        counts, classes = torch.zeros_like(everyone), len(everyone)
        for batch in self.client.data():
            labels = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
            if labels is None or labels.is_floating_point() or (labels >= classes).any():
                raise UserError(
                    f"LabelPriors needs whole numbers below {classes}, as {self.settings.scores!r} has scores, as a "
                    "batch's second entry"
                )
            counts += torch.bincount(labels[labels >= 0], minlength=classes)
        return counts
