"""The kinds of site of expectation propagation in parameter space, damping, and tied sites."""

import copy

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from evidence.fednp_sites import Sites
from lit_epgan.bayes import SGHMC, GaussianFactor
from lit_epgan.callbacks import FederationCallback
from lit_epgan.cli.main import main
from lit_epgan.federated import ExpectationPropagation, LaplaceSites, SampleMoments
from tests.federations import SIZES, assert_resumes, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.refusals import assert_refused
from tests.test_algorithms import Invariant, Quadratic, quadratics
from tests.tied_sites import TiedSites

TARGETS, RECORDS = [(1.0, 0.2), (-3.0, 2.0), (0.5, -4.0), (2.0, 2.0)], [2, 5, 3, 6]


def state_of(trainer: Trainer):
    callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
    return callback.state_dict()


@pytest.mark.parametrize(("kind", "argument"), [
    (LaplaceSites, {"fisher_decay": 1.0}), (LaplaceSites, {"clip": (0, 1)}), (SampleMoments, {"clip": (2, 1)}),
    (SampleMoments, {"share": 0.0}), (SampleMoments, {"share": 1.1}),
])  # fmt: skip
def test_arguments_out_of_range(kind, argument):
    assert_refused(f"{kind.__name__}.*{next(iter(argument))}", kind, **argument)


def test_the_command_line_takes_a_kind_of_site(capsys):
    words = ["--federation.algorithm.sites", "lit_epgan.federated.SampleMoments",
             "--federation.algorithm.sites.share", "0.25"]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "digits.yaml", *words, "--print_config"])
    assert "share: 0.25" in capsys.readouterr().out


class Trace(Callback):
    """The parameters after every local step: [round][client] -> (steps, d)."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, list[Tensor]]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rounds.append({})

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args) -> None:
        callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
        vector = nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone()
        self.rounds[-1].setdefault(callback.progress.client, []).append(vector)


@pytest.mark.parametrize("work", [{"local_steps": 7}, {"local_epochs": 4}], ids=str)
@pytest.mark.parametrize("module", [Regression(), TwoOptimizers()], ids=["automatic", "manual"])
def test_sample_moments_are_those_of_the_last_local_steps(module, work):
    """w_k = clip(s / V_k) n_k / mean n around the samples' mean; s is the first round's, then the round's before."""
    module, trace = copy.deepcopy(module), Trace()
    algorithm = ExpectationPropagation(prior_scale=2.0, sites=SampleMoments(share=0.5, clip=(0.05, 5.0)))
    trainer = fit(module, federation(**work), rounds=2, algorithm=algorithm, callbacks=[trace])
    last = [{name: torch.stack(path[-max(1, len(path) // 2) :]) for name, path in r.items()} for r in trace.rounds]
    moments = [{name: (x.mean(0), x.var(0, correction=0)) for name, x in r.items()} for r in last]
    places = [slice(0, None)]
    if isinstance(module, TwoOptimizers):
        first = sum(p.numel() for p in module.generator.parameters())
        places = [slice(first, None), slice(0, first)]
    site = {}
    for k, (name, (mean, variance)) in enumerate(moments[1].items()):
        w = torch.empty_like(mean)
        for part in places:
            s = torch.stack([v[part].mean() for _, v in moments[0].values()]).mean()
            w[part] = (s / variance[part].clamp_min(1e-30)).clamp(0.05, 5.0) * SIZES[k] / (sum(SIZES) / len(SIZES))
        site[name] = GaussianFactor(w, w * mean)
        state = state_of(trainer)["clients"][name]["algorithm"]
        assert set(state) == {"precision", "precision_mean"}
        torch.testing.assert_close(state["precision"], w, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(state["precision_mean"], w * mean, rtol=1e-6, atol=1e-9)
    merged = sum(s.precision_mean for s in site.values()) / sum(s.precision for s in site.values())
    torch.testing.assert_close(nn.utils.parameters_to_vector(module.parameters()).detach(), merged)


class Bowl(LightningModule):
    """1/2 curvature theta^2, 500 copies of two curvatures, sampled by SGHMC; data are only counted."""

    def __init__(self, temperature: float) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(2, 500))
        self.register_buffer("curvature", torch.tensor([[1.0], [4.0]]))
        self.temperature = temperature

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return 0.5 * (self.curvature * self.theta.square()).sum()

    def configure_optimizers(self):
        return SGHMC([self.theta], lr=0.05, friction=0.5, temperature=self.temperature)


def precisions(temperature: float) -> Tensor:
    sites = SampleMoments(share=0.9, clip=(1e-3, 1e3))
    algorithm = ExpectationPropagation(prior_scale=0.0, sites=sites)
    trainer = fit(Bowl(temperature), federation(sizes=(4, 4), local_steps=250), rounds=1, algorithm=algorithm)
    return state_of(trainer)["clients"]["client-0"]["algorithm"]["precision"].view(2, 500)


def test_a_sampled_site_is_as_precise_as_its_posterior_is_curved_whatever_the_temperature():
    cold, warm = precisions(0.01), precisions(9.0)
    torch.testing.assert_close(cold, warm, rtol=1e-6, atol=1e-9)
    ratio = float(cold[1].median() / cold[0].median())
    assert ratio == pytest.approx(4, rel=0.15)


def test_one_step_and_unknown_numbers_of_steps_count_all_samples():
    """A single sample has no variance: every precision is then the same."""
    trainer = fit(Quadratic(), quadratics(TARGETS, RECORDS, local_steps=1), rounds=1,
                  algorithm=ExpectationPropagation(sites=SampleMoments(share=0.1)))  # fmt: skip
    state = state_of(trainer)["clients"]["client-1"]["algorithm"]
    assert state["precision"].tolist() == pytest.approx([5 / 4] * 2)

    class Unknown(SampleMoments):
        def after_local_step(self, client) -> None:
            client.steps = None
            super().after_local_step(client)
            assert self._samples(client) == client.step

    fit(Quadratic(), quadratics(TARGETS, RECORDS, local_steps=3), rounds=1,
        algorithm=ExpectationPropagation(sites=Unknown()))  # fmt: skip


@pytest.mark.parametrize("options", [{"sites": SampleMoments()}, {"damping": 0.4}], ids=["samples", "damped"])
@pytest.mark.parametrize("module", [Regression(), TwoOptimizers()], ids=["automatic", "manual"])
def test_q_is_the_prior_times_the_sites_whatever_their_kind(module, options):
    module = copy.deepcopy(module)
    if isinstance(module, TwoOptimizers):
        module.validation_step = lambda batch, batch_idx: None
    check = Invariant(p0=0.3)
    data = federation(clients_per_round=2, val_dataset=client_sets((3,))[0], local_steps=4)
    algorithm = ExpectationPropagation(prior_scale=5.0, prior_precision=0.3, **options)
    fit(module, data, rounds=6, algorithm=algorithm, callbacks=[check])
    assert check.rounds == 6


LR, SCALE, DECAY, CLIP = 0.5, 3.0, 0.5, (0.1, 2.0)


def local_site(k: int, theta: Tensor, fisher: Tensor, cavity: GaussianFactor, others: float) -> tuple[Tensor, Tensor]:
    target = torch.tensor(TARGETS[k], dtype=torch.float64)
    for _ in range(3):
        gradient = theta - target
        fisher = DECAY * fisher + (1 - DECAY) * gradient.square()
        theta = theta - LR * gradient
        c = LR * SCALE / (others or 1.0)
        theta = (theta + c * cavity.precision_mean) / (1 + c * cavity.precision)
    return theta, fisher


def reference(kind: type, cohorts: list[list[int]], damping: float, p0: float) -> Tensor:
    zeros = torch.zeros(2, dtype=torch.float64)
    q = kind(GaussianFactor(zeros + p0, zeros), len(TARGETS))
    theta, fisher, seen, s, mean_n, count = zeros, {}, set(), None, 0.0, 0.0
    tied = kind is TiedSites
    for cohort in cohorts:
        local = {}
        for k in cohort:
            others = count * 3 / 4 if tied else len(seen - {k})
            local[k] = local_site(k, theta, zeros if tied else fisher.get(k, zeros), q.cavity(k), others)
        now = sum(float(f.mean()) for _, f in local.values()) / len(cohort)
        records = sum(RECORDS[k] for k in cohort) / len(cohort)
        s, mean_n = (now, records) if s is None else (s, mean_n)
        new = {}
        for k, (mean, f) in local.items():
            w = (f / s).clamp(*CLIP) * RECORDS[k] / mean_n
            new[k], fisher[k] = GaussianFactor(w, w * mean), f
        if tied:
            tilted = [q.cavity(k) * site for k, site in new.items()]
            q.update_all(GaussianFactor(torch.stack([t.precision for t in tilted]),
                                        torch.stack([t.precision_mean for t in tilted])), damping)  # fmt: skip
        else:
            for k, site in new.items():
                q.update(k, q.cavity(k) * site, damping)
        s, mean_n, seen = now, records, seen | set(cohort)
        count = count * (1 - len(cohort) / 4) + len(cohort)
        theta = q.posterior.mean
    return theta


@pytest.mark.parametrize("kind", [Sites, TiedSites])
@pytest.mark.parametrize("damping", [1.0, 0.3])
@pytest.mark.parametrize(("cohort", "p0"), [(None, 0.0), (2, 0.7), (3, 0.0), (1, 0.2)])
def test_federated_ep_is_the_books(kind, damping, cohort, p0):
    data = quadratics(TARGETS, RECORDS, local_steps=3, clients_per_round=cohort)
    sites = LaplaceSites(fisher_decay=DECAY, clip=CLIP)
    algorithm = ExpectationPropagation(SCALE, p0, sites, damping, tied=kind is TiedSites)
    module = Quadratic(lr=LR)
    fit(module, data, rounds=5, algorithm=algorithm)
    expected = reference(kind, [data.cohort(r) for r in range(5)], damping, p0)
    torch.testing.assert_close(module.theta.detach(), expected, rtol=1e-9, atol=1e-9)


def test_tied_sites_of_one_client_are_its_own():
    modules = []
    for tied in (False, True):
        algorithm = ExpectationPropagation(prior_scale=5.0, prior_precision=0.5, tied=tied,
                                           sites=SampleMoments())  # fmt: skip
        modules.append(Quadratic())
        fit(modules[-1], quadratics(TARGETS[:1], RECORDS[:1], local_steps=4), rounds=3, algorithm=algorithm)
    assert modules[0].theta.tolist() == pytest.approx(modules[1].theta.tolist(), rel=1e-12)


@pytest.mark.parametrize("sites", [LaplaceSites(), SampleMoments()], ids=["laplace", "samples"])
def test_the_memory_of_tied_sites_does_not_grow_with_the_clients(sites):
    sizes = []
    for clients in (2, 4):
        data = quadratics(TARGETS[:clients], RECORDS[:clients], local_steps=2)
        state = state_of(fit(Quadratic(), data, rounds=2, algorithm=ExpectationPropagation(sites=sites, tied=True)))
        kept = [{name: held for name, held in client.items() if held} for client in state["clients"].values()]
        assert kept == [{"delivered": {"prior_precision_mean": 0}}] * clients  # that it knows p0: no tensor
        sizes.append({name: value.numel() for name, value in state["server"].items()})
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "options", [{"sites": SampleMoments()}, {"tied": True}, {"damping": 0.5}], ids=["sites", "tied", "damping"]
)
def test_resumed_it_goes_on_bit_by_bit(tmp_path, options):
    module, cohorts = Regression(dropout=0.2), {"clients_per_round": 3, "local_steps": 5}
    parts = (lambda: copy.deepcopy(module), lambda: federation(**cohorts), lambda: ExpectationPropagation(**options))
    assert_resumes(*parts, tmp_path)
