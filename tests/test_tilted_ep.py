"""The EP-GAN paper's prior: against a plain loop that leaves every gradient to autograd, its invariants, mistakes."""

import copy
import functools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lit_epgan.bayes import GaussianFactor
from lit_epgan.bayes.gaussian import factor_of, own_site
from lit_epgan.engine import Broadcast, Client
from lit_epgan.federated import FedAvg, FedProx, TiltedExpectationPropagation
from lit_epgan.federated.bayesian.tilted_ep import Q
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.federations import client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.test_ep_sites import state_of
from tests.test_federation import assert_same
from tests.tilted_loop import Remembering, plain_tilt

FEATURES = "discriminator.1"  # LeakyReLU after the first layer, 6 wide
NOISE = ("generator.0.bias", "running_mean", "num_batches_tracked")  # a bias before BatchNorm has no gradient
OPTIONS: dict[str, dict[str, Any]] = {
    "one component": {},
    "a linear f and a trained backbone": {"hidden": 0, "train_backbone": True, "terms": 1},
    "the mixture": {"components": 3, "temperature": 0.7, "spread": 0.3},
    "proximal": {"step": "proximal", "weight": 20.0},
    "a proximal mixture": {"components": 2, "step": "proximal", "weight": 20.0, "spread": 0.2},
    "every other step": {"tilt_every": 2, "recentre": True},
}


@functools.cache
def fedavg() -> TwoOptimizers:
    """Three of its rounds, from where every test begins."""
    torch.manual_seed(0)
    module = TwoOptimizers()
    fit(module, federation(clients_per_round=3), rounds=3)
    return module


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_three_rounds_equal_a_plain_loop(options):
    """Three of four clients a round; the server's model, the tilt's network and every site."""
    settings = {"hidden": 5, "weight": 0.02, "tilt_every": 1, "prior_variance": 0.5, "lr": 0.01} | options
    algorithm, module = Remembering(FEATURES, **settings), TwoOptimizers()
    initial = copy.deepcopy(module)
    trainer = fit(module, federation(clients_per_round=3), rounds=3, algorithm=algorithm)
    server, work = plain_tilt(initial, algorithm, 3)
    assert_same(module, server.module, skip=NOISE, tolerance=1e-6)  # type: ignore[arg-type]
    state = state_of(trainer)
    expected = nn.utils.parameters_to_vector(server.tilt.parameters())  # type: ignore[union-attr]
    torch.testing.assert_close(state["networks"], expected, rtol=1e-6, atol=1e-7)
    assert set(state["clients"]) == {f"client-{k}" for k in work.sites}
    for k, networks in work.sites.items():
        site = state["clients"][f"client-{k}"]["algorithm"]
        for name in ("precision", "precision_mean"):
            expected = torch.cat([getattr(networks[n], name) for n in ("generator", "discriminator")], 1)
            torch.testing.assert_close(site[f"tilted.{name}"], expected, rtol=1e-5, atol=1e-7)
    if "recentre" not in options:
        with pytest.raises(AssertionError):  # the prior is felt
            assert_same(module, fedavg(), skip=NOISE, tolerance=1e-3)


class Invariant(Callback):
    """q_j = p0_j prod_k g_kj after every round, absent clients' sites included, and every cavity is proper."""

    def __init__(self, algorithm: TiltedExpectationPropagation) -> None:
        self.algorithm, self.rounds = algorithm, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        server = state_of(trainer)["server"]
        self.first = nn.utils.parameters_to_vector(pl_module.parameters()).detach().clone()
        self.prior = GaussianFactor(server["tilted.precision"], server["tilted.precision_mean"])
        assert torch.allclose(self.prior.variance, torch.tensor(self.algorithm.prior_variance).double())
        apart = (self.prior.mean - self.first).std(1)
        expected = self.algorithm.spread if self.algorithm.components > 1 else 0
        assert apart.tolist() == pytest.approx([expected] * self.algorithm.components, rel=0.3)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = state_of(trainer)
        sites = [
            GaussianFactor(c["algorithm"]["tilted.precision"], c["algorithm"]["tilted.precision_mean"])
            for c in state["clients"].values()
        ]
        now = nn.utils.parameters_to_vector(pl_module.parameters()).detach()
        moved = (now - self.first) / self.algorithm.prior_variance if self.algorithm.recentre else 0
        product = GaussianFactor(self.prior.precision, self.prior.precision_mean + moved)
        for site in sites:
            assert bool((site.precision >= 0).all())
            product = product * site
        q = GaussianFactor(state["server"]["tilted.precision"], state["server"]["tilted.precision_mean"])
        torch.testing.assert_close(q.precision, product.precision, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(q.precision_mean, product.precision_mean, rtol=1e-8, atol=1e-8)
        assert all((q / site).is_proper for site in sites)
        self.seen = len(sites)
        self.rounds += 1


@pytest.mark.parametrize("options", [{}, {"components": 3, "recentre": True}, {"variant": "printed", "spread": 0.1},
                                     {"variant": "corrected", "components": 2}], ids=str)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*are not tilted")
def test_q_is_the_prior_times_the_sites_after_every_round(options):
    algorithm = TiltedExpectationPropagation(FEATURES, hidden=4, weight=1e-2, **options)
    check = Invariant(algorithm)
    fit(TwoOptimizers(), federation(clients_per_round=2), rounds=4, algorithm=algorithm, callbacks=[check])
    assert (check.rounds, check.seen) == (4, 4)


def test_sites_and_messages_are_as_long_as_the_components_say():
    module = TwoOptimizers()
    d = sum(p.numel() for p in module.parameters())
    algorithm = Remembering(FEATURES, components=3)
    state = state_of(fit(module, federation(), rounds=1, algorithm=algorithm))
    assert state["server"]["tilted.precision"].shape == (3, d)
    assert state["clients"]["client-2"]["algorithm"]["tilted.precision_mean"].shape == (3, d)
    assert algorithm.f[2].shape == (3,)
    report = algorithm.reports[2]
    assert [report.sites.precision.numel(), report.change.numel()] == [3 * d, d]


class Frozen(TiltedExpectationPropagation):
    """f is zero and stays so: sites are 1."""

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
        networks = super().build(module, seed)
        for parameter in networks.parameters():
            nn.init.zeros_(parameter)
        return networks

    def network_optimizer(self, networks: nn.ModuleDict) -> torch.optim.Optimizer:
        return torch.optim.SGD(networks.parameters(), lr=0.0)


@pytest.mark.parametrize("step", ["loss", "proximal"])
def test_without_a_weight_it_is_fedavg(step):
    module, plain_module = TwoOptimizers(), TwoOptimizers()
    plain_module.load_state_dict(module.state_dict())
    algorithm = TiltedExpectationPropagation(FEATURES, weight=0.0, step=step)
    fit(module, federation(), rounds=2, algorithm=algorithm)
    fit(plain_module, federation(), rounds=2, algorithm=FedAvg())
    assert_same(module, plain_module, skip=NOISE)


def test_without_a_tilt_it_is_fedprox_to_the_prior():
    """f = 0 leaves p0 alone: -weight log N(theta; theta_0, v), recentred, is FedProx with mu = weight / v."""
    module, proximal = TwoOptimizers(), TwoOptimizers()
    proximal.load_state_dict(module.state_dict())
    algorithm = Frozen(FEATURES, weight=0.3, prior_variance=0.5, recentre=True)
    trainer = fit(module, federation(clients_per_round=3), rounds=3, algorithm=algorithm)
    fit(proximal, federation(clients_per_round=3), rounds=3, algorithm=FedProx(0.6))
    assert_same(module, proximal, skip=NOISE, tolerance=1e-6)
    for client in state_of(trainer)["clients"].values():
        assert float(client["algorithm"]["tilted.precision"].abs().max()) < 1e-12


def test_a_single_clients_cavity_is_the_prior():
    """Its own site, however often it is renewed, is never its own prior: q = p0 x the last site, the cavity p0."""
    cavities = []

    class Watched(TiltedExpectationPropagation):
        def train(self, client: Client, sent: Broadcast) -> TiltedExpectationPropagation.Report:
            q = factor_of(sent, Q)
            cavities.append((q / own_site(client.state, q.precision, Q), q**1.0))
            return super().train(client, sent)

    fit(TwoOptimizers(), federation(sizes=(20,)), rounds=3, algorithm=Watched(FEATURES, hidden=0, lr=0.1))
    assert len(cavities) == 3
    for cavity, _ in cavities:
        torch.testing.assert_close(cavity.precision, cavities[0][1].precision)
        torch.testing.assert_close(cavity.precision_mean, cavities[0][1].precision_mean)
    assert not torch.allclose(cavities[-1][1].precision_mean, cavities[0][1].precision_mean)


def test_sites_are_those_of_brute_force_integration():
    """f = .8 does not learn: the site is N(m', s') / N(m, s), m' and s' of sigma(.8 theta) N(theta; theta_0, 2)."""

    class Fixed(Frozen):
        def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
            networks = super().build(module, seed)
            nn.init.constant_(self.tilt.outer.bias, 0.8)
            return networks

    module = TwoOptimizers()
    start = nn.utils.parameters_to_vector(module.parameters()).detach().double()
    algorithm = Fixed(FEATURES, hidden=0, terms=6, prior_variance=2.0)
    state = state_of(fit(module, federation(), rounds=1, algorithm=algorithm))
    grid = torch.linspace(-15, 15, 3001, dtype=torch.float64)
    p = torch.softmax(-((grid - start[:, None]) ** 2) / 4 + nn.functional.logsigmoid(0.8 * grid), 1)
    mean = p @ grid
    variance = (p * (grid - mean[:, None]) ** 2).sum(1)
    precision, precision_mean = 1 / variance - 1 / 2.0, mean / variance - start / 2.0
    close = {"rtol": 1e-4, "atol": 1e-5}
    for client in state["clients"].values():
        torch.testing.assert_close(client["algorithm"]["tilted.precision"][0], precision, **close)
        torch.testing.assert_close(client["algorithm"]["tilted.precision_mean"][0], precision_mean, **close)
    torch.testing.assert_close(state["server"]["tilted.precision"][0], 0.5 + 4 * precision, **close)


def test_the_sites_f_is_the_mean_over_all_own_records_in_evaluation_mode():
    """The features follow a dropout; with one client the server holds its model."""
    module, modes = TwoOptimizers(), []
    algorithm = Remembering("discriminator.2", hidden=3, lr=0.07)

    mode = LambdaCallback(on_train_epoch_end=lambda trainer, module: modes.append(module.discriminator.training))
    trainer = fit(module, federation(sizes=(20,)), rounds=1, algorithm=algorithm, callbacks=[mode])
    tilt = algorithm.initial.double()
    nn.utils.vector_to_parameters(state_of(trainer)["networks"], tilt.parameters())
    x = client_sets((20,))[0].tensors[0]
    with torch.no_grad():
        f = tilt(module.eval().discriminator[:3](x)).mean(0)
    torch.testing.assert_close(algorithm.f[0], f)
    assert modes == [True]
    assert algorithm.network_optimizer(nn.ModuleDict({"tilt": tilt})).param_groups[0]["lr"] == 0.07


def test_a_module_that_is_trained_alone_has_a_prior_too():
    algorithm = TiltedExpectationPropagation("body.1", hidden=0, weight=0.01)
    module, plain_module = Regression(), Regression()
    plain_module.load_state_dict(module.state_dict())
    trainer = fit(module, federation(), rounds=2, algorithm=algorithm)
    fit(plain_module, federation(), rounds=2)
    assert float(state_of(trainer)["server"]["tilted.precision"].max()) > 1
    with pytest.raises(AssertionError):
        assert_same(module, plain_module, tolerance=1e-4)


def test_f_sees_the_real_rows_and_costs_no_further_pass():
    seen: list[Tensor] = []
    passes = {"discriminator": 0}

    class Watched(TiltedExpectationPropagation):
        def train(self, client: Client, sent: Broadcast) -> TiltedExpectationPropagation.Report:
            fit = client.fit

            def watched(start: Tensor, *, loss: Any, **told: Any) -> None:
                def extra() -> Tensor | None:
                    if self.caught._caught is not None:
                        seen.append(self.caught._caught.detach().clone())
                    found = loss()
                    assert found is None or float(found) == 0  # what the module logs stays its own
                    return found

                fit(start, loss=extra, **told)
                passes["steps"] = passes["discriminator"]

            client.fit = watched  # type: ignore[method-assign, assignment]
            return super().train(client, sent)

    expected: list[Tensor] = []

    class Batches(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                expected.append(pl_module.discriminator[1](pl_module.discriminator[0](batch[0])))

    module = TwoOptimizers()
    module.discriminator.register_forward_pre_hook(lambda *_: passes.update(discriminator=passes["discriminator"] + 1))
    fit(module, federation(sizes=(20,), local_steps=4), rounds=1, callbacks=[Batches()],
        algorithm=Watched(FEATURES, components=2, tilt_every=1))  # fmt: skip
    assert len(seen) == 4
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert passes["steps"] == 4 * 3
    assert not module.discriminator[1]._forward_hooks


class Watched(TiltedExpectationPropagation):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[Tensor] = []

    def train(self, client: Client, sent: Broadcast) -> TiltedExpectationPropagation.Report:
        def look() -> None:
            if self.caught._caught is not None:
                self.seen.append(self.caught._caught.detach().clone())

        return super().train(client.told(loss=look), sent)


@pytest.mark.parametrize("options", [{}, {"objective": "wgan-gp"}, {"r1": 0.5}, {"average": None}], ids=str)
def test_a_gan_shows_its_real_rows_first(options):
    """In one pass with the generated ones, or alone ahead of them."""
    networks = MLPGenerator((3,), hidden=(8,), tanh=False), MLPDiscriminator((3,), hidden=(6, 5))
    module = GAN(*networks, **options)
    algorithm, expected = Watched("discriminator.layers.3", tilt_every=1), []

    class Batches(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                expected.append(pl_module.discriminator.layers[:4](batch[0]))

    fit(module, federation(sizes=(20, 7)), rounds=2, algorithm=algorithm, callbacks=[Batches()])
    assert len(algorithm.seen) == len(expected) == 8
    for ours, theirs in zip(algorithm.seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"components": 2, "recentre": True}, {"step": "proximal"}], ids=str)
def test_resumed_it_goes_on_bit_by_bit(tmp_path, options):
    def algorithm() -> TiltedExpectationPropagation:
        return TiltedExpectationPropagation(FEATURES, hidden=4, weight=0.01, tilt_every=2, **options)

    module = TwoOptimizers()
    halfway, whole = copy.deepcopy(module), copy.deepcopy(module)
    fit(halfway, federation(clients_per_round=3), rounds=1, algorithm=algorithm()).save_checkpoint(tmp_path / "half")
    expected = fit(whole, federation(clients_per_round=3), rounds=2, algorithm=algorithm())
    trainer = fit(module, federation(clients_per_round=3), rounds=2, algorithm=algorithm(),
                  ckpt_path=tmp_path / "half")  # fmt: skip
    assert_same(module, whole, tolerance=0.0)
    for name, value in state_of(expected)["server"].items():
        assert torch.equal(state_of(trainer)["server"][name], value)
    assert torch.equal(state_of(trainer)["networks"], state_of(expected)["networks"])


def test_moments_that_are_none_and_features_that_do_not_exist_are_said():
    algorithm = TiltedExpectationPropagation(FEATURES, variant="printed", lr=0.1)
    with pytest.warns(UserWarning, match=r"% of the tilted coordinates have no printed moments: not tilted") as said:
        state = state_of(fit(TwoOptimizers(), federation(), rounds=2, algorithm=algorithm))
    assert len([w for w in said if "moments" in str(w.message)]) == 1
    assert 0 < float(state["server"]["tilted.left_out"]) <= 1
    with pytest.raises(UserError, match=r"TwoOptimizers has no submodule 'discriminator\.9'.*discriminator\.0, "):
        fit(TwoOptimizers(), federation(), algorithm=TiltedExpectationPropagation("discriminator.9"))
    module = TwoOptimizers()
    module.spare = nn.Linear(3, 2)
    with pytest.raises(UserError, match="makes no pass through the features 'spare'"):
        fit(module, federation(), rounds=1, algorithm=TiltedExpectationPropagation("spare"))


@pytest.mark.parametrize("argument", [
    {"components": 0}, {"hidden": -1}, {"weight": -1.0}, {"step": "adam"}, {"tilt_every": 0}, {"variant": "right"},
    {"terms": 7}, {"prior_variance": float("inf")}, {"spread": -1.0}, {"temperature": 0.0}, {"lr": float("nan")},
])  # fmt: skip
def test_arguments_out_of_range(argument):
    name = next(iter(argument))
    with pytest.raises(UserError, match=f"TiltedExpectationPropagation's {name} is .*; it must (be|lie in)"):
        TiltedExpectationPropagation(FEATURES, **argument)
