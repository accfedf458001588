"""Label priors: Bayes' rule by hand, and clients whose labels differ learn the pooled posterior."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.errors import UserError
from lit_epgan.federated import SCAFFOLD, FedAvg, LabelPriors
from lit_epgan.federated.drift.label_priors import log_ratio
from tests.federations import fit
from tests.plain_federation import federated
from tests.test_embedding_sites import state_of

# records of each x (row) and label (column); in both clients x is spread over a label's records alike
LIKELIHOOD = torch.tensor([[0.7, 0.1], [0.2, 0.2], [0.1, 0.7]], dtype=torch.float64)
LABELS = torch.tensor([[90, 10], [10, 190]])


class Table(LightningModule):
    """Scores of two labels for each of three x, by gradient descent."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(3, 2, bias=False)
        nn.init.zeros_(self.scores.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.scores(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=8.0)


def counts(client: int) -> Tensor:
    return (LIKELIHOOD * LABELS[client]).round().long()


def clients(unlabelled: int = 0) -> FederatedDataModule:
    sets = []
    for client in range(len(LABELS)):
        pairs = [(x, y) for x in range(3) for y in range(2) for _ in range(int(counts(client)[x, y]))]
        x, y = torch.tensor(pairs).T
        y[:unlabelled] = -100
        sets.append(TensorDataset(F.one_hot(x, 3).double(), y))
    return FederatedDataModule.from_datasets(sets, batch_size=200, local_steps=60)


def odds(algorithm: Algorithm, rounds: int = 8) -> Tensor:
    """Learnt log p(1 | x) / p(0 | x) (3,)."""
    module = Table().double()
    federated(module, clients(), algorithm).run(rounds)
    weight = module.scores.weight.detach()
    return weight[1] - weight[0]


def test_clients_whose_labels_differ_learn_the_pooled_posterior() -> None:
    """Trained locally to the end, FedAvg's mean of scores is another posterior: a mean of log priors is no prior."""
    pooled = counts(0) + counts(1)
    posterior = (pooled[:, 1] / pooled[:, 0]).double().log()
    assert torch.allclose(odds(LabelPriors("scores")), posterior, atol=2e-3)  # a client's counts have a record more
    assert (odds(FedAvg()) - posterior).abs().min() > 0.4


def test_the_ratio_is_worked_by_hand() -> None:
    """Counts of (1, 3, 0) of (4, 4, 0): frequencies (1.5 / 5, 3.5 / 5) to (.5, .5)."""
    ratio = log_ratio(torch.tensor([1.0, 3.0, 0.0]), torch.tensor([4.0, 4.0, 0.0]))
    assert torch.allclose(ratio, torch.tensor([0.6, 1.4, 1.0]).log())


def test_where_labels_are_alike_nothing_is_shifted() -> None:
    assert torch.allclose(log_ratio(torch.tensor([2.0, 6.0]), torch.tensor([10.0, 30.0])), torch.zeros(2), atol=1e-7)


def test_the_first_round_and_no_strength_are_the_inner_algorithm() -> None:
    for rounds, options in ((1, {}), (3, {"strength": 0.0})):
        assert torch.equal(odds(LabelPriors("scores", SCAFFOLD(), **options), rounds), odds(SCAFFOLD(), rounds))
    assert not torch.equal(odds(LabelPriors("scores", SCAFFOLD()), 2), odds(SCAFFOLD(), 2))


def test_counts_are_of_labels_alone_and_sent_once() -> None:
    module = Table().double()
    state = state_of(fit(module, clients(unlabelled=5), 3, algorithm=LabelPriors("scores")))
    expected = counts(0).sum(0) + counts(1).sum(0)
    assert int(state["label_counts"].sum()) == int(expected.sum()) - 10
    assert not module.scores._forward_hooks


def test_a_run_resumed_after_its_first_round_ends_with_the_same_bits(tmp_path: Any) -> None:
    whole, resumed = Table().double(), Table().double()
    fit(whole, clients(), 3, algorithm=LabelPriors("scores"))
    fit(Table().double(), clients(), 1, algorithm=LabelPriors("scores")).save_checkpoint(tmp_path / "one.ckpt")
    trainer = fit(resumed, clients(), 3, algorithm=LabelPriors("scores"), ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(resumed.scores.weight, whole.scores.weight)
    assert int(state_of(trainer)["label_counts"].sum()) == int(LABELS.sum())  # not counted again


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LabelPriors("scores", strength=-1.0), "strength is -1"),
        (lambda: LabelPriors("head"), "no submodule 'head'"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fit(Table().double(), clients(), 1, algorithm=make())


@pytest.mark.parametrize("labels", [torch.rand(6), torch.full((6,), 2)])
def test_batches_without_such_labels_are_refused(labels: Tensor) -> None:
    data = FederatedDataModule.from_datasets([TensorDataset(torch.rand(6, 3).double(), labels)], batch_size=6)
    with pytest.raises(UserError, match="whole numbers below 2"):
        fit(Table().double(), data, 1, algorithm=LabelPriors("scores"))


class Looking(Table):
    """Looks at its own scores as in an evaluation, in the midst of a client's steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scores.eval()
        seen = self.scores(batch[0])
        self.scores.train()
        assert torch.equal(seen, F.linear(batch[0], self.scores.weight))
        self.shifted = not torch.equal(seen, self.scores(batch[0]))
        return super().training_step(batch, batch_idx)


def test_scores_of_an_evaluation_are_the_networks_own() -> None:
    module = Looking().double()
    fit(module, clients(), 2, algorithm=LabelPriors("scores"))
    assert module.shifted
