"""Partitioned variational inference: against the exact posterior of a linear model, and as a federation."""

import pytest
import torch
from torch import nn

from lit_epgan.bayes.gaussian import GaussianFactor, factor_of
from lit_epgan.engine import PlainFederation
from lit_epgan.federated import PartitionedVariationalInference
from tests.federations import assert_resumes, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.refusals import assert_refused

PRIOR = 0.5


def half_square(module, batch):
    """Minus the log-likelihood of unit noise, a record's mean."""
    return (module(batch[0]).squeeze(1) - batch[1]).square().mean() / 2


@pytest.fixture(scope="module")
def data():
    """Three clients of unlike sizes and inputs; each sees one input hardly at all."""
    torch.manual_seed(1)
    sizes, weights = (20, 40, 60), torch.tensor([1.0, -2.0, 0.5])
    found = []
    for k, size in enumerate(sizes):
        x = torch.randn(size, 3) * torch.tensor([1.0, 2.0, 0.5]).roll(k)
        found.append((x.double(), (x @ weights + torch.randn(size)).double()))
    return found


def trained(data, rounds, steps, lr=0.05, **options):
    """The server after so many rounds, each client training on all its records at once."""

    def batches(client, round_):
        return iter([data[client]] * steps)

    module = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(module.weight)
    federation = PlainFederation(
        PartitionedVariationalInference(PRIOR, **options),
        *(module, half_square, lambda p: torch.optim.SGD(p, lr=lr), batches, [len(x) for x, _ in data], 0),
    )
    federation.run(rounds)
    return federation.server


@pytest.mark.parametrize(("temperature", "penalty"), [(1.0, None), (0.5, 1.0), (1.0, 0.5)])
def test_of_a_linear_model_it_is_the_best_diagonal_gaussian_of_all_records_pooled(data, temperature, penalty):
    """q* has the exact posterior's mean, and the diagonal of its precision: Bishop 2006, section 10.1.2."""
    server = trained(data, 8, 60, lr=0.1, damping=0.5, temperature=temperature, penalty=penalty)
    x, y = torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])
    precision = x.T @ x / temperature + PRIOR * torch.eye(3)
    q = factor_of(server.state)
    away = (q.mean - torch.linalg.solve(precision, x.T @ y / temperature)) * precision.diagonal().sqrt()
    assert away.abs().max() < 0.3  # of a standard deviation
    assert q.precision == pytest.approx(precision.diagonal(), rel=0.15)
    assert torch.equal(server.parameters, q.mean)
    assert torch.equal(PartitionedVariationalInference(PRIOR).posterior(server.state).mean, q.mean)


def test_a_client_keeps_its_own_site_and_the_sites_are_what_the_server_has(data):
    """q / p0 is the product of the sites; without a step nothing changes."""
    server = trained(data, 2, 3)
    assert torch.equal(trained(data, 2, 0).state["precision"], torch.full((3,), PRIOR, dtype=torch.float64))
    assert (server.state["precision"] > PRIOR).all()


def test_with_a_penalty_the_server_goes_part_of_the_way():
    """By hand: p0 = q = exp(-theta^2 / 2), two clients, penalty and damping .5: what all q_k together say of the change
    of the sites is its square, and the share of the product is 1 / (1 + 2 x .5)."""
    algorithm = PartitionedVariationalInference(penalty=0.5, damping=0.5)
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    federation = PlainFederation(
        algorithm, module, half_square, lambda p: torch.optim.SGD(p, lr=0.1), lambda client, round_: iter([]), [1, 1]
    )
    change = GaussianFactor(torch.tensor([0.3]).double(), torch.tensor([0.6]).double())
    algorithm.merge(federation.server, algorithm.Report(site=change, answers=2))
    assert factor_of(federation.server.state).precision.item() == pytest.approx((1.6 + 1.3) / 2)
    assert factor_of(federation.server.state).precision_mean.item() == pytest.approx((1.2 + 0.6) / 2)
    assert federation.server.parameters.item() == pytest.approx(0.9 / 1.45)
    before = dict(federation.server.state)
    algorithm.merge(federation.server, algorithm.Report(site=GaussianFactor.uniform(change.precision), answers=0))
    assert federation.server.state == before


def test_it_resumes(tmp_path):
    def module():
        torch.manual_seed(0)
        return Regression(lr=0.05)

    def algorithm():
        return PartitionedVariationalInference(penalty=1.0)

    assert_resumes(module, lambda: federation(local_steps=3), algorithm, tmp_path)


def test_what_it_cannot_do(tmp_path):
    bad = {"prior_precision": 0, "initial": 0, "decay": 1, "damping": 0, "temperature": 0, "penalty": 0}
    for name, value in bad.items():
        assert_refused(f"PartitionedVariationalInference.*{name}", PartitionedVariationalInference, **{name: value})
    data = federation(local_steps=1)
    assert_refused(
        "one optimizer; 2", fit, TwoOptimizers(), data, 1, tmp_path, algorithm=PartitionedVariationalInference()
    )
