"""A prior on some networks: these are trained as its algorithm trains them, the others as FedAvg does."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lit_epgan.errors import UserError
from lit_epgan.federated import ExpectationPropagation, FedAvg, FedProx, PriorOn
from tests.federations import federation, fit


class TwoRegressions(LightningModule):
    """Two networks that have nothing to do with each other, an optimizer each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(3)
        self.one, self.other = nn.Linear(3, 1), nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        for network, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            self.manual_backward(((network(x) - y) ** 2).mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.one, self.other)]


def trained(algorithm):
    module = TwoRegressions()
    fit(module, federation(), rounds=3, algorithm=algorithm)
    return module


@pytest.mark.parametrize("prior", [lambda: FedProx(mu=1.0), lambda: ExpectationPropagation(prior_scale=20.0)])
def test_the_named_network_has_the_prior_and_the_other_has_fedavg(prior):
    some, all_, none = trained(PriorOn(prior(), ["one"])), trained(prior()), trained(FedAvg())
    assert not torch.allclose(all_.one.weight, none.one.weight, rtol=1e-3)
    torch.testing.assert_close(some.one.weight, all_.one.weight)
    torch.testing.assert_close(some.other.weight, none.other.weight)
    assert not torch.allclose(some.other.weight, all_.other.weight, rtol=1e-3)


def test_a_network_that_nothing_trains_is_refused():
    with pytest.raises(UserError, match="no optimizer trains 'third'"):
        trained(PriorOn(FedProx(), ["one", "third"]))
    with pytest.raises(UserError, match="at least one"):
        PriorOn(FedProx(), [])
