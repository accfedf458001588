"""One federation, described so that two processes that share no memory can each build their own half of it."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_epgan.engine import Algorithm, PlainFederation
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAvg, GeneratorSites
from tests.federations import SIZES, client_sets
from tests.modules import Regression
from tests.test_federation import plain_batches


class Located(LightningModule):
    """A generator of points, trained by a loss that weighs rows; it can be sampled, and so be a site."""

    takes_weights = True

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(2, 3)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(n, 2, generator=generator, dtype=self.average.weight.dtype)
        return self.average(noise)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, weight = batch[0], batch[2] if len(batch) > 2 else torch.full((len(batch[0]),), 1 / len(batch[0]))
        drawn = self.average(torch.randn(len(x), 2, dtype=x.dtype))
        return (weight.to(x.dtype) * (drawn - x).square().sum(1)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


ALGORITHMS: dict[str, tuple[type[LightningModule], Algorithm]] = {
    "fedavg": (Regression, FedAvg()),
    "scaffold": (Regression, SCAFFOLD()),
    "ep": (Regression, ExpectationPropagation(prior_scale=10.0)),
    "generator_sites": (Located, GeneratorSites("average", own_rows=3, pool=20)),
}


def half(name: str, instead: Algorithm | None = None) -> PlainFederation:
    """The federation; the server's process uses its server, the clients' its runner.

    Args:
        name: of its module and its algorithm.
        instead: an algorithm in its place.
    """
    kind, algorithm = ALGORITHMS[name]
    algorithm = instead if instead is not None else algorithm
    torch.manual_seed(0)
    module = kind().double()
    sets = client_sets()
    return PlainFederation(
        algorithm,
        module,
        lambda m, batch: m.training_step(batch, 0),
        lambda parameters: module.configure_optimizers(),
        lambda client, round_: plain_batches(sets[client], 4, round_, client),
        SIZES,
    )
