"""A few records that each client makes up in the likeness of its own; the server trains on all of them."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.embedding import matched_rows, new_networks
from lit_epgan.engine import (
    Broadcast,
    Client,
    Exchange,
    Report,
    Rounds,
    Server,
    Stack,
    Work,
    check_server_training,
)
from lit_epgan.errors import UserError
from lit_epgan.federated.asked_once import AskedOnce
from lit_epgan.randomness import derive_seed, generator_for

ROWS, LABELS, RECORDS = "synthetic.rows", "synthetic.labels", "synthetic.records"


class SyntheticRecords(AskedOnce):
    """FedDM (Xiong et al. 2023) in one round: data condensed by distribution matching (Zhao and Bilen 2023).

    first round   client k learns ``per_class`` rows S_c of each class c that it holds, from noise,
                  min_S E_theta sum_c || mean_{x in X_kc} h_theta(x) - mean_{s in S_c} h_theta(s) ||^2,
                  by Adam, with a network h_theta initialised afresh at every step; it sends them, their labels and how
                  many records each stands for
        then      no client works; ``server_steps`` of the module's own training steps on all clients' rows in every
                  round, a row drawn as often as the records that it stands for

    It differs from the paper in that there is one round: the paper repeats it, with networks near the server's model,
    whose scores are matched beside the features, and with a bound on how far the server's model may move on the rows.

    Price: ``per_class`` rows for each class up, once; nothing down. Rows do not sum, and may show what a client's
    records have in common, or single ones where a class has few: nothing is private here.

    Args:
        features: name of the submodule that is h, x (n, ...) -> features; its layers are initialised afresh by their
            ``reset_parameters``.
        per_class: rows that a client makes of each class.
        matching_steps: of the clients, each with a network of its own.
        matching_rate: Adam's learning rate, in the data's units.
        matched: records of a class that a step looks at, at most.
        server_steps: steps of the server in a round.
        batch_size: rows of the server's batches.

    Raises:
        UserError: a number that cannot be, a module without that submodule or with one that cannot be initialised, data
            without labels, no client's rows, or a mechanism that changes single reports.
    """

    def __init__(
        self,
        features: str = "backbone",
        per_class: int = 10,
        matching_steps: int = 500,
        matching_rate: float = 0.1,
        matched: int = 256,
        server_steps: int = 200,
        batch_size: int = 32,
    ) -> None:
        for name, count in (("per_class", per_class), ("matching_steps", matching_steps), ("matched", matched)):
            if count < 1:
                raise UserError(f"SyntheticRecords' {name} is {count}; it must be at least 1")
        if not 0 < matching_rate < math.inf:
            raise UserError(f"SyntheticRecords' matching_rate is {matching_rate}; it must be above 0, and finite")
        check_server_training(self, server_steps, batch_size)
        self.features, self.per_class, self.matched = features, per_class, matched
        self.matching_steps, self.matching_rate = matching_steps, matching_rate
        self.server_steps, self.batch_size = server_steps, batch_size

    def build(self, module: nn.Module, seed: int) -> None:
        """Check that there are features, and that they can be initialised afresh."""
        network = dict(module.named_modules()).get(self.features)
        if network is None or not any(hasattr(part, "reset_parameters") for part in network.modules()):
            raise UserError(
                f"SyntheticRecords matches features of new networks, but {type(module).__name__} has no submodule "
                f"{self.features!r} with layers that have reset_parameters: set the algorithm's features"
            )
        kept = [name for name, part in network.named_modules() if not initialised_afresh(part)]
        if kept:
            raise UserError(
                f"SyntheticRecords matches features of new networks, but {self.features}.{kept[0]} keeps parameters "
                "that no reset_parameters initialises: set the algorithm's features to a part without it, or give the "
                "layer a reset_parameters"
            )

    def round(self, server: Server) -> Rounds:
        """The clients' rows, once; then the server's own training."""
        if server.round == 0:
            total = yield Exchange(
                {}, question="rows", training=False, combine={name: Stack() for name in (ROWS, LABELS, RECORDS)}
            )
            if ROWS in total.each:
                for name in (ROWS, LABELS, RECORDS):
                    server.state[name] = torch.cat(list(total.each.pop(name).values()))
            self._check_rows(server)
            if server.state[LABELS].is_floating_point():
                raise UserError("a mechanism has scaled SyntheticRecords' rows and their labels: leave it out")
        else:
            self._check_rows(server)
            server.train(self._batches(server))

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The rows."""
        return [MakingRows(self, client, received)]

    def _check_rows(self, server: Server) -> None:
        if ROWS not in server.state:
            raise UserError(
                "SyntheticRecords has rows of no client, for none took part in the first round or none sent finite "
                "rows: look for records that are not finite, lower matching_rate, or take a sampler that draws clients"
            )

    def _batches(self, server: Server) -> Iterator[list[Tensor]]:
        rows, labels, records = (server.state[name] for name in (ROWS, LABELS, RECORDS))
        for _ in range(self.server_steps):
            drawn = torch.multinomial(records.cpu(), self.batch_size, replacement=True).to(rows.device)
            yield [rows[drawn], labels[drawn]]


class MakingRows(Work):
    """A client's rows, of its own records alone."""

    def __init__(self, settings: SyntheticRecords, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings = settings

    def report(self) -> Report:
        """The rows, their labels, and how many records each stands for."""
        settings, client, by_class = self.settings, self.client, records_by_class(self.client.data())
        stream = (client.seed, client.index, "synthetic records")
        made = matched_rows(
            list(by_class.values()),
            settings.per_class,
            new_networks(client.module.get_submodule(settings.features), derive_seed(*stream, "networks")),
            settings.matching_steps,
            settings.matching_rate,
            settings.matched,
            generator_for(*stream),
        )
        labels = torch.tensor(list(by_class), device=made.device)
        counts = made.new_tensor([len(x) / settings.per_class for x in by_class.values()])
        repeated = (each.repeat_interleave(settings.per_class) for each in (labels, counts))
        return dict(zip((ROWS, LABELS, RECORDS), (made.flatten(0, 1), *repeated), strict=True))


def initialised_afresh(part: nn.Module) -> bool:
    """Whether ``reset_parameters`` makes all parameters that are a module's own (not its submodules')."""
    derived = any(hasattr(part, name) for name in ("weight_orig", "weight_g", "parametrizations"))
    return not derived and (hasattr(part, "reset_parameters") or not list(part.parameters(recurse=False)))


def records_by_class(batches: Iterator[Any]) -> dict[int, Tensor]:
    """A client's records (n_c, ...) by their label, labels in order.

    Raises:
        UserError: a batch is not (x, labels) with x of floating-point numbers and one integer a row.
    """
    rows: list[Tensor] = []
    labels: list[Tensor] = []
    for batch in batches:
        x, y = batch[:2] if isinstance(batch, list | tuple) and len(batch) > 1 else (None, None)
        if not (isinstance(x, Tensor) and x.is_floating_point() and isinstance(y, Tensor)
                and y.shape == x.shape[:1] and not y.is_floating_point()):  # fmt: skip
            raise UserError(
                "SyntheticRecords makes rows of each class: give batches (x, labels), x of floating-point numbers and "
                "one integer a row"
            )
        rows.append(x)
        labels.append(y)
    x, y = torch.cat(rows), torch.cat(labels)
    return {int(label): x[y == label] for label in y.unique()}
