"""Expectation propagation in function space: a client's site is a generator of its own data."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, Around, Broadcast, Client, Exchange, Message, Rounds, Server, merged, passing
from lit_epgan.federated.tilted_batch import batch_rows, check_tilted, row_counts, tilted_batch, weighed
from lit_epgan.lib.bounds import at_least, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.networks.modes import evaluating

SITE, RECORDS = "site.", "records."  # and a client's index
Samples = tuple[Tensor, Tensor | None]  # rows and their labels, if they have any


class SiteTensors:
    """What of a module is a site, as one vector: the submodule that ``sample(n, generator)`` draws from; with
    ``sample_labelled`` the buffer ``label_shares``, too."""

    def __init__(self, module: nn.Module, generator: str) -> None:
        self._module, self._generator = module, generator

    def _tensors(self) -> list[Tensor]:
        submodule = self._module.get_submodule(self._generator)
        shares = [self._module.get_buffer("label_shares")] if hasattr(self._module, "sample_labelled") else []
        tensors = [*submodule.parameters(), *submodule.buffers(), *shares]
        return [t.detach() for t in tensors if t.is_floating_point()]

    def read(self) -> Tensor:
        """The vector, copied."""
        return torch.cat([t.flatten() for t in self._tensors()])

    def load(self, site: Tensor) -> None:
        start = 0
        for tensor in self._tensors():
            tensor.copy_(site[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    @torch.no_grad()
    def draw(self, site: Tensor, n: int, *stream: str | int) -> Samples:
        """n samples of a site, and their labels where it knows any, leaving the module as it was; ``stream`` is what
        their randomness is derived from."""
        kept, module = self.read(), self._module
        self.load(site)
        generator = generator_for(*stream)
        with evaluating(module):
            if hasattr(module, "sample_labelled"):
                samples, labels = module.sample_labelled(n, generator)  # type: ignore[operator]
            else:
                samples, labels = module.sample(n, generator), None  # type: ignore[operator]
        self.load(kept)
        return samples, labels


class GeneratorSites(Around):
    """The site factor of client j, exp(n_j E_{x ~ X_j} phi(D(x))), by samples of a generator trained on X_j alone.

    Removing client k's site from the product leaves the exact cavity: the other sites' samples. So

        first round   a client that has no site yet trains alone (``data.warmup_steps`` long in round 0); its generator
                      is its site
        then          the first ``refine`` of its steps go on training the own site on own data; after that, from the
                      server's parameters, the minibatch is ``own_rows`` rows of own data, which weigh n_k / n in all,
                      and samples of the other sites for the rest
        merge         that of ``inner``: FedAvg, or EP in parameter space

    A module must offer ``sample(n, generator)`` from the submodule ``generator`` names (the evaluated one), and take
    batches (x, y, weight) whose third entry weighs the rows, as it says by ``takes_weights = True``. Samples have no
    labels (y is -100), but those of a module with ``sample_labelled(n, generator)`` and a buffer ``label_shares``,
    which then belongs to the site.

    Price: the clients' individual generators become visible to the server and to each other (they do not sum, so
    secure aggregation cannot hide them; under differential privacy each must carry its own noise); one generator more
    up, and K - 1 down, per client: once, or every round with ``refine``. Always report the union of the sites beside
    it (``samples``): one message of each client, no round.

    Args:
        generator: name of the submodule that ``sample`` draws from: its parameters and buffers are the site.
        own_rows, other_rows: rows of own data and of the others' in a minibatch; by default the latter keep its size.
        pool: samples drawn of each site, afresh each round.
        pool_in_all: samples drawn of all sites together at most, but one of each: with more sites than pool_in_all /
            pool each has fewer, so that memory and time do not grow with their number.
        refine: share of a round's steps that refine the own site; 0 keeps the first one.
        from_round: number of the first round, from 0, in which clients train their sites; ``inner`` alone has the
            rounds before. In the last round a site is what ``inner`` has learnt, fine-tuned by the client; the union of
            such sites is EFFGAN (Ekblom et al. 2022).
        inner: the algorithm that merges the parameters and adds its own prior; FedAvg by default.

    Raises:
        UserError: if an argument is out of its range, or the module offers no such submodule or no ``sample``.
    """

    class SiteReport(Message):
        """What leaves a client beside the inner algorithm's report, where its site has changed: the change, and n_k."""

        site: Tensor | None = merged("stack", default=None)
        site_records: float | None = merged("stack", default=None)

    def __init__(
        self,
        generator: str = "average",
        own_rows: int = 8,
        pool: int = 2000,
        refine: float = 0.0,
        inner: Algorithm | None = None,
        other_rows: int | None = None,
        pool_in_all: int = 40_000,
        from_round: int = 0,
    ) -> None:
        super().__init__(inner)
        at_least(0, self, from_round=from_round)
        at_least(1, self, own_rows=own_rows, pool=pool, other_rows=other_rows, pool_in_all=pool_in_all)
        within("[0, 1)", self, refine=refine)
        self.generator = generator
        self.own_rows, self.other_rows = own_rows, other_rows
        self.pool, self.pool_in_all = pool, pool_in_all
        self.refine, self.from_round = refine, from_round

    def pool_of(self, sites: int) -> int:
        """Samples of each of so many sites."""
        return min(self.pool, max(1, self.pool_in_all // sites))

    def seen_by(self, client: int, sites: list[int]) -> list[int]:
        """Whose sites of these a client trains on: the others', its cavity."""
        return [k for k in sites if k != client]

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict | None:
        check_tilted(module, type(self).__name__)
        known = [name for name, _ in module.named_children()]
        if self.generator not in known:
            raise UserError(
                f"GeneratorSites.generator is {self.generator!r}, but {type(module).__name__} has the submodules "
                f"{', '.join(known)}: set --federation.algorithm.generator to the one that sample draws from."
            )
        return super().build(module, seed)

    def round(self, server: Server) -> Rounds:
        """The inner algorithm's, with the others' sites out and new sites back."""
        state, sites = server.state, known_sites(server)
        initial = SiteTensors(server.module, self.generator).read()

        def out(exchange: Exchange) -> Exchange:
            if not exchange.training:
                return exchange
            return replace(
                exchange,
                sent=lambda k: exchange.sent_to(k) | _sent(state, self.seen_by(k, sites)),
                kept={**exchange.kept, **({} if self.refine else _versions(sites))},
                beside=(*exchange.beside, self.SiteReport),
            )

        def back(exchange: Exchange, report: Message) -> None:
            if not exchange.training:
                return
            own: Any = report.part(self.SiteReport)
            for k, change in own.site.items():
                state[f"{SITE}{k}"] = state.get(f"{SITE}{k}", initial) + change
                state[f"{RECORDS}{k}"] = own.site_records[k].to(server.parameters)

        yield from passing(super().round(server), out, back)

    def train(self, client: Client, sent: Broadcast) -> Message:
        """Alone without a site or others; else the own site's refinement, then training on tilted batches."""
        if client.round < self.from_round:
            return self.inner.train(client, sent)
        tensors, before = SiteTensors(client.module, self.generator), None
        others = sorted(int(name.removeprefix(SITE)) for name in sent if name.startswith(SITE))
        if not others or "site" not in client.state:
            start = tensors.read()
            report = self.inner.train(client, sent)
            return report.beside(self._kept(client, tensors, start))
        batch = self._tilted(client, sent, tensors, others)
        refinement = int(self.refine * client.steps) if client.steps is not None else 0
        if refinement:  # a site knows nothing of the others
            before = client.state["site"]
            client.flat.load(client.state["parameters"])
            tensors.load(before)
            client.fit(client.parameters.clone(), steps=refinement)
            site = self._kept(client, tensors, before)
        report = self.inner.train(client.told(batch=batch), sent)
        return report.beside(site) if refinement else report

    def _tilted(self, client: Client, sent: Broadcast, tensors: SiteTensors, others: list[int]) -> Callable[[Any], Any]:
        """From a client's batch to own rows and samples of the others' sites, with the rows' weights."""
        pool = self.pool_of(1 + len(others))

        def pool_of(k: int) -> Samples:  # the same for everyone
            words = (client.seed, client.round, k, "pool")
            return client.remember(f"pool {k}", lambda: tensors.draw(sent[f"{SITE}{k}"], pool, *words))

        pools = joined([pool_of(k) for k in others])
        records = torch.cat([sent[f"{RECORDS}{k}"] for k in others]).cpu()

        def batch(own_batch: Any) -> Any:
            own, rows = row_counts(len(batch_rows(own_batch)), self.own_rows, self.other_rows)
            replay, labels = drawn(pools, records, rows)
            return tilted_batch(
                own_batch, own, replay, client.records / (client.records + float(records.sum())), labels
            )

        return weighed(batch, client.module)

    def _kept(self, client: Client, tensors: SiteTensors, before: Tensor) -> Message:
        """The site that the module holds is the client's; how it has changed."""
        change = tensors.read() - before
        client.state["site"] = before + change  # as the server adds it up
        if self.refine:
            client.state["parameters"] = client.parameters.clone()
        return self.SiteReport(site=change, site_records=client.records)

    def samples(self, server: Server, n: int, start: int = 0) -> dict[str, Tensor]:
        """``union``: the sites' own samples, in proportion to the clients' records."""
        return super().samples(server, n, start) | {name: x for name, (x, _) in self._union(server, n, start).items()}

    def labelled_samples(self, server: Server, n: int) -> dict[str, tuple[Tensor, Tensor]]:
        """``union``, of a module with ``sample_labelled``."""
        own = {name: (x, y) for name, (x, y) in self._union(server, n, 0).items() if y is not None}
        return super().labelled_samples(server, n) | own

    def _union(self, server: Server, n: int, start: int) -> dict[str, Samples]:
        """Nothing as long as there is no site."""
        sites = known_sites(server)
        if not sites:
            return {}
        records = torch.cat([server.state[f"{RECORDS}{k}"] for k in sites])
        counts = _apportion(records / records.sum(), n)
        words: list[str | int] = ["union", start] if start else ["union"]
        tensors = SiteTensors(server.module, self.generator)
        parts = [
            tensors.draw(server.state[f"{SITE}{k}"], c, server.seed, server.round, k, *words)
            for k, c in zip(sites, counts, strict=True)
            if c
        ]
        labels = [y for _, y in parts if y is not None]
        return {"union": (torch.cat([x for x, _ in parts]), torch.cat(labels) if labels else None)}


def known_sites(server: Server) -> list[int]:
    return [k for k in range(server.clients) if f"{SITE}{k}" in server.state]


def _sent(state: dict[str, Tensor], sites: list[int]) -> dict[str, Tensor]:
    return {f"{what}{k}": state[f"{what}{k}"] for what in (SITE, RECORDS) for k in sites}


def _versions(sites: list[int]) -> dict[str, int]:
    """Those of sites that stay as they are, and of their records."""
    return {f"{what}{k}": 0 for what in (SITE, RECORDS) for k in sites}


def _apportion(shares: Tensor, n: int) -> list[int]:
    """n split in proportion to shares, by largest remainders."""
    exact = shares.double() * n
    counts = exact.floor()
    for i in (exact - counts).argsort(descending=True)[: n - int(counts.sum())].tolist():
        counts[i] += 1
    return [int(c) for c in counts]


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
