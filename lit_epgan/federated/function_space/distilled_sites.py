"""A model distilled on the server from the clients' generator sites: one round of federation."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lit_epgan.engine import Rounds, Server, check_server_training
from lit_epgan.federated.function_space.generator_sites import (
    RECORDS,
    SITE,
    GeneratorSites,
    SiteTensors,
    drawn,
    joined,
    known_sites,
)


class DistilledSites(GeneratorSites):
    """Every client trains a generator alone, once; the server trains the model on samples of all of them.

    One-shot federation by an ensemble of client generators and distillation (as FedCVAE; Heinbaugh et al. 2023): the
    baseline that says whether rounds after the first are worth their communication. In the first round each client
    trains alone (``data.warmup_steps``) and its generator becomes its site; in every later round nobody but the server
    works, ``server_steps`` steps of the module's own training step on samples of the sites, in proportion to their
    records.

    Price: the clients' individual generators become visible to the server; one generator up per client, once.

    Args:
        generator: name of the submodule that ``sample`` draws from: its parameters and buffers are the site.
        pool: samples drawn of each site, afresh each round.
        pool_in_all: samples drawn of all sites together at most, but one of each.
        server_steps: steps of the server in a round.
        batch_size: rows of the server's batches.

    Raises:
        UserError: if an argument is out of its range, or the module offers no such submodule or no ``sample``.
    """

    def __init__(
        self,
        generator: str = "average",
        pool: int = 2000,
        server_steps: int = 200,
        batch_size: int = 32,
        pool_in_all: int = 40_000,
    ) -> None:
        super().__init__(generator, pool=pool, pool_in_all=pool_in_all)
        check_server_training(self, server_steps, batch_size)
        self.server_steps, self.batch_size = server_steps, batch_size

    def trains(self, round_: int) -> bool:
        return round_ == 0

    def round(self, server: Server) -> Rounds:
        if server.round == 0:
            yield from super().round(server)
        elif known_sites(server):
            server.train(self._batches(server))

    def _batches(self, server: Server) -> Iterator[list[Tensor]]:
        sites, tensors = known_sites(server), SiteTensors(server.module, self.generator)
        pool = self.pool_of(len(sites))
        words = [(server.seed, server.round, k, "pool") for k in sites]
        drawn_ = [tensors.draw(server.state[f"{SITE}{k}"], pool, *word) for k, word in zip(sites, words, strict=True)]
        pools, records = joined(drawn_), torch.cat([server.state[f"{RECORDS}{k}"] for k in sites]).cpu()
        for _ in range(self.server_steps):
            rows, labels = drawn(pools, records, self.batch_size)
            yield [rows] if labels is None else [rows, labels]
