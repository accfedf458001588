"""FedSeq by hand, its chains, a run that is resumed, what becomes of a client that diverges, and what is refused."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Everyone
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FedAvgM, FedSeq
from tests.federations import fit
from tests.quadratics import CENTRES, CURVATURES, RATE, Quadratic, clients, trained
from tests.refusals import assert_refused

FIVE = torch.tensor([[1.0, -2.0], [3.0, 1.0], [0.0, 4.0], [-2.0, 0.5], [2.0, 2.0]], dtype=torch.float64)


def descended(theta: Tensor, centre: Tensor, curvature: Tensor | float = 1.0, steps: int = 4) -> Tensor:
    for _ in range(steps):
        theta = theta - RATE * curvature * (theta - centre)
    return theta


def five(centres: Tensor = FIVE, **options: int) -> FederatedDataModule:
    """Clients of 1 to 5 records; each record a (centre, curvature 1)."""
    sets = [TensorDataset(c.expand(n, 2), torch.ones(n, 2).double()) for n, c in enumerate(centres, 1)]
    return FederatedDataModule.from_datasets(sets, **({"batch_size": 8, "local_steps": 4} | options))


def chains(length: int, clients: list[int], seed: int, round_: int) -> list[list[int]]:
    return FedSeq(length).sampler(Everyone()).draw(clients, seed, round_)


def test_a_chain_of_all_clients_is_one_client_after_another():
    algorithm = FedSeq(length=2)
    theta = torch.zeros(2, dtype=torch.float64)
    for round_ in range(3):
        (chain,) = chains(2, [0, 1], 0, round_)
        for k in chain:
            theta = descended(theta, CENTRES[k], CURVATURES[k])
    torch.testing.assert_close(trained(algorithm, 3), theta, rtol=1e-10, atol=1e-10)


def test_chains_are_averaged_by_the_records_of_all_their_clients():
    """In a Trainer, whose batches come place by place in the chains."""
    module = Quadratic()
    fit(module, five(), 3, algorithm=FedSeq(length=2))
    theta = torch.zeros(2, dtype=torch.float64)
    for round_ in range(3):
        dealt = chains(2, list(range(5)), 0, round_)
        assert [len(chain) for chain in dealt] == [2, 2, 1]
        merged = torch.zeros_like(theta)
        for chain in dealt:
            end = theta
            for k in chain:
                end = descended(end, FIVE[k])
            merged += sum(k + 1 for k in chain) * end / 15
        theta = merged
    torch.testing.assert_close(module.theta.detach(), theta, rtol=1e-10, atol=1e-10)


def test_chains_of_one_are_fedavg():
    """Up to rounding: clients come in another order."""
    torch.testing.assert_close(trained(FedSeq(length=1), 3, five()), trained(FedAvg(), 3, five()))


def test_the_order_is_drawn_anew_each_round_from_the_seed_and_holds_everyone():
    def orders() -> list[list[int]]:
        dealt = [chains(4, [2, 3, 5, 7, 11], seed, round_) for seed in (0, 1) for round_ in range(4)]
        assert all([len(chain) for chain in each] == [4, 1] for each in dealt)
        return [[k for chain in each for k in chain] for each in dealt]

    assert all(sorted(order) == [2, 3, 5, 7, 11] for order in orders())
    assert len({tuple(order) for order in orders()}) > 4
    assert orders() == orders()


def test_server_momentum_goes_around_it():
    data = clients()
    torch.testing.assert_close(trained(FedAvgM(momentum=0.0, inner=FedSeq()), 3, data), trained(FedSeq(), 3, clients()))


@pytest.mark.filterwarnings("ignore:round .*not finite")
def test_the_client_after_a_diverged_one_goes_on_from_the_one_before():
    (chain,) = chains(5, list(range(5)), 0, 0)
    diverges, centres = chain[2], FIVE.clone()
    centres[diverges] = torch.inf
    module, end = Quadratic(), torch.zeros(2, dtype=torch.float64)
    for k in chain:
        end = end if k == diverges else descended(end, centres[k])
    fit(module, five(centres), 1, algorithm=FedSeq(length=5))
    torch.testing.assert_close(module.theta.detach(), end, rtol=1e-10, atol=1e-10)


def test_a_round_in_which_everybody_diverges_is_an_error():
    """Each by itself is no error: there may be others behind it in the chain."""
    with pytest.warns(UserWarning, match="not finite"), pytest.raises(UserError, match="no client's update is finite"):
        trained(FedSeq(length=5), 1, five(torch.full_like(FIVE, torch.inf)))


def test_a_run_resumed_after_its_first_round_ends_with_the_same_bits(tmp_path):
    """Momentum around it, so that something is kept between rounds."""
    whole, resumed = Quadratic(), Quadratic()
    fit(whole, five(), 4, algorithm=FedAvgM(inner=FedSeq(length=2)))
    fit(Quadratic(), five(), 1, algorithm=FedAvgM(inner=FedSeq(length=2))).save_checkpoint(tmp_path / "one.ckpt")
    fit(resumed, five(), 4, algorithm=FedAvgM(inner=FedSeq(length=2)), ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(resumed.theta, whole.theta)


def test_what_cannot_be_is_refused():
    assert_refused("length is 0", FedSeq, length=0)


def test_each_client_is_sent_one_model_and_sends_one():
    trainer = fit(Quadratic(), five(), 1, algorithm=FedSeq(length=2))
    model = 2 * 8
    assert trainer.logged_metrics["client/bytes_down"] == model
    assert trainer.logged_metrics["client/bytes_up"] == model + 8 + 8  # and n_k, for the algorithm and for the buffers


def test_a_chain_keeps_to_the_cohort():
    """Two of five clients a round, in one chain."""
    theta, data = torch.zeros(2, dtype=torch.float64), five(clients_per_round=2)
    data.setup()
    for round_ in range(3):
        (chain,) = FedSeq(length=2).sampler(data.sampler).draw(list(range(5)), 0, round_)
        assert sorted(chain) == data.cohort(round_)
        for k in chain:
            theta = descended(theta, FIVE[k])
    found = trained(FedSeq(length=2), 3, five(clients_per_round=2))
    torch.testing.assert_close(found, theta, rtol=1e-10, atol=1e-10)
