"""Federated Bayesian GANs: every objective and prior, and whose history it is."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.objectives import OBJECTIVES
from tests.federations import client_sets, fit
from tests.gans import PRIORS, bayesian_gan

SIZES = (20, 7, 34, 12)  # 3, 1, 5 and 2 steps of 8 rows


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_federations_train_under_every_objective_and_prior(name, prior):
    module = bayesian_gan(heads=4, objective=name, prior=PRIORS[prior], average=0.9, noise=0.00424)
    data = FederatedDataModule.from_datasets(client_sets(SIZES), batch_size=8, local_steps=2)
    before = copy.deepcopy(module.state_dict())
    trainer = fit(module, data, rounds=2, algorithm=ExpectationPropagation(prior_scale=1.0))
    assert all(not torch.equal(before[n], p.float()) for n, p in module.named_parameters())
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert all(value.isfinite() for value in trainer.callback_metrics.values())


class Histories(Callback):
    def __init__(self) -> None:
        self.rounds: list[dict[int, tuple[float, Tensor, Tensor]]] = []
        self.starts: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rounds.append({})
        parts = [p.detach().flatten() for p in pl_module.discriminator.parameters()]
        self.starts.append(torch.cat(parts))

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        federation = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
        assert federation._driver is not None
        client, snapshots = federation._driver.runner.client, pl_module.prior.snapshots
        assert client is not None
        self.rounds[-1][client.index] = client.records, snapshots.read().clone(), snapshots.filled.clone()


def federated_history(rounds: int, size: int = 3, **options: Any) -> tuple[GAN, Histories]:
    module, histories = bayesian_gan(prior=HistoryPrior(size=size, every=2)), Histories()
    data = FederatedDataModule.from_datasets(client_sets(SIZES), batch_size=8)
    fit(module, data, rounds=rounds, callbacks=[histories], **options)
    return module, histories


def test_averaged_buffers_are_a_history_that_all_clients_share():
    """Snapshots before steps 0, 2, 4: clients with 3, 1, 5 and 2 steps have two, one, three and one of them."""
    module, histories = federated_history(1)
    taken = {k: int(filled.sum()) for k, (_, _, filled) in histories.rounds[0].items()}
    assert taken == {0: 2, 1: 1, 2: 3, 3: 1}
    shared = module.prior.snapshots.read()
    for place, among in ((0, (0, 1, 2, 3)), (1, (0, 2)), (2, (2,))):
        own = [(weight, vectors[place]) for k, (weight, vectors, _) in histories.rounds[0].items() if k in among]
        mean = sum(w * v for w, v in own) / sum(w for w, _ in own)
        torch.testing.assert_close(shared[place], mean)


def test_a_short_rounds_history_reaches_back_over_the_servers_models():
    """One snapshot per client and round (one step each): the history is the server's last discriminators."""
    module, histories = bayesian_gan(prior=HistoryPrior(size=3, every=100)), Histories()
    data = FederatedDataModule.from_datasets(client_sets(SIZES), batch_size=8, local_steps=1)
    fit(module, data, rounds=4, callbacks=[histories])
    torch.testing.assert_close(module.prior.snapshots.read(), torch.stack(histories.starts[:0:-1]))
    assert module.prior.snapshots.filled.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("policy", "filled"), [("local", [1, 1, 0]), ("exclude", [1, 0, 0])])
def test_other_policies_keep_a_history_to_its_client(policy, filled):
    module, histories = federated_history(2, buffers=policy)
    _, vectors, found = histories.rounds[1][1]  # one step and one snapshot a round
    assert found.tolist() == filled
    torch.testing.assert_close(vectors[0], histories.starts[1])
    assert not module.prior.snapshots.filled.any()
