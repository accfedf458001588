"""Who takes part: rates against frequencies, and cohorts that depend on seed and round alone."""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lit_epgan.engine import (
    Algorithm,
    Chains,
    Everyone,
    Exchange,
    FixedSize,
    InTurn,
    Poisson,
    Rounds,
    Server,
    stages,
)
from lit_epgan.engine.messages import Task
from lit_epgan.engine.wire import decode_task, encode_task
from lit_epgan.federated import FedAvg
from lit_epgan.lib.randomness import derive_seed
from lit_epgan.modules.gan import GAN
from tests.generative import Images, gan, trainer
from tests.plain_federation import descending
from tests.refusals import assert_refused
from tests.test_sealed_server import federation

CLIENTS = list(range(3, 23))


@pytest.mark.parametrize(
    "sampler",
    [Everyone(), FixedSize(5), Poisson(0.3), InTurn(4), Chains(3, FixedSize(7))],
    ids=lambda s: type(s).__name__,
)
def test_a_sampler_states_its_rate(sampler):
    """Every client's frequency over 2,000 rounds is within four standard deviations of the rate."""
    rounds, counts = 2000, dict.fromkeys(CLIENTS, 0)
    for r in range(rounds):
        for chain in sampler.draw(CLIENTS, 7, r):
            for k in chain:
                counts[k] += 1
    rate = sampler.rate(len(CLIENTS))
    spread = 4 * (rate * (1 - rate) / rounds) ** 0.5
    assert all(abs(n / rounds - rate) <= spread for n in counts.values())


def test_poisson_cohorts_have_binomial_sizes():
    sizes = torch.tensor([float(len(Poisson(0.3).draw(CLIENTS, 1, r))) for r in range(3000)])
    assert float(sizes.mean()) == pytest.approx(6, abs=0.15)
    assert float(sizes.var()) == pytest.approx(20 * 0.3 * 0.7, rel=0.1)


@pytest.mark.parametrize("sampler", [FixedSize(5), Poisson(0.5), Chains(2)], ids=lambda s: type(s).__name__)
def test_a_draw_depends_on_seed_and_round_alone(sampler):
    first = sampler.draw(CLIENTS, 0, 4)
    sampler.draw(CLIENTS, 0, 5)
    assert sampler.draw(CLIENTS, 0, 4) == first
    assert sampler.draw(CLIENTS, 0, 6) != first
    assert sampler.draw(CLIENTS, 1, 4) != first


@pytest.mark.parametrize("groups", [1, 3, 20])
def test_in_turn_every_client_takes_part_once_in_as_many_rounds_as_there_are_groups(groups):
    """Whatever round one begins with, and in groups of nearly one size; whatever the seed."""
    drawn = [[k for chain in InTurn(groups).draw(CLIENTS, r, r) for k in chain] for r in range(3 * groups)]
    for start in range(2 * groups):
        assert sorted(k for cohort in drawn[start : start + groups] for k in cohort) == CLIENTS
    sizes = {len(cohort) for cohort in drawn}
    assert max(sizes) - min(sizes) <= 1
    assert InTurn(groups).separation == groups


def test_in_turn_groups_of_neighbours_follow_each_other_and_others_promise_no_separation():
    sampler, clients = InTurn(3), [1, 2, 4, 5, 6, 7, 8, 9]
    assert [[k for (k,) in sampler.draw(clients, 0, r)] for r in range(4)] == [[1, 2], [4, 5, 6], [7, 8, 9], [1, 2]]
    assert sampler.rate(8) == pytest.approx(1 / 3)
    promised = [s.separation for s in (Everyone(), FixedSize(2), Poisson(0.5), Chains(2))]
    assert promised == [1, None, None, None]


def test_chains_deal_the_cohort_of_another_sampler_and_stages_are_the_places_in_them():
    chains = Chains(3, FixedSize(8)).draw(CLIENTS, 0, 0)
    assert sorted(map(len, chains), reverse=True) == [3, 3, 2]
    assert sorted(k for chain in chains for k in chain) == [c[0] for c in FixedSize(8).draw(CLIENTS, 0, 0)]
    assert stages([[1, 2, 3], [4], [5, 6]]) == [[1, 4, 5], [2, 6], [3]]
    assert stages([]) == []


def test_a_round_that_nobody_takes_part_in_changes_nothing_and_too_large_a_cohort_is_refused():
    plain = federation(FedAvg(), sampler=Poisson(1e-9))
    before = plain.server.parameters.clone()
    assert torch.equal(plain.run(2), before)
    assert_refused("choose at most 3", FixedSize(4).check, 3)
    assert_refused("take at most that", InTurn(4).check, 3)
    assert_refused("at least one group", InTurn, 0)


class Asking(Algorithm):
    def round(self, server: Server) -> Rounds:
        yield Exchange({"parameters": server.parameters}, to=[0], merge=False)
        yield Exchange({"parameters": server.parameters})


def draws(seed):
    torch.manual_seed(seed)
    return float(torch.rand(()))


def test_who_is_asked_the_same_again_in_a_round_draws_anew_also_elsewhere():
    drawn: list[float] = []

    def loss(module: nn.Module, batch: list[Tensor]) -> Tensor:
        drawn.append(float(torch.rand(())))
        out: Tensor = module(batch[0]).square().mean()
        return out

    def batches(client: int, round_: int) -> list[list[Tensor]]:
        return [[torch.ones(2, 1)]]

    plain = descending(Asking(), nn.Linear(1, 1), loss, batches, [2.0, 2.0], seed=7)
    plain.run(2)
    words = [(0, 0, "steps"), (0, 0, "steps", 1), (0, 1, "steps"), (1, 0, "steps"), (1, 0, "steps", 1), (1, 1, "steps")]
    assert drawn == [draws(derive_seed(7, *each)) for each in words]
    for again in (False, True):
        assert decode_task(encode_task(Task(1, 4, 2, "train", True, {}, again=again)), {}).again == again


class Batches(Callback):
    def __init__(self) -> None:
        self.validated = self.tested = 0

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        self.validated += not trainer.sanity_checking

    def on_test_batch_start(self, *_: Any) -> None:
        self.tested += 1


class SmallBatches(Images):
    def val_dataloader(self) -> DataLoader:
        return self._loader(slice(40, 60), 5)

    test_dataloader = val_dataloader


class Judged(GAN):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("rows", float(len(batch[0])))


def test_held_out_images_are_walked_for_a_step_of_ones_own_alone(tmp_path):
    """One batch a round is fetched, so that validation happens and callbacks can look."""
    seen = Batches()
    run = trainer(tmp_path, seen)
    run.fit(gan(), SmallBatches())
    assert seen.validated == 2
    run.validate(gan(), SmallBatches(), verbose=False)
    run.test(gan(), SmallBatches(), verbose=False)
    assert (seen.validated, seen.tested) == (3, 1)
    assert (run.limit_val_batches, run.limit_test_batches) == (1.0, 1.0)  # all, for whatever is evaluated next
    module = gan()
    module.__class__ = Judged
    seen = Batches()
    trainer(tmp_path, seen).fit(module, SmallBatches())
    assert seen.validated == 2 * 4


@pytest.mark.parametrize("name", ["limit_val_batches", "limit_test_batches"])
def test_what_is_switched_off_stays_off(name, tmp_path):
    run = trainer(tmp_path, **{name: 0})
    run.fit(gan(), SmallBatches())
    assert getattr(run, name) == 0
