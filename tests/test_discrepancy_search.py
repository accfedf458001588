"""The search by questions: what they ask and give away, and in a federation as if the data lay in one place."""

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from scipy import stats
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.bayes import GaussianMixture, RandomFourierFeatures
from lit_epgan.bayes.inference import FOUND, SEARCHING, Inference, Stage
from lit_epgan.bayes.mean_embeddings import (
    Question,
    Statistics,
    SummedAnswer,
    answered,
    mean_embedding,
    ridged,
    root,
    statistic,
)
from lit_epgan.bayes.search import Particles, Search, Target
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import PlainFederation, Round, Rounds, Server, passing
from lit_epgan.engine.private import Private
from lit_epgan.engine.wire import decode_answer, decode_task, encode_answer, encode_task
from lit_epgan.federated import DiscrepancySearch, FedAvg, PublishedRejection
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules import Posterior, PosteriorOfCodes, SuffiAE
from lit_epgan.privacy import CentralNoise
from tests.federations import assert_resumes, federation, fit
from tests.modules import Regression
from tests.plain_federation import federated

MIXTURE = GaussianMixture(2, 1, mean_precision=0.1)
PLACES, SIZES, ROUNDS = (-6.0, 5.0, 0.0), (20, 35, 15), 5
FAST = {"frequencies": 6, "moves": 2}


def records() -> list[Tensor]:
    normal = torch.randn(sum(SIZES), 1, generator=generator_for("sites")).split(SIZES)
    return [place + x for place, x in zip(PLACES, normal, strict=True)]


def data(sites=None, **options) -> FederatedDataModule:
    sites = records() if sites is None else sites
    labels = (torch.arange(len(x)) % 2 for x in sites)
    sets = [TensorDataset(x, y) for x, y in zip(sites, labels, strict=True)]
    return FederatedDataModule.from_datasets(sets, batch_size=8, **options)


def posterior(**options) -> Posterior:
    return Posterior(MIXTURE, particles=40, **options)


def stage_of(plain: PlainFederation) -> Stage:
    algorithm = plain.federation.algorithm
    stage = algorithm.stage(plain.server)
    assert stage is not None
    return stage


def in_one_place(inference: Inference, rounds) -> Stage:
    """The same inference, of the records of each round's clients, with each round's own stream."""
    stage = None
    for number, sites in enumerate(rounds):
        x, generator = torch.cat(list(sites)), generator_for(0, "inference", number)
        asking = inference.start(generator) if stage is None else inference.step(stage, generator)
        stage = answered(asking, mean_embedding(inference.phi, x), float(len(x)))
    assert stage is not None
    return stage


def assert_same_stage(found: Stage, expected: Stage) -> None:
    assert (found.kind, found.generation) == (expected.kind, expected.generation)
    torch.testing.assert_close(found.particles.theta, expected.particles.theta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("most_records", [3000, 100], ids=["to the end", "with a refinement"])
def test_three_sites_find_the_particles_of_their_pooled_records(most_records):
    algorithm = DiscrepancySearch(most_records=most_records, **FAST)
    plain = federated(posterior(), data(), algorithm)
    plain.run(ROUNDS)
    stage = stage_of(plain)
    assert_same_stage(stage, in_one_place(algorithm.inference, [records()] * ROUNDS))
    assert (stage.kind == SEARCHING) == (most_records == 3000)
    assert stage.particles.data == sum(SIZES)
    assert torch.equal(plain.module.particles.detach(), stage.particles.theta)


def test_a_cohorts_posterior_is_that_of_its_own_records():
    algorithm = DiscrepancySearch(**FAST)
    sites, dealt = records(), data(clients_per_round=2)
    plain = federated(posterior(), dealt, algorithm)
    plain.run(ROUNDS)
    cohorts = [dealt.cohort(number) for number in range(ROUNDS)]
    assert len({tuple(cohort) for cohort in cohorts}) > 1
    assert_same_stage(stage_of(plain), in_one_place(algorithm.inference, [[sites[k] for k in c] for c in cohorts]))


def test_a_site_whose_records_are_not_finite_is_left_out():
    sites = records()
    sites[1] = sites[1].clone()
    sites[1][3] = torch.nan
    algorithm = DiscrepancySearch(**FAST)
    plain = federated(posterior(), data(sites), algorithm)
    with pytest.warns(UserWarning, match="left out") as warned:
        plain.run(2)
    assert [str(w.message) for w in warned if "left out" in str(w.message)] == [
        f"round {k}: the update of client 'client-1' is not finite and is left out" for k in (0, 1)
    ]
    assert_same_stage(stage_of(plain), in_one_place(algorithm.inference, [[sites[0], sites[2]]] * 2))


def test_of_one_class_only_its_records_are_looked_at():
    """Also at a site that has none of it."""
    sites = records()
    algorithm = DiscrepancySearch(**FAST)
    module = posterior(label=1)
    sets = [TensorDataset(x, (torch.arange(len(x)) % 2) * (k != 1)) for k, x in enumerate(sites)]
    dealt = FederatedDataModule.from_datasets(sets, batch_size=8)
    plain = federated(module, dealt, algorithm)
    plain.run(2)
    of_the_class = [sites[0][1::2], sites[2][1::2]]
    assert_same_stage(stage_of(plain), in_one_place(algorithm.inference, [of_the_class] * 2))


@pytest.mark.filterwarnings("ignore:PublishedRejection is GRAFFL's printed rule")
@pytest.mark.parametrize("algorithm", [DiscrepancySearch(**FAST), PublishedRejection(**FAST)])
def test_a_class_that_nobody_has_is_one_sentence(algorithm):
    with pytest.raises(UserError, match="no client of the round has answered for any record"):
        federated(posterior(label=7), data(), algorithm).run(1)


class Counted(DiscrepancySearch):
    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.asked: list[int] = []

    def round(self, server: Server) -> Rounds:
        self.asked.append(0)
        yield from passing(super().round(server), lambda asked: asked, lambda *_: self._count())

    def _count(self) -> None:
        self.asked[-1] += 1


@pytest.mark.parametrize("most_records", [3000, 100], ids=["to the end", "with a refinement"])
def test_questions_keep_to_what_an_accountant_is_told_and_end_with_the_search(most_records):
    algorithm, alike = Counted(most_records=most_records, **FAST), [x - x.mean() for x in records()]
    plain = federated(Posterior(GaussianMixture(1, 1, mean_precision=0.1), particles=40), data(alike), algorithm)
    number = 0
    while number == 0 or stage_of(plain).kind != FOUND:
        plain.round(number)
        number += 1
        assert number < 60
    found = plain.server.parameters.clone()
    for after in (number, number + 1):
        plain.round(after)
    assert torch.equal(plain.server.parameters, found)
    assert algorithm.asked[0] == 1
    assert algorithm.asked[-2:] == [0, 0]
    assert max(algorithm.asked) == 1
    assert all(asked <= algorithm.exchanges(k, k + 1) for k, asked in enumerate(algorithm.asked))
    assert algorithm.exchanges(0, 10) == 10


def test_a_site_reads_its_records_once_and_is_asked_before_and_after_the_training():
    read: list[int] = []

    class Counting(Posterior):
        def summarise(self, x: Tensor) -> Tensor:
            read.append(len(x))
            return super().summarise(x)

    federated(Counting(MIXTURE, particles=40), data(), DiscrepancySearch(**FAST)).run(3)
    assert sum(read) == sum(SIZES)
    algorithm = DiscrepancySearch(from_round=3, **FAST)
    federated(posterior(), data(), algorithm)
    assert [algorithm.trains(k) for k in range(5)] == [True, True, True, False, False]
    assert algorithm.exchanges(1, 5) == 2 + 2  # FedAvg's two, and two generations
    assert algorithm.exchanges(4, 6) == 2
    assert algorithm.exchanges(0, 2) == 2


def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path):
    assert_resumes(posterior, data, lambda: DiscrepancySearch(**FAST), tmp_path, rounds=6, cut=3)


CODES = {"features": 3, "dimensions": 1, "hidden": [4]}


def of_codes() -> PosteriorOfCodes:
    torch.manual_seed(0)
    return PosteriorOfCodes(MIXTURE, 40, **CODES)


def wide_data() -> FederatedDataModule:
    columns = torch.tensor([[1.0, -0.5, 0.3]])
    return data([x @ columns + 0.1 * torch.randn(len(x), 3, generator=generator_for("wide")) for x in records()])


class States(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen.append({name: value.clone() for name, value in pl_module.state_dict().items()})


def test_first_the_summary_is_trained_then_only_particles_move():
    module, plain, states = of_codes(), of_codes(), States()
    fit(module, wide_data(), 4, algorithm=DiscrepancySearch(from_round=2, **FAST), callbacks=[states])
    fit(plain, wide_data(), 2, algorithm=FedAvg())
    trained = [name for name, _ in plain.named_parameters() if name != "particles"]
    assert len(trained) >= 6
    for name in trained:
        assert torch.equal(states.seen[1][name], plain.state_dict()[name]), name
        assert torch.equal(states.seen[3][name], states.seen[1][name]), name
        assert not torch.equal(states.seen[0][name], states.seen[1][name]), name
    assert torch.equal(states.seen[1]["particles"], plain.particles)
    assert not torch.equal(states.seen[3]["particles"], states.seen[1]["particles"])


def test_the_codes_are_those_of_the_servers_encoder():
    """The particles are the pooled codes' own, by the encoder that the federation ended with."""
    algorithm = DiscrepancySearch(from_round=2, **FAST)
    plain = federated(of_codes(), wide_data(), algorithm)
    plain.run(4)
    module = plain.module
    dealt = wide_data()
    dealt.setup()
    codes = [module.summarise(torch.stack([row[0] for row in client.dataset])) for client in dealt.clients]
    stage = None
    for number in (2, 3):
        generator, inference = generator_for(0, "inference", number), algorithm.inference
        asking = inference.start(generator) if stage is None else inference.step(stage, generator)
        stage = answered(asking, mean_embedding(inference.phi, torch.cat(codes)), float(sum(SIZES)))
    assert stage is not None
    assert_same_stage(stage_of(plain), stage)


@torch.no_grad()
def test_sites_with_nothing_but_bytes_summarise_by_the_servers_encoder():
    """Each site has a module of its own, which its own training leaves unlike the server's."""
    alone = federated(of_codes(), wide_data(), DiscrepancySearch(from_round=2, **FAST))
    alone.run(4)
    parts = (of_codes, wide_data, lambda: DiscrepancySearch(from_round=2, **FAST))
    server, *sites = (federated(*(make() for make in parts)) for _ in range(1 + len(SIZES)))
    delivered: list[dict[str, int]] = [{} for _ in SIZES]
    caches: list[dict[str, Tensor]] = [{} for _ in SIZES]
    private = [Private() for _ in SIZES]
    for site in sites:
        site.model.optimizers.round_begins()
    for number in range(4):
        round_ = Round(server.federation, number)
        while round_.exchange is not None:
            for k in list(round_.asked):
                task = decode_task(encode_task(round_.task(k, delivered[k])), caches[k])
                answer = sites[k].answer(task, private[k])
                private[k] = answer.private
                round_.receive(k, decode_answer(encode_answer(answer)))
            round_.close()
    assert [known["parameters"] for known in delivered] == [2, 2, 2]  # sent once, and not in every exchange
    torch.testing.assert_close(server.server.parameters, alone.server.parameters, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"from_round": -1}, "from_round is -1; it must be at least 0"),
        ({"frequencies": 0}, "frequencies is 0"),
        ({"moves": 0}, "moves is 0; it must be at least 1"),
        ({"even": 1.0}, "even is 1.0; it must lie in"),
        ({"surplus": 1.0}, "surplus is 1.0; it must be above 1"),
        ({"most_records": 0}, "most_records is 0; it must be at least 1"),
    ],
)
def test_what_is_out_of_range_is_named(options, sentence):
    with pytest.raises(UserError, match=sentence):
        federated(posterior(), data(), DiscrepancySearch(**options))


def test_particles_must_be_enough_and_a_private_run_may_not_tell_who_has_a_class(tmp_path):
    with pytest.raises(UserError, match="particles is 20; 6 parameters need at least 24"):
        federated(Posterior(MIXTURE, particles=20), data(), DiscrepancySearch(**FAST))
    with pytest.raises(UserError, match="Regression has no simulator: DiscrepancySearch moves the particles"):
        fit(Regression(), federation(), 1, algorithm=DiscrepancySearch(**FAST))
    with pytest.raises(UserError, match="SuffiAE has no simulator"):
        federated(SuffiAE(**CODES), wide_data(), DiscrepancySearch(**FAST))
    # the number of clients that have records of it would be no number that noise covers
    algorithm = DiscrepancySearch(**FAST)
    mechanism = CentralNoise(1.0, 1.0, ledger=str(tmp_path / "ledger.jsonl"))
    with pytest.raises(UserError, match="how many clients have any would leave without noise"):
        federated(posterior(label=1), data(), algorithm, mechanism=mechanism).run(1)


def test_a_generation_draws_particles_by_the_change_of_their_discrepancy(monkeypatch):
    """Each n w_i times, up to one, w_i ~ exp(-D_W / 2) after the prior; half of the particles stay effective."""
    monkeypatch.setattr(Search, "_moved", lambda self, at, target, generator: at)
    x = torch.cat(records())
    inference = Inference.of(MIXTURE, 0, particles=200, frequencies=6)
    generator, mean = generator_for("weights"), mean_embedding(inference.phi, x)
    before = answered(inference.search.start(generator), mean, float(len(x)))
    after = answered(inference.search.generation(before, generator), mean, float(len(x)))
    assert after.records == before.records
    away = before.means - mean
    discrepancy = ((away @ after.metric) * away).sum(1)
    weights = (-0.5 * discrepancy).softmax(0)
    assert float(1 / weights.square().sum()) == pytest.approx(100, rel=0.02)
    expected = 200 * weights
    counts = (after.theta[:, None] == before.theta).all(2).sum(0)
    assert ((counts >= (expected - 1e-6).floor()) & (counts <= (expected + 1e-6).ceil())).all()
    torch.testing.assert_close(after.discrepancy.sort().values, discrepancy.repeat_interleave(counts).sort().values)


def test_records_are_added_to_those_that_there_are_until_it_is_exact(monkeypatch):
    """Its variance, over data sets that are simulated anew, is about p / surplus = .06; one covariance is for all."""
    inference, at, target, covariance = asked()
    topped = inference.search._topped_up(at, target, covariance, generator_for("more"))
    assert topped.records > at.records
    statistics, generator = inference.search.statistics, generator_for("anew")
    logs = torch.stack([target.discrepancies(statistics.means(at.theta, topped.records, generator)) for _ in range(5)])
    assert 0.05 < float((0.5 * logs).var(0).mean()) < 0.1
    inference, at, target, covariance = asked()
    monkeypatch.setattr(Statistics, "means", lambda self, theta, records, generator: 5.0 + 0 * at.means)
    topped = inference.search._topped_up(at, target, covariance, generator_for("more"))
    share = at.records / topped.records
    assert 0 < share < 0.8
    torch.testing.assert_close(topped.means, share * at.means + (1 - share) * 5.0)


def asked() -> tuple[Inference, Particles, Target, Tensor]:
    """Particles from the prior under a metric that is worth 30 records."""
    x = torch.cat(records())
    inference = Inference.of(MIXTURE, 0, particles=30, frequencies=6, surplus=100.0)
    generator, mean = generator_for("surplus"), mean_embedding(inference.phi, x)
    at = answered(inference.search.start(generator), mean, float(len(x)))
    covariance = inference.search.statistics.covariance(at.theta, generator)
    r = root(30 * torch.linalg.inv(ridged(covariance, 0.1)))
    return inference, at, Target(r, r @ mean), covariance


def test_moves_leave_the_prior_as_it_is_where_nothing_is_asked():
    """Its coordinates are log Gamma, Student and log inverse-chi^2 variables: no Gaussian that a move proposes."""
    inference = Inference.of(MIXTURE, 0, particles=2000, frequencies=2)
    generator, size = generator_for("prior"), inference.phi.size
    theta = MIXTURE.prior(2000, generator)
    nothing = Target(torch.zeros(0, size, dtype=torch.float64), torch.zeros(0, dtype=torch.float64))
    zeros = torch.zeros(2000, dtype=torch.float64)
    at = Particles(theta, torch.zeros(2000, size).double(), 1, torch.zeros(size, size).double(), zeros, zeros)
    moved = inference.search._moved(at, nothing, generator)
    assert float((moved.theta != theta).any(1).double().mean()) > 0.5
    fresh = MIXTURE.prior(20_000, generator)
    for k in range(3):  # both components alike
        pooled = moved.theta[:, [k, k + 3]].flatten().numpy()
        assert stats.ks_2samp(pooled, fresh[:, k].numpy()).pvalue > 1e-3


G = generator_for("questions")
R, MEANS = (torch.randn(shape, generator=G, dtype=torch.float64) for shape in ((3, 8), (20, 8)))
SITES = {30: torch.randn(8, generator=G, dtype=torch.float64), 5: torch.ones(8, dtype=torch.float64)}
POOLED = sum(n * mean for n, mean in SITES.items()) / 35


def over_sites(question: Question) -> Tensor:
    return sum(n * question.discrepancies(mean) for n, mean in SITES.items()) / 35


def test_sums_over_sites_are_the_pooled_discrepancies_and_give_the_mean_away():
    """(mu_i - mu)^T R^T R (mu_i - mu), one by one."""
    found = Question.of(R, MEANS).discrepancies(POOLED)
    metric = R.T @ R
    for own, mean in zip(found, MEANS, strict=True):
        assert torch.allclose(own, (mean - POOLED) @ metric @ (mean - POOLED))
    question = Question.of(R, MEANS)
    more = over_sites(question) - question.discrepancies(POOLED)
    assert torch.allclose(more, more[0])
    spread = sum(n * (R @ (mean - POOLED)).square().sum() for n, mean in SITES.items()) / 35
    assert torch.allclose(more[0], torch.as_tensor(spread))
    question = Question.of(R, MEANS)
    for asked in (question, Question(R, question.simulated[:4])):  # r + 1 of them are enough
        found = statistic(asked, SummedAnswer(over_sites(asked), 35.0))
        assert torch.allclose(found, R @ POOLED, atol=1e-8, rtol=0)


def test_whoever_holds_the_mean_answers_every_question():
    noise, seen = torch.eye(8, dtype=torch.float64), []

    def asking():
        for rows in (2, 5):
            seen.append((yield Question.of(R, MEANS[:rows])))
        return "found"

    assert answered(asking(), POOLED, 35.0, noise, 0.5) == "found"
    assert [len(answer.discrepancies) for answer in seen] == [2, 5]
    assert all((a.records, a.noise is noise, a.scaled) == (35.0, True, 0.5) for a in seen)
    assert torch.equal(seen[1].discrepancies, Question.of(R, MEANS[:5]).discrepancies(POOLED))
    phi = RandomFourierFeatures(2, 4, [1.0], generator_for("features")).float()
    x = torch.randn(9, 2, generator=G, dtype=torch.float64)
    found = mean_embedding(phi, x)
    assert found.dtype == torch.float64
    assert torch.equal(found, torch.stack([row.double() for row in phi(x.float())]).mean(0))
