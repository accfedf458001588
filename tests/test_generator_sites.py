"""Generator sites on a module whose samples are known: client k's data, and so its site, is the number m_k."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import DistilledSites, FedAvg, GeneratorSites
from lit_epgan.federated.function_space.generator_sites import Samples, SiteTensors, _apportion
from lit_epgan.federated.tilted_batch import tilted_batch
from lit_epgan.lib.errors import UserError
from tests.federations import federation, fit
from tests.modules import Regression
from tests.notes import Notes
from tests.refusals import assert_refused

M = (0.0, 10.0, 20.0)
SIZES = (6, 9, 17)


class Seen(NamedTuple):
    round: int
    client: int
    step: int
    x: Tensor
    weight: Tensor | None
    value: float
    evaluated: float
    critic: float


class Value(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([5.0]))
        self.register_buffer("average", torch.tensor([5.0]))


class Known(LightningModule):
    seen, takes_weights = Notes(), True

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = Value(), nn.Parameter(torch.tensor([1.0]))
        self.lr = lr

    def training_step(self, batch, batch_idx: int) -> None:
        x, weight = batch[0], batch[2] if len(batch) == 3 else None
        progress = next(c for c in self.trainer.callbacks if isinstance(c, FederationCallback)).progress
        values = (float(t) for t in (self.generator.value, self.generator.average, self.critic))
        self.seen.append(Seen(progress.round, int(progress.client[-1:] or -1), progress.step - 1, x, weight, *values))
        mean = x.mean() if weight is None else (weight @ x).squeeze()
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(0.5 * ((self.generator.value - mean) ** 2 + (self.critic - mean) ** 2).sum())
        optimizer.step()
        self.generator.average.copy_(self.generator.value.detach())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.generator.average + 0.01 * torch.rand(n, 1, generator=generator, dtype=self.critic.dtype)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def data(sizes: tuple[int, ...] = SIZES, **options) -> FederatedDataModule:
    rows = [torch.full((n, 1), m, dtype=torch.float64) for m, n in zip(M, sizes, strict=False)]
    sets = [TensorDataset(r, torch.zeros(len(r), dtype=torch.int64)) for r in rows]
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


def sites(**options) -> GeneratorSites:
    return GeneratorSites(**({"generator": "generator", "own_rows": 3, "pool": 50} | options))


def origins(x: Tensor) -> set[float]:
    """Which m_k the rows are samples of."""
    nearest = (x / 10).round() * 10
    assert float((x - nearest).abs().max()) <= 0.01
    return set(nearest.flatten().tolist())


def test_the_first_round_is_each_client_alone():
    module = Known()
    fit(module, data(), rounds=1, algorithm=sites())
    for seen in module.seen:
        assert seen.weight is None
        assert origins(seen.x) == {M[seen.client]}
        if seen.step == 0:
            assert seen.value == 5.0
    assert float(module.critic) == pytest.approx(sum(m * n for m, n in zip(M, SIZES, strict=True)) / sum(SIZES))


def test_sites_of_a_later_round_are_the_federations_model_fine_tuned_by_each_client():
    """Two rounds of FedAvg end at its fixed point; a step of rate 1/2 from there goes half of the way to m_k."""
    module, union = Known(lr=0.5), {}

    class Look(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
            union[trainer.current_epoch] = callback.extra_samples(32).get("union")

    fit(module, data(local_steps=1), rounds=3, algorithm=sites(from_round=2), callbacks=[Look()])
    assert union[0] is None
    assert union[1] is None
    mean = sum(m * n for m, n in zip(M, SIZES, strict=True)) / sum(SIZES)
    before = mean + (5 - mean) / 4
    assert sorted({round(float(x), 1) for x in union[2]}) == sorted({round((before + m) / 2, 1) for m in M})
    assert {len(seen.x) == min(8, SIZES[seen.client]) and seen.weight is None for seen in module.seen} == {True}
    assert float(module.critic) == pytest.approx(mean + (1 - mean) / 8)


def test_later_batches_are_own_rows_and_the_exact_cavity():
    module = Known()
    fit(module, data(local_steps=6), rounds=3, algorithm=sites())
    later = [s for s in module.seen if s.round > 0]
    assert len(later) == 2 * 3 * 6
    for seen in later:
        own, rows = 3, min(8, SIZES[seen.client])
        assert len(seen.x) == rows
        assert seen.x[:own].flatten().tolist() == [M[seen.client]] * own  # data, not samples
        assert M[seen.client] not in origins(seen.x[own:])  # the own site is divided out
        assert float(seen.weight.sum()) == pytest.approx(1.0)
        assert float(seen.weight[:own].sum()) == pytest.approx(SIZES[seen.client] / sum(SIZES))
        assert seen.weight[own:].unique().numel() == seen.weight[:own].unique().numel() == 1
        assert (seen.x.dtype, seen.weight.dtype) == (torch.float64, torch.float64)


def test_others_are_drawn_in_proportion_to_their_records():
    module = Known()
    fit(module, data(sizes=(8, 8, 24), local_steps=100), rounds=2, algorithm=sites(own_rows=1))
    rows = torch.cat([s.x[1:] for s in module.seen if s.round == 1 and s.client == 0]).flatten()
    share = float((rows > 15).double().mean())  # of client 2: 24 of 32
    assert abs(share - 0.75) < 4 * (0.75 * 0.25 / len(rows)) ** 0.5


def test_pools_are_fresh_each_round_and_belong_to_seed_and_round():
    def pools(seed: int) -> list[list[float]]:
        module = Known()
        fit(module, data(seed=seed, local_steps=2), rounds=3, algorithm=sites(pool=4))
        per_round = [torch.cat([s.x[3:] for s in module.seen if s.round == r]) for r in (1, 2)]
        return [sorted(set((x % 10).flatten().round(decimals=12).tolist())) for x in per_round]

    first, again, other = pools(0), pools(0), pools(1)
    assert first == again
    assert not set(first[0]) & set(first[1])
    assert not set(first[0]) & set(other[0])


@pytest.mark.parametrize("algorithm", [GeneratorSites, DistilledSites])
@pytest.mark.parametrize(("pool_in_all", "of_each"), [(12, 4), (3, 1), (1, 1), (1000, 6)])
def test_all_pools_together_are_bounded(algorithm, pool_in_all, of_each, monkeypatch):
    """Three sites of six samples each, where so many are allowed, and of one at least."""
    asked, draw = list[int](), SiteTensors.draw

    def counted(self: SiteTensors, site: Tensor, n: int, *stream: str | int) -> Samples:
        asked.append(n)
        return draw(self, site, n, *stream)

    monkeypatch.setattr(SiteTensors, "draw", counted)
    fit(Known(), data(local_steps=2), rounds=2, algorithm=algorithm("generator", pool=6, pool_in_all=pool_in_all))
    assert set(asked) == {of_each}


@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_refinement_ends_at_its_step_and_the_server_takes_over(refine):
    """lr 1/2: the warm-up's four steps leave the site at m + (5 - m)/16, two steps of refinement at m + (5 - m)/64."""
    module = Known(lr=0.5)
    trainer = fit(module, data(sizes=(8, 8, 8), local_steps=4), rounds=2, algorithm=sites(refine=refine))
    server = sum(M) / 3 + (5 - sum(M) / 3) / 16
    for seen in (s for s in module.seen if s.round == 1):
        m = M[seen.client]
        if refine and seen.step < 2:
            site = m + (5 - m) / 16 / 2**seen.step
            assert (seen.value, seen.evaluated, seen.critic)[:2] == pytest.approx((site, site))
            assert seen.weight is None
            assert set(seen.x.flatten().tolist()) == {m}
        else:
            assert seen.weight is not None
        if seen.step == (2 if refine else 0):
            assert (seen.value, seen.evaluated) == pytest.approx((server, server))
    kept = trainer.callbacks[0].state_dict()["server"]
    for k, m in enumerate(M):
        site = m + (5 - m) / (64 if refine else 16)
        assert kept[f"site.{k}"].tolist() == pytest.approx([site, site])


class Draw(Callback):
    """Asks for samples of the sites as a metric would, and looks whether the module is left as it was."""

    def __init__(self, n: int, which: str = "union") -> None:
        self.n, self.which, self.found = n, which, list[Tensor]()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
        before = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        stream = torch.get_rng_state()
        self.found.append(callback.extra_samples(self.n)[self.which])
        assert torch.equal(self.found[-1], callback.extra_samples(self.n)[self.which])
        assert torch.equal(torch.get_rng_state(), stream)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pl_module.state_dict().items())
        assert torch.equal(callback.server.flat.vector, callback.server.parameters)


def test_the_union_has_every_site_in_proportion_and_drawing_leaves_no_trace():
    module, draw = Known(), Draw(64)
    fit(module, data(), rounds=2, algorithm=sites(), callbacks=[draw])
    for union in draw.found:
        counts = [int(((union - m).abs() < 5).sum()) for m in M]
        assert counts == [12, 18, 34]  # 64 (6, 9, 17) / 32
    quiet = Known()
    fit(quiet, data(), rounds=2, algorithm=sites())
    assert torch.equal(quiet.critic, module.critic)


def test_a_newcomer_warms_up_first():
    """A client that was not in the first round's cohort has no site: it trains alone once, then joins the others."""
    module = Known()
    fit(module, data(clients_per_round=1, seed=3), rounds=8, algorithm=sites())
    visits: dict[int, list[list[Seen]]] = {k: [] for k in range(3)}
    for seen in module.seen:
        if seen.step == 0:
            visits[seen.client].append([])
        visits[seen.client][-1].append(seen)
    assert all(len(v) > 1 for v in visits.values())
    for k, (first, *others) in visits.items():
        assert all(s.weight is None and origins(s.x) == {M[k]} for s in first)
        known = {M[s.client] for s in module.seen if s.round < others[0][0].round} - {M[k]}
        assert all(s.weight is not None and origins(s.x[3:]) <= known for s in others[0] if known and len(s.x) > 3)


def test_a_batch_of_one_row_still_meets_the_cavity():
    """Nine records in batches of eight leave one row: the weights must sum to one there, too."""
    module = Known()
    fit(module, data(), rounds=2, algorithm=sites(own_rows=20))
    short = [s for s in module.seen if s.round == 1 and s.client == 1 and s.step == 1]
    assert short
    for seen in [s for s in module.seen if s.round == 1]:
        assert float(seen.weight.sum()) == pytest.approx(1.0)
        own = seen.x.flatten() == M[seen.client]
        assert float(seen.weight[own].sum()) == pytest.approx(SIZES[seen.client] / sum(SIZES))


def test_own_labels_stay_and_more_rows_are_added_than_the_batch_has():
    own, states = torch.randn(4, 2, 3), torch.randint(0, 9, (4, 2))
    replay = torch.randn(5, 2, 3)
    x, y, weight = tilted_batch([own, states], 3, replay, share=0.4)
    assert torch.equal(x, torch.cat([own[:3], replay]))
    assert torch.equal(y[:3], states[:3])
    assert y[3:].tolist() == [[-100, -100]] * 5
    torch.testing.assert_close(weight, torch.tensor([0.4 / 3] * 3 + [0.6 / 5] * 5))
    assert tilted_batch(own, 3, replay, share=0.4)[1].tolist() == [-100] * 8
    module = Known()
    fit(module, data(), rounds=2, algorithm=sites(own_rows=8, other_rows=5))
    for seen in [s for s in module.seen if s.round == 1]:
        rows = len(seen.x) - 5
        assert rows in (1, 6, 8)  # all that the batch has
        assert origins(seen.x[:rows]) == {M[seen.client]}
        assert M[seen.client] not in origins(seen.x[rows:])


def test_a_single_client_is_plain_training_and_what_is_missing_is_named():
    module, plain = Known(lr=0.3), Known(lr=0.3)
    fit(module, data(sizes=(9,)), rounds=3, algorithm=sites())
    fit(plain, data(sizes=(9,)), rounds=3, algorithm=FedAvg())
    assert torch.equal(module.critic, plain.critic)
    with pytest.raises(UserError, match=r"generator is 'average', but Known has the submodules generator"):
        fit(Known(), data(), rounds=1, algorithm=GeneratorSites())
    with pytest.raises(UserError, match=r"Regression has no sample\(n, generator\), by which Gen"):
        fit(Regression(), federation(), rounds=1, algorithm=GeneratorSites(generator="body"))
    for argument in ({"own_rows": 0}, {"pool": 0}, {"pool_in_all": 0}, {"refine": 1.0}, {"other_rows": 0}):
        assert_refused(next(iter(argument)), GeneratorSites, **argument)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=20), st.integers(0, 500))
def test_apportion_is_fair_and_adds_up(records, n):
    shares = torch.tensor(records, dtype=torch.float64) / sum(records)
    counts = _apportion(shares, n)
    assert sum(counts) == n
    assert all(abs(c - n * float(s)) < 1 + 1e-9 for c, s in zip(counts, shares, strict=True))
