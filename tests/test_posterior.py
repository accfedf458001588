"""The Laplace posterior: its curvature, its densities, what it predicts, and the federation's as the pooled one."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian

from lit_epgan.bayes import posterior as bayes
from lit_epgan.bayes.posterior import GaussianPosterior, KroneckerBasis, curvature, predict
from lit_epgan.callbacks import PosteriorPredictive, PredictionWriter
from lit_epgan.callbacks.posterior_predictive import risk_by_coverage, scored
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import NormClipping, PlainFederation
from lit_epgan.federated import FedAvg, FedProx, LaplacePosterior
from lit_epgan.federated.bayesian import laplace
from lit_epgan.federated.bayesian.laplace import PRIORS, SCALES, STATE
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import Classifier, Regression
from tests.federations import fit

ROWS, WIDTH, CLASSES = 24, 4, 3


def records(seed: int = 0, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)).eval()


def named(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {name: p.detach() for name, p in module.named_parameters() if name.startswith(prefix)}


def test_a_last_layers_curvature_is_the_hessian_of_its_loss() -> None:
    """A softmax of a linear layer: Gauss-Newton's matrix is the Hessian, here by automatic differentiation."""
    module, (x, labels) = network().double(), records()
    last = named(module, "2.")

    def loss(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in last.values()])
        values = {name: part.view_as(p) for (name, p), part in zip(last.items(), parts, strict=True)}
        return nn.functional.cross_entropy(functional_call(module, values, (x.double(),)), labels, reduction="sum")

    exact: Any = hessian(loss)(torch.cat([p.flatten() for p in last.values()]))
    found = curvature(module, last, x.double(), "classification", diagonal=False)
    torch.testing.assert_close(found, exact, rtol=0, atol=1e-10)


def test_the_diagonal_is_that_of_the_whole_matrix_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module, (x, _) = network(), records()
    whole = curvature(module, named(module), x, "classification", diagonal=False)
    monkeypatch.setattr(bayes, "NUMBERS", 5 * CLASSES * len(whole))  # five records at once
    torch.testing.assert_close(curvature(module, named(module), x, "classification", True), whole.diagonal())
    torch.testing.assert_close(curvature(module, named(module), x, "classification", False), whole)


def in_axes(diagonal: Tensor, basis: KroneckerBasis) -> Tensor:
    """The whole matrix (m, m) of a diagonal in a basis."""
    turned = basis.back(torch.eye(len(diagonal), dtype=torch.float64))  # rows: the axes
    return turned.T @ (diagonal.unsqueeze(1) * turned)


def test_kronecker_axes_are_exact_for_a_record_and_an_output_and_nearer_than_the_parameters_own() -> None:
    module, (x, _) = network().double(), records()
    one = nn.Sequential(module[0], module[1], nn.Linear(5, 1).double())
    for model, rows, likelihood in ((one, x[:1].double(), "regression"), (module, x.double(), "classification")):
        values = named(model)
        whole = curvature(model, values, rows, likelihood, False)  # type: ignore[arg-type]
        factors = bayes.kronecker_factors(model, values, rows, likelihood)  # type: ignore[arg-type]
        basis = KroneckerBasis.of(factors, bayes.shapes_of(values))
        found = in_axes(curvature(model, values, rows, likelihood, True, basis), basis)  # type: ignore[arg-type]
        sizes = [p.numel() for p in values.values()]
        blocks = torch.block_diag(*(torch.ones(n, n) for n in sizes)).bool()
        far = [float((each - whole)[blocks].norm()) for each in (found, whole.diagonal().diag())]
        if likelihood == "regression":  # a tensor's curvature is one outer product
            assert far[0] < 1e-10 * float(whole.norm())
        else:
            assert far[0] < 0.5 * far[1]
        torch.testing.assert_close(found.trace(), whole.trace())
        read = KroneckerBasis.read(basis.vector, bayes.shapes_of(values))
        vectors = torch.randn(3, sum(sizes), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(read.back(basis.into(vectors)), vectors)


def test_a_posterior_in_other_axes_is_the_same_gaussian() -> None:
    module, (x, _) = network().double(), records()
    values = named(module)
    basis = KroneckerBasis.of(
        bayes.kronecker_factors(module, values, x.double(), "classification"), bayes.shapes_of(values)
    )
    mean, diagonal = torch.cat([p.flatten() for p in values.values()]), torch.rand(43, dtype=torch.float64)
    turned = GaussianPosterior(mean, diagonal, basis=basis)
    plain = GaussianPosterior(mean, in_axes(diagonal, basis))
    at = mean + torch.randn(2, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(turned.log_prob(at), plain.log_prob(at))
    jacobian = torch.randn(2, 3, 43, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(turned.covariance(jacobian), plain.covariance(jacobian))
    draws = turned.sample(100_000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(draws.T.cov(), plain.precision.inverse(), rtol=0, atol=0.02)


def test_density_and_draws_are_those_of_the_gaussian() -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(4, 4, dtype=torch.float64, generator=generator)
    mean = torch.randn(4, dtype=torch.float64, generator=generator)
    for found in (
        GaussianPosterior(mean, root @ root.T, 2.0, 1.5, 0.5),
        GaussianPosterior(mean, root.square().sum(0), 2.0, 1.5, 0.5),
    ):
        precision = found.curvature / 0.75
        precision = (precision if precision.dim() == 2 else precision.diag()) + 2 * torch.eye(4)
        torch_s = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
        at = torch.randn(3, 4, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(found.log_prob(at), torch_s.log_prob(at))
        jacobian = torch.randn(2, 3, 4, dtype=torch.float64, generator=generator)
        torch.testing.assert_close(found.covariance(jacobian), jacobian @ precision.inverse() @ jacobian.mT)
        draws = found.sample(200_000, generator)
        torch.testing.assert_close(draws.T.cov(), precision.inverse(), rtol=0.02, atol=0.005)
        torch.testing.assert_close(draws.mean(0), mean, rtol=0, atol=0.01)


def test_the_evidence_of_a_linear_regression_is_the_closed_form() -> None:
    """log N(y; 0, noise I + X X' / prior), at the mode of the posterior; Bishop 2006, equation 3.86."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, WIDTH, dtype=torch.float64, generator=generator)
    y = x @ torch.arange(WIDTH).double() + 0.3 * torch.randn(30, dtype=torch.float64, generator=generator)
    noise, prior = 0.09, 0.7
    precision = x.T @ x / noise + prior * torch.eye(WIDTH, dtype=torch.float64)
    mode = torch.linalg.solve(precision, x.T @ y / noise)
    log_likelihood = torch.distributions.Normal(x @ mode, math.sqrt(noise)).log_prob(y).sum()
    covariance = noise * torch.eye(30, dtype=torch.float64) + x @ x.T / prior
    exact = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), covariance).log_prob(y)
    found = GaussianPosterior(mode, x.T @ x, prior, noise=noise).log_evidence(float(log_likelihood))
    assert found == pytest.approx(float(exact), abs=1e-9)


def test_a_softmax_of_two_classes_is_the_integral_over_their_difference() -> None:
    """By Gauss-Hermite quadrature; the draws are 512, so that two digits are right."""
    means = torch.tensor([[0.0, 0.0], [1.0, -1.0], [3.0, 0.5]], dtype=torch.float64)
    covariances = torch.tensor([[4.0, 1.0], [1.0, 2.0]], dtype=torch.float64).expand(3, 2, 2)
    variance, (nodes, weights) = (
        4.0 + 2.0 - 2 * 1.0,
        map(torch.from_numpy, __import__("numpy").polynomial.hermite.hermgauss(80)),
    )
    logits = (means[:, 0] - means[:, 1]).unsqueeze(1) + math.sqrt(2 * variance) * nodes
    exact = (torch.sigmoid(logits) * weights).sum(1) / math.sqrt(math.pi)
    both = torch.special.entr(torch.sigmoid(logits)) + torch.special.entr(torch.sigmoid(-logits))
    found = predict(means, covariances)
    torch.testing.assert_close(found.probabilities[:, 0], exact, rtol=0, atol=0.02)
    torch.testing.assert_close(found.expected, (both * weights).sum(1) / math.sqrt(math.pi), rtol=0, atol=0.02)
    certain = predict(means, torch.zeros(3, 2, 2, dtype=torch.float64))
    torch.testing.assert_close(certain.probabilities, means.softmax(1))
    torch.testing.assert_close(certain.information, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_scores_and_risk_by_hand() -> None:
    p, labels = torch.tensor([[0.7, 0.3], [0.4, 0.6], [0.1, 0.9]]).double(), torch.tensor([0, 0, 1])
    found = {name: float(value) for name, value in scored(p, labels).items()}
    nll = -(math.log(0.7) + math.log(0.4) + math.log(0.9)) / 3
    assert found == pytest.approx({"nll": nll, "brier": (0.18 + 0.72 + 0.02) / 3, "accuracy": 2 / 3})
    assert risk_by_coverage(p, labels).tolist() == pytest.approx([0, 0, 1 / 3])  # the surest first


def few_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings to choose from, a fifth as many."""
    monkeypatch.setattr(laplace, "PRIORS", PRIORS[::3])
    monkeypatch.setattr(laplace, "SCALES", SCALES[::3])


class Deals:
    """Records of three classes, dealt to clients of different sizes; or all to one."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        x, labels = records(1)
        self.parts = list(zip(x.split(list(sizes)), labels.split(list(sizes)), strict=True))
        self.sizes = sizes

    def federation(self, **made: Any) -> PlainFederation:
        module = Classifier(nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh()), nn.Linear(5, CLASSES))
        torch.manual_seed(0)
        for p in module.parameters():
            nn.init.normal_(p)
        federation = PlainFederation(
            LaplacePosterior(**({"rounds": 1, "inner": FedAvg()} | made)),
            module.double(),
            lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
            lambda parameters: torch.optim.SGD(parameters, lr=0.0),
            self.batches,
            [float(n) for n in self.sizes],
        )
        federation.model.held_out = lambda client: self.batches(client, 0)
        return federation

    def batches(self, client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, labels = self.parts[client]
        return iter(list(zip(x.double().split(4), labels.split(4), strict=True)))


@pytest.mark.parametrize("structure", ["last_layer", "diagonal", "kronecker", "full"])
def test_the_federations_posterior_is_the_pooled_one(structure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over clients: curvature, evidence, and the settings that held-out records choose."""
    few_settings(monkeypatch)
    states = []
    for sizes in ((5, 16, 3), (24,)):
        federation = Deals(sizes).federation(structure=structure)
        federation.run(2)
        states.append(federation.server.state)
    assert states[0].keys() == states[1].keys()
    if structure == "kronecker":  # axes of equal eigenvalues are any: what they span together is compared
        for state in states:
            found = LaplacePosterior.posterior(state)
            state[STATE + "curvature"] = in_axes(state[STATE + "curvature"], found.basis)
            del state[STATE + "basis"]
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-10, atol=1e-10)


def test_the_setting_chosen_is_the_one_that_predicts_held_out_records_best() -> None:
    deals = Deals((5, 16, 3))
    federation = deals.federation()
    federation.run(2)
    state, module = federation.server.state, federation.module.eval()
    found = LaplacePosterior.posterior(state)
    x, labels = (torch.cat(part) for part in zip(*deals.parts, strict=True))
    uncertain = {name: p.detach() for name, p in module.named_parameters() if name.startswith("head.")}

    def loss(prior: float, scale: float) -> float:
        means, covariances = found.with_prior(prior).outputs(module, uncertain, x.double())
        p = predict(means / scale, covariances / scale**2, 64).probabilities
        return float(-p.gather(1, labels.unsqueeze(1)).log().sum())

    losses = {(prior, scale): loss(prior, scale) for prior in PRIORS for scale in SCALES}
    assert min(losses, key=losses.__getitem__) == (found.prior_precision, float(state[STATE + "scale"]))
    plain = {s: float(nn.functional.cross_entropy(module(x.double()) / s, labels)) for s in SCALES}
    assert min(plain, key=plain.__getitem__) == float(state[STATE + "plain_scale"])
    assert LaplacePosterior.posterior(state, by="evidence").prior_precision in PRIORS


def test_without_held_out_records_the_evidence_chooses() -> None:
    federation = Deals((5, 16, 3)).federation()
    federation.model.held_out = lambda client: iter(())
    federation.run(2)
    state = federation.server.state
    assert float(state[STATE + "prior_precision"]) == float(state[STATE + "evidence"])
    assert float(state[STATE + "scale"]) == float(state[STATE + "plain_scale"]) == 1


def test_the_rounds_before_are_the_inner_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rate above 0: the same model as the algorithm alone, and the last round leaves it alone."""
    few_settings(monkeypatch)
    ends = []
    for around in (True, False):
        federation = Deals((5, 16, 3)).federation(rounds=2, inner=FedProx(0.1))
        if not around:
            federation.federation.algorithm = federation.runner.algorithm = FedProx(0.1)
        federation.model.optimized[0].optimizer.param_groups[0]["lr"] = 0.1
        ends.append(federation.run(2 + around).clone())
    assert torch.equal(*ends)


def data(likelihood: str) -> FederatedDataModule:
    train, held = {}, {}
    for k in range(3):
        x, labels = records(k, 40)
        targets = labels if likelihood == "classification" else x @ torch.ones(WIDTH, 1) + 0.1 * labels.unsqueeze(1)
        train[f"site {k}"] = torch.utils.data.TensorDataset(x[:30], targets[:30])
        held[f"site {k}"] = torch.utils.data.TensorDataset(x[30:], targets[30:])
    return FederatedDataModule.from_datasets(train, 8, val_dataset=held, test_dataset=held)


@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_scores_are_logged_by_client_and_predictions_say_how_sure_they_are(
    likelihood: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fit, its checkpoint's test, and its predict: the scores by hand, the table's columns."""
    few_settings(monkeypatch)
    kind, width = (Classifier, CLASSES) if likelihood == "classification" else (Regression, 1)
    module = kind(nn.Linear(WIDTH, 5), nn.Linear(5, width), lambda p: torch.optim.SGD(p, lr=0.1))
    algorithm = LaplacePosterior(2, likelihood=likelihood)
    told, writer = PosteriorPredictive(), PredictionWriter()
    trainer = fit(module, data(likelihood), 3, tmp_path, algorithm=algorithm, callbacks=[told, writer])
    trainer.save_checkpoint(tmp_path / "last.ckpt", weights_only=False)
    (after,) = trainer.test(module, datamodule=data(likelihood), verbose=False)
    (loaded,) = trainer.test(module, datamodule=data(likelihood), ckpt_path=tmp_path / "last.ckpt", verbose=False)
    assert after == pytest.approx(loaded)
    assert {f"posterior/nll/client/site {k}" for k in range(3)} <= loaded.keys()
    by_client = [loaded[f"posterior/nll/client/site {k}"] for k in range(3)]
    assert loaded["posterior/nll"] == pytest.approx(sum(by_client) / 3)
    if likelihood == "classification":
        assert loaded["plain/nll"] == pytest.approx(loaded["cross_entropy"], abs=1e-5)
        assert loaded["plain/accuracy"] == pytest.approx(loaded["accuracy"])
        assert (tmp_path / "pictures" / "calibration.png").is_file()
        expected = [*(f"p_{k}" for k in range(CLASSES)), "entropy", "entropy_expected", "information", "unlike"]
    else:
        assert 0.8 < loaded["posterior/coverage"] <= 1
        expected = ["deviation_0"]
    trainer.predict(module, datamodule=data(likelihood), ckpt_path=tmp_path / "last.ckpt")
    with (tmp_path / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[-len(expected) :] == expected
    if likelihood == "classification":
        assert all(sum(float(row[f"p_{k}"]) for k in range(CLASSES)) == pytest.approx(1) for row in rows)
        assert all(0 <= float(row["entropy_expected"]) <= float(row["entropy"]) + 1e-9 for row in rows)


class Silent(Classifier):
    forward = nn.Module.forward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.head(self.backbone(batch[0])), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(WIDTH, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(1))[0][:, 0]


def test_what_cannot_be_is_said_in_a_sentence(tmp_path: Path) -> None:
    def run(module: Any, algorithm: Any, rounds: int = 2, **options: Any) -> Any:
        return fit(module, data("classification"), rounds=rounds, algorithm=algorithm, **options)

    def classifier(backbone: nn.Module | None = None, width: int = 5) -> Classifier:
        return Classifier(backbone or nn.Linear(WIDTH, width), nn.Linear(width, CLASSES))

    with pytest.raises(UserError, match="no trained parameters called top"):
        run(classifier(), LaplacePosterior(1, head="top"))
    with pytest.raises(UserError, match="choose last_layer or diagonal"):
        run(classifier(width=3000), LaplacePosterior(1, structure="full"))
    with pytest.raises(UserError, match="NormClipping would clip to nothing"):
        run(classifier(), LaplacePosterior(1), mechanism=NormClipping(1.0))
    with pytest.raises(UserError, match="Silent has no forward"):
        run(Silent(nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES)), LaplacePosterior(1))
    with pytest.raises(UserError, match="differentiated record by record"):
        run(classifier(Recurrent()), LaplacePosterior(1, structure="diagonal"))
    trainer = run(classifier(), LaplacePosterior(2), callbacks=[PosteriorPredictive()], folder=tmp_path)
    with pytest.raises(UserError, match="one round more than its rounds"):
        trainer.test(trainer.lightning_module, datamodule=data("classification"), verbose=False)
    with pytest.raises(UserError, match="needs the posterior of"):
        run(classifier(), FedAvg(), callbacks=[PosteriorPredictive()]).test(
            classifier(), datamodule=data("classification"), verbose=False
        )
