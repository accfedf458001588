"""Clients' own posteriors: against closed forms, their optimum, and what the Trainer logs of them."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.bayes.posterior import GaussianPosterior, predict
from lit_epgan.callbacks import PosteriorPredictive, posterior_predictive
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import PlainFederation
from lit_epgan.federated import FedAvg, LaplacePosterior
from lit_epgan.federated.bayesian import laplace
from lit_epgan.federated.bayesian.laplace import COLDNESS, OWN_PRECISIONS, SCALES, STATE
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import Classifier, Regression
from tests.federations import fit
from tests.test_posterior import CLASSES, WIDTH, Deals, data, few_settings, records

SIZES = (9, 4, 17)


@pytest.fixture(autouse=True)
def few_and_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    few_settings(monkeypatch)
    monkeypatch.setattr(posterior_predictive, "draw", lambda *_: torch.zeros(8, 8, 3, dtype=torch.uint8).numpy())


def linear(theta: Tensor, parts: list[tuple[Tensor, Tensor]], held: list[tuple[Tensor, Tensor]]) -> PlainFederation:
    module = nn.ModuleDict({"head": nn.Linear(WIDTH, 1, bias=False)}).double()
    module.forward = lambda x: module["head"](x)  # type: ignore[method-assign]
    module["head"].weight.data.copy_(theta)
    federation = PlainFederation(
        LaplacePosterior(1, FedAvg(), likelihood="regression", personal=True),
        module,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        lambda client, round_: zip(*(t.split(4) for t in parts[client]), strict=True),
        [float(len(x)) for x, _ in parts],
    )
    federation.model.held_out = lambda client: iter([held[client]])
    federation.run(2)
    return federation


def regressions(seed: int, sizes: tuple[int, ...] = SIZES) -> list[tuple[Tensor, Tensor]]:
    """Of each client, whose line is another one."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k, n in enumerate(sizes):
        x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
        y = x @ torch.full((WIDTH, 1), 1 + 0.3 * k).double() + torch.randn(n, 1, generator=generator).double()
        found.append((x, y))
    return found


def owns(federation: PlainFederation) -> list[GaussianPosterior]:
    clients, state = federation.federation.private.clients, federation.server.state
    return [LaplacePosterior.posterior(state, own=clients[f"client-{k}"].algorithm) for k in range(len(clients))]


def test_in_a_linear_model_it_is_the_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others' posterior, as far from the client as clients are from one another, and then the client's records: at
    the federation's mode, with the precision and the temperature that predict held-out records best."""
    parts, held, penalty = regressions(0), regressions(1), 3.0
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    eye = torch.eye(WIDTH, dtype=torch.float64)
    theta = torch.linalg.solve(x.T @ x + penalty * eye, x.T @ y)
    noise = float((y - x @ theta).square().mean())
    monkeypatch.setattr(laplace, "PRIORS", (penalty / noise,))
    federation = linear(theta.T, parts, held)
    state = federation.server.state
    chosen = tuple(float(state[STATE + name]) for name in ("own_precision", "own_temperature"))
    assert OWN_PRECISIONS[-1] < chosen[0] < OWN_PRECISIONS[0]
    losses = dict.fromkeys(itertools.product(OWN_PRECISIONS, COLDNESS), 0.0)
    for k, found in enumerate(owns(federation)):
        own_x, own_y = parts[k]
        others = (x.T @ x - own_x.T @ own_x + penalty * eye) / noise
        center = torch.linalg.solve(others, (x.T @ y - own_x.T @ own_y) / noise)
        for alike, cold in losses:
            prior = (others.inverse() + eye / alike).inverse()
            precision = (prior + own_x.T @ own_x / noise) / cold
            mean = torch.linalg.solve(precision * cold, prior @ center + own_x.T @ own_y / noise)
            if (alike, cold) == chosen:
                torch.testing.assert_close(found.mean, mean.flatten(), rtol=0, atol=1e-10)
                torch.testing.assert_close(found.precision, precision, rtol=1e-10, atol=1e-10)
            at, targets = held[k]
            variance = ((at @ precision.inverse()) * at).sum(1, keepdim=True) + noise
            losses[alike, cold] -= float(torch.distributions.Normal(at @ mean, variance.sqrt()).log_prob(targets).sum())
    assert min(losses, key=losses.__getitem__) == chosen


def test_where_clients_are_alike_it_is_the_federations_and_nothing_counts_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the model is not at the mode."""
    monkeypatch.setattr(laplace, "OWN_PRECISIONS", (1e15,))
    monkeypatch.setattr(laplace, "COLDNESS", (1.0,))
    federation = linear(torch.ones(1, WIDTH), regressions(0), regressions(1))
    common = LaplacePosterior.posterior(federation.server.state)
    for found in owns(federation):
        torch.testing.assert_close(found.mean, common.mean, rtol=0, atol=1e-9)
        torch.testing.assert_close(found.precision, common.precision, rtol=1e-9, atol=1e-9)


def test_of_a_softmax_it_is_around_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laplace, "OWN_PRECISIONS", (10.0, 1.0))
    deals = Deals((5, 16, 3))
    federation = deals.federation(personal=True)
    federation.run(2)
    state, module = federation.server.state, federation.module.eval()
    common, cold = LaplacePosterior.posterior(state), float(state[STATE + "own_temperature"])
    eye = torch.eye(len(common.mean), dtype=torch.float64)
    for k, found in enumerate(owns(federation)):
        x, labels = deals.parts[k]
        features = nn.functional.pad(module.backbone(x.double()), (0, 1), value=1.0).detach()

        def loss(flat: Tensor, features: Tensor = features, labels: Tensor = labels) -> Tensor:
            w = torch.cat([flat[: 5 * CLASSES].view(CLASSES, 5), flat[5 * CLASSES :].unsqueeze(1)], 1)
            return nn.functional.cross_entropy(features @ w.T, labels, reduction="sum")

        site: Any = torch.func.hessian(loss)(common.mean)
        pull: Any = torch.func.grad(loss)(common.mean)
        slope: Any = torch.func.grad(loss)(found.mean)
        others = common.precision - site
        shrunk = (eye + others / float(state[STATE + "own_precision"])).inverse()
        optimum = slope + others @ shrunk @ (found.mean - common.mean) - shrunk @ pull
        torch.testing.assert_close(optimum, torch.zeros_like(optimum), rtol=0, atol=1e-8)
        exact: Any = torch.func.hessian(loss)(found.mean)
        torch.testing.assert_close(found.precision * cold, others @ shrunk + exact, rtol=0, atol=1e-8)


def test_without_held_out_records_clients_are_alike() -> None:
    federation = Deals((5, 16, 3)).federation(personal=True)
    federation.model.held_out = lambda client: iter(())
    federation.run(2)
    state = federation.server.state
    found = [float(state[STATE + name]) for name in ("own_precision", "own_temperature", "own_scale")]
    assert found == [OWN_PRECISIONS[0], 1, 1]


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_trainer_scores_each_client_by_its_own(
    likelihood: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laplace, "OWN_PRECISIONS", (10.0, 1.0))
    torch.manual_seed(0)
    kind, width = (Classifier, CLASSES) if likelihood == "classification" else (Regression, 1)
    module = kind(nn.Linear(WIDTH, 5), nn.Linear(5, width), lambda p: torch.optim.SGD(p, lr=0.1))
    algorithm, told = LaplacePosterior(2, likelihood=likelihood, personal=True), PosteriorPredictive()
    trainer = fit(module, data(likelihood), 3, tmp_path, algorithm=algorithm, callbacks=[told])
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    (after,) = trainer.test(module, datamodule=data(likelihood), verbose=False)
    (loaded,) = trainer.test(module, datamodule=data(likelihood), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert after == pytest.approx(loaded)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]
    held = next(each for each in saved.values() if "server" in each)
    for k in range(3):
        own = algorithm.posterior(held["server"], own=held["clients"][f"site {k}"]["algorithm"])
        x, targets = (part[30:] for part in records(k, 40))
        targets = targets if likelihood == "classification" else x @ torch.ones(WIDTH, 1) + 0.1 * targets.unsqueeze(1)
        head = {"head.weight": own.mean[: 5 * width].view(width, 5), "head.bias": own.mean[5 * width :]}
        means, covariances = own.outputs(module.double(), head, x.double())
        if likelihood == "classification":
            scale = float(held["server"][STATE + "own_scale"])
            assert scale in SCALES
            p = predict(means / scale, covariances / scale**2).probabilities
            nll = -float(p.gather(1, targets.unsqueeze(1)).log().mean())
        else:
            variance = covariances[:, :, 0] + own.noise
            nll = -float(torch.distributions.Normal(means, variance.sqrt()).log_prob(targets.double()).mean())
        assert loaded[f"personal/nll/client/site {k}"] == pytest.approx(nll, abs=1e-5)
    assert math.isfinite(loaded["personal/nll"])


def test_what_cannot_be_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="are the last layer's, not diagonal"):
        LaplacePosterior(1, structure="diagonal", personal=True)
    module = Classifier(nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES))
    algorithm = LaplacePosterior(1)
    trainer = fit(module, data("classification"), 2, tmp_path, algorithm=algorithm, callbacks=[PosteriorPredictive()])
    algorithm.personal = True
    with pytest.raises(UserError, match="no client's own posterior"):
        trainer.test(module, datamodule=data("classification"), verbose=False)
    monkeypatch.setattr(laplace, "OWN_PRECISIONS", (1.0,))
    algorithm = LaplacePosterior(1, personal=True)
    trainer = fit(module, data("classification"), 2, tmp_path, algorithm=algorithm, callbacks=[PosteriorPredictive()])
    pooled = FederatedDataModule.from_datasets(
        {"site 0": TensorDataset(*records())}, 8, test_dataset=TensorDataset(*records())
    )
    with pytest.warns(UserWarning, match="the test records are nobody's"):
        (found,) = trainer.test(module, datamodule=pooled, verbose=False)
    assert "posterior/nll" in found
    assert "personal/nll" not in found
