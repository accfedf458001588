"""Expectation propagation in function space: a client's site is a generator of its own data."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server, scalar, unsent
from lit_epgan.federated.composed import Composed
from lit_epgan.federated.report import Report
from lit_epgan.federated.tilted_batch import batch_rows, row_counts, tilted_batch
from lit_epgan.randomness import generator_for

Samples = tuple[Tensor, Tensor | None]  # rows and their labels, if they have any


class GeneratorSites(Composed):
    """The site factor of client j, exp(n_j E_{x ~ X_j} phi(D(x))), by samples of a generator trained on X_j alone.

    Removing client k's site from the product leaves the exact cavity: the other sites' samples. So

        first round   a client that has no site yet trains alone (``data.warmup_steps`` long in round 0); its generator
                      is its site
        then          the first ``refine`` of its steps go on training the own site on own data; after that, from the
                      server's parameters, the minibatch is ``own_rows`` rows of own data, which weigh n_k / n in all,
                      and samples of the other sites for the rest
        merge         that of ``inner``: FedAvg, or EP in parameter space

    A module must offer ``sample(n, generator)`` from the submodule ``generator`` names (the evaluated one), and take
    batches (x, y, weight) whose third entry weighs the rows; samples have no labels (y is -100), but those of a
    module with ``sample_labelled(n, generator)`` and a buffer ``label_shares``, which then belongs to the site.

    Price: the clients' individual generators become visible to the server and to each other (they do not sum, so
    secure aggregation cannot hide them; under differential privacy each must carry its own noise); one generator more
    up, and K - 1 down, per client: once, or every round with ``refine``. Always report the union of the sites beside
    it (``samples``): no federation at all.

    Args:
        generator: name of the submodule that ``sample`` draws from: its parameters and buffers are the site.
        own_rows, other_rows: rows of own data and of the others' in a minibatch; by default the latter keep its size.
        pool: samples drawn of each site, afresh each round.
        refine: share of a round's steps that refine the own site; 0 keeps the first one.
        inner: the algorithm that merges the parameters and adds its own prior; FedAvg by default.

    Raises:
        UserError: if an argument is out of its range, or the module offers no such submodule or no ``sample``.
    """

    def __init__(
        self,
        generator: str = "average",
        own_rows: int = 8,
        pool: int = 2000,
        refine: float = 0.0,
        inner: FederatedAlgorithm | None = None,
        other_rows: int | None = None,
    ) -> None:
        super().__init__(inner)
        for name, count in (("own_rows", own_rows), ("pool", pool), ("other_rows", other_rows)):
            if count is not None and count < 1:
                raise UserError(f"GeneratorSites' {name} is {count}; it must be at least 1")
        if not 0 <= refine < 1:
            raise UserError(f"GeneratorSites' refine is {refine}; it must lie in [0, 1)")
        self.generator = generator
        self.own_rows, self.other_rows = own_rows, other_rows
        self.pool = pool
        self.refine = refine
        self._pools: dict[int, Samples] = {}
        self._changed: set[int] = set()  # clients whose site is new in this round

    def start_fit(self, server: Server) -> None:
        super().start_fit(server)
        known = [name for name, _ in server.module.named_children()]
        if self.generator not in known or not hasattr(server.module, "sample"):
            raise UserError(
                f"GeneratorSites needs a module with sample(n, generator) and a submodule {self.generator!r}; "
                f"{type(server.module).__name__} has the submodules {', '.join(known)}: set the algorithm's generator"
            )

    def start_round(self, server: Server) -> None:
        super().start_round(server)
        self._changed = set()
        self._pools = {
            k: self._draw(server, k, self.pool, "pool") for k in range(server.clients) if f"site.{k}" in server.state
        }

    def start_client(self, client: Client) -> None:
        super().start_client(client)
        others = [k for k in self._pools if k != client.index]
        self._alone = not others or "site" not in client.state
        if not self._alone:
            self._others = joined([self._pools[k] for k in others])
            self._others_records = torch.cat([client.server.state[f"records.{k}"] for k in others]).cpu()
        self._refining = not self._alone and self._refinement(client) > 0
        if self._refining:
            client.server.flat.load(client.state["parameters"])
            self._load(client.server, client.state["site"])

    def client_download(self, client: Client) -> Report:
        """The others' sites, once where they are never refined, beside what ``inner`` needs."""
        others = [f"site.{k}" for k in self._pools if k != client.index]
        sites = {n: client.server.state[n] for n in others} if self.refine else unsent(client, others)
        return dict(super().client_download(client)) | sites

    def client_batch(self, client: Client, batch: Any) -> Any:
        if self._refining and client.step == self._refinement(client):
            self._keep_site(client)
            self._refining = False
            client.restart()
        elif not self._refining:  # before the restart's first batch no step of inner's has been made
            batch = super().client_batch(client, batch)
        return batch if self._alone or self._refining else self._tilted_batch(client, batch)

    def extra_loss(self, client: Client) -> Tensor | None:
        return None if self._refining else super().extra_loss(client)

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        if not self._refining:  # a site knows nothing of the others
            super().adjust_gradients(client, optimized)

    def after_step(self, client: Client, optimized: OptimizedParameters) -> None:
        if not self._refining:
            super().after_step(client, optimized)

    def end_client(self, client: Client) -> None:
        super().end_client(client)
        if self._alone:
            self._keep_site(client)

    def client_report(self, client: Client) -> Report:
        report = dict(super().client_report(client))
        if client.index in self._changed:
            report[f"site.{client.index}"] = client.state["site"]
            report[f"records.{client.index}"] = scalar(client.weight)
        return report

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        super().server_update(server, total)
        for name, value in total.items():
            if name.startswith(("site.", "records.")):
                server.state[name] = value.to(server.parameters.dtype)

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``union``: the sites' own samples, in proportion to the clients' records."""
        sites = [k for k in range(server.clients) if f"site.{k}" in server.state]
        further = super().samples(server, n, start)
        if not sites:
            return further
        records = torch.cat([server.state[f"records.{k}"] for k in sites])
        counts = _apportion(records / records.sum(), n)
        words: list[str | int] = ["union", start] if start else ["union"]
        union = torch.cat([self._draw(server, k, c, *words)[0] for k, c in zip(sites, counts, strict=True) if c])
        return further | {"union": union}

    def _tilted_batch(self, client: Client, batch: Any) -> Any:
        """Own rows and samples of the other sites, with the rows' weights."""
        records = self._others_records
        own, rows = row_counts(len(batch_rows(batch)), self.own_rows, self.other_rows)
        replay, labels = drawn(self._others, records, rows)
        return tilted_batch(batch, own, replay, client.weight / (client.weight + float(records.sum())), labels)

    def _refinement(self, client: Client) -> int:
        return int(self.refine * client.steps) if client.steps is not None else 0

    def _keep_site(self, client: Client) -> None:
        self._changed.add(client.index)
        client.state["site"] = self._read(client.server)
        client.state["parameters"] = client.parameters.clone()

    def _tensors(self, server: Server) -> list[Tensor]:
        submodule = server.module.get_submodule(self.generator)
        shares = [server.module.get_buffer("label_shares")] if hasattr(server.module, "sample_labelled") else []
        tensors = [*submodule.parameters(), *submodule.buffers(), *shares]
        return [t.detach() for t in tensors if t.is_floating_point()]

    def _read(self, server: Server) -> Tensor:
        return torch.cat([t.flatten() for t in self._tensors(server)])

    def _load(self, server: Server, site: Tensor) -> None:
        start = 0
        for tensor in self._tensors(server):
            tensor.copy_(site[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    def _draw(self, server: Server, k: int, n: int, *purpose: str | int) -> Samples:
        """n samples of site k, and their labels where it knows any, leaving the module as it was."""
        kept = self._read(server)
        self._load(server, server.state[f"site.{k}"])
        generator = generator_for(server.seed, server.round, k, *purpose)
        module: Any = server.module
        if hasattr(module, "sample_labelled"):
            samples, labels = module.sample_labelled(n, generator)
        else:
            samples, labels = module.sample(n, generator), None
        self._load(server, kept)
        return samples, labels


def joined(pools: list[Samples]) -> Samples:
    """Pools (n, ...) of the sites as one (sites, n, ...), and their labels."""
    labels = [y for _, y in pools if y is not None]
    return torch.stack([x for x, _ in pools]), torch.stack(labels) if labels else None


def drawn(pools: Samples, records: Tensor, rows: int) -> Samples:
    """``rows`` samples of pools (sites, n, ...), sites in proportion to their ``records`` (sites,)."""
    samples, labels = pools
    origin = torch.multinomial(records, rows, replacement=True)
    index = torch.randint(samples.shape[1], (rows,))
    place = origin.to(samples.device), index.to(samples.device)
    return samples[place], None if labels is None else labels[place]


def _apportion(shares: Tensor, n: int) -> list[int]:
    """n split in proportion to shares, by largest remainders."""
    exact = shares.double() * n
    counts = exact.floor()
    for i in (exact - counts).argsort(descending=True)[: n - int(counts.sum())].tolist():
        counts[i] += 1
    return [int(c) for c in counts]
