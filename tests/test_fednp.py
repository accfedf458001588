"""FedNP: its loss by hand, its sites, and what it needs of a module."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.bayes.gaussian import GaussianFactor, factor_of, own_site
from lit_epgan.bayes.tilted import tilted_moments_quadrature
from lit_epgan.callbacks.classifier_prior import ClassifierPrior, projected
from lit_epgan.callbacks.curve_fit import CurveFit
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.toy import PolynomialDataModule
from lit_epgan.engine import Algorithm, Broadcast, Client, Rounds, Server
from lit_epgan.federated import ConjugateEP, FedAvg, FedNP
from lit_epgan.federated.bayesian.fednp import Q, kl_from_standard_normal
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.supervised import Regression
from lit_epgan.networks.mlp import PolynomialFeatures
from tests.federations import assert_resumes, federation, fit
from tests.modules import Regression as TwoLayers
from tests.plain_federation import federated
from tests.refusals import assert_refused


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 1)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def ended(algorithm: Algorithm, rounds: int) -> Classifier:
    module = Classifier().double()
    federated(module, federation(), algorithm).run(rounds)
    return module


class Watching(FedNP):
    def __init__(self, **options) -> None:
        super().__init__("backbone", "head", **{"latent": 4, "hidden": 5, **options})
        self.sites: dict[int, GaussianFactor] = {}
        self.losses: list[tuple[float, float]] = []

    def train(self, client: Client, sent: Broadcast) -> FedNP.Report:
        fit, q = client.fit, factor_of(sent, Q)
        cavity = q / own_site(client.state, q.precision, Q)

        def watched(start: Tensor, *, loss, **told) -> None:
            def extra() -> Tensor | None:
                features, found = self.caught._caught, loss()
                if found is not None and features is not None:
                    self.losses.append((float(found), self._by_hand(client, cavity, features.detach())))
                return found

            fit(start, loss=extra, **told)

        client.fit = watched
        report = super().train(client, sent)
        self.sites[client.index] = own_site(client.state, q.precision, Q)
        return report

    def _by_hand(self, client: Client, cavity: GaussianFactor, features: Tensor) -> float:
        """The loss once more, with the moments by quadrature and everything else coordinate by coordinate."""
        head = client.module.head
        f = float((features @ self.tilt.weight.T + self.tilt.bias).mean())
        _, mean, variance = tilted_moments_quadrature(cavity.mean, cavity.variance, torch.tensor(f).double())
        mu, sigma_squared = self.network(mean, variance)
        w = [*head.weight.flatten().tolist(), *head.bias.tolist()]
        terms = [(a - float(m)) ** 2 / (2 * float(s)) for a, m, s in zip(w, mu, sigma_squared, strict=True)]
        if self.normalised:
            terms = [t + 0.5 * math.log(float(s)) for t, s in zip(terms, sigma_squared, strict=True)]
        kl = sum(0.5 * (float(s) + float(m) ** 2 - 1 - math.log(float(s))) for m, s in zip(mean, variance, strict=True))
        return self.weight * (sum(terms) / len(terms) + kl)

    def round(self, server: Server) -> Rounds:
        yield from super().round(server)
        product = GaussianFactor(torch.ones(self.latent).double(), torch.zeros(self.latent).double())
        for site in self.sites.values():
            product = product * site
        torch.testing.assert_close(self.posterior(server).precision, product.precision)
        torch.testing.assert_close(self.posterior(server).precision_mean, product.precision_mean)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_loss_by_hand_and_q_is_the_prior_times_the_sites(normalised):
    algorithm = Watching(weight=0.3, normalised=normalised, terms=6)
    ended(algorithm, 3)
    assert len(algorithm.losses) > 20
    for found, expected in algorithm.losses:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_kl_against_torchs_and_agreement_of_quadrature_and_closed_form():
    mean, variance = torch.randn(5).double(), torch.rand(5).double() + 0.1
    normal = torch.distributions.Normal(mean, variance.sqrt())
    standard = torch.distributions.Normal(torch.zeros(5).double(), torch.ones(5).double())
    torch.testing.assert_close(
        kl_from_standard_normal(mean, variance), torch.distributions.kl_divergence(normal, standard).sum()
    )
    ends = []
    for moments in ("closed-form", "quadrature"):
        module = ended(FedNP("backbone", "head", moments=moments, terms=6, weight=0.1), 2)
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-5, msg=name)
    ends = []
    for algorithm in (FedAvg(), FedNP("backbone", "head", weight=0.0)):
        ends.append(ended(algorithm, 2).state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, msg=name)


def test_f_and_the_network_are_trained_and_cavities_differ():
    algorithm = Watching(weight=1.0, lr=0.05)
    before: dict[str, Tensor] = {}
    build = algorithm.build

    def remembered(module: nn.Module, seed: int) -> nn.ModuleDict:
        networks = build(module, seed)
        before.update({name: p.detach().double().clone() for name, p in networks.named_parameters()})
        return networks

    algorithm.build = remembered
    ended(algorithm, 3)
    now = dict(nn.ModuleDict({"tilt": algorithm.tilt, "network": algorithm.network}).named_parameters())
    for name, value in before.items():
        assert not torch.equal(now[name].detach(), value), name
    first, *others = algorithm.sites.values()
    assert all((first.precision_mean - other.precision_mean).abs().max() > 1e-4 for other in others)


def test_a_resumed_run_ends_at_the_same_bytes(tmp_path):
    assert_resumes(Classifier, federation, lambda: FedNP("backbone", "head"), tmp_path)


def test_a_users_mistakes():
    for options, said in (
        ({"latent": 0}, "latent is 0"),
        ({"moments": "exact"}, "closed-form or quadrature"),
        ({"weight": -1.0}, "weight is -1.0"),
        ({"terms": 7}, "FedNP.s terms is 7; it must lie in"),
    ):
        assert_refused(said, FedNP, "backbone", "head", **options)
    with pytest.raises(UserError, match="no submodule 'hed' with parameters: choose one of backbone"):
        fit(Classifier(), federation(), 1, algorithm=FedNP("backbone", "hed"))


class Digits(LightningModule):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, classes)

    def training_step(self, batch, batch_idx: int) -> Tensor:
        labels = batch[0].argmax(1).clamp(max=self.head.out_features - 1)
        return F.cross_entropy(self.head(self.backbone(batch[0])), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_what_is_predicted_is_the_networks_of_q(tmp_path):

    class Predicting(Watching):
        def round(self, server: Server) -> Rounds:
            yield from super().round(server)
            q, (mu, variance) = self.posterior(server), self.predicted(server)
            expected = self.network(q.precision_mean / q.precision, 1 / q.precision)
            torch.testing.assert_close((mu, variance), tuple(t.detach() for t in expected))
            assert mu.shape == (4 * 6 + 4,)
            assert bool((variance > 0).all())

    fit(Digits(), federation(), 2, tmp_path, algorithm=Predicting(), callbacks=[ClassifierPrior()])
    assert (tmp_path / "pictures" / "classifier_prior.png").is_file()


def test_the_projection_keeps_distances_in_its_plane_and_covariances_by_hand():
    """Five classes whose weights lie in the first two of four coordinates."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.zeros(5, 4, dtype=torch.float64)
    weights[:, :2] = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    variance = torch.rand(5, 4, generator=generator, dtype=torch.float64)
    points, means, covariances = projected(weights, weights + 0.1, variance)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(weights, weights))
    torch.testing.assert_close((means - points).norm(dim=1), torch.full((5,), 0.1 * 2**0.5, dtype=torch.float64))
    turned = torch.linalg.eigvalsh(covariances)  # a turn of the plane keeps eigenvalues
    torch.testing.assert_close(turned, variance[:, :2].sort(1).values)


def test_pictures_of_other_modules_and_data_are_refused():
    for module, algorithm, said in (
        (Digits(), FedAvg(), "what FedNP predicts"),
        (Digits(2), FedNP("backbone", "head"), "three classes or more"),
    ):
        assert_refused(said, fit, module, federation(), 1, algorithm=algorithm, callbacks=[ClassifierPrior()])
    sets = [TensorDataset(torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))]
    data = FederatedDataModule.from_datasets(sets, batch_size=3)
    assert_refused("points \\(x, y\\) on a line", fit, TwoLayers(), data, 1, algorithm=FedAvg(), callbacks=[CurveFit()])


def cubic(lr: float = 0.01) -> Regression:
    head = nn.Linear(4, 1, bias=False)
    return Regression(PolynomialFeatures(3), head, lambda parameters: torch.optim.RMSprop(parameters, lr=lr))


def toy(seed: int = 3, **options) -> PolynomialDataModule:
    return PolynomialDataModule(batch_size=10, data_seed=None, seed=seed, **options)


def least_squares(data: FederatedDataModule) -> tuple[np.ndarray, float]:
    x, y = (t.double().numpy()[:, 0] for t in data.data.val.tensors)
    w = np.polynomial.Polynomial.fit(x, y, 3).convert().coef[::-1]
    return w, float(np.mean((np.polyval(w, x) - y) ** 2))


def error(module: Regression, data: FederatedDataModule) -> float:
    x, y = (t.double() for t in data.data.val.tensors)
    return float((module.double()(x) - y).square().mean())


def test_the_points_are_those_of_the_paper():
    data = toy(noise_variance=0.0).data
    x = [d.tensors[0][:, 0] for d in data.train.values()]
    assert [len(own) for own in x] == [30, 20, 50]
    assert [(float(own.min()), float(own.max())) for own in x] == [(-7, -5), (-2, 2), (4, 8)]
    for own in x:
        assert torch.allclose(own.diff(), own.diff()[:1], atol=1e-5)
    for own_x, own_y in (d.tensors for d in data.train.values()):
        torch.testing.assert_close(own_y, -(own_x**2) + 2 * own_x + 4)
    data = toy(clients=2).data
    assert [len(d) for d in (*data.train.values(), data.val)] == [30, 20, 50]
    assert PolynomialFeatures(3)(torch.tensor([[2.0], [-1.0]])).tolist() == [[8, 4, 2, 1], [-1, 1, -1, 1]]
    assert_refused("degree is -1", PolynomialFeatures, -1)


def test_the_noise_has_its_variance_and_follows_the_seed():
    def noise(seed: int) -> Tensor:
        x, y = toy(seed).data.val.tensors
        return y + x**2 - 2 * x - 4

    drawn = torch.cat([noise(seed) for seed in range(40)])
    assert float(drawn.var()) == pytest.approx(25, rel=4 * (2 / 4000) ** 0.5)
    assert float(drawn.mean()) == pytest.approx(0, abs=4 * 5 / 4000**0.5)
    assert not torch.equal(noise(0), noise(1))
    assert torch.equal(toy(0).data.val.tensors[1], PolynomialDataModule(data_seed=0, seed=5).data.val.tensors[1])


@pytest.mark.parametrize("partition", ["iid", "pooled"])
def test_other_partitions_deal_out_the_same_points(partition):
    def points(data: PolynomialDataModule) -> list[list[float]]:
        return sorted(torch.cat([torch.cat(d.tensors, 1) for d in data.data.train.values()]).tolist())

    dealt = toy(partition=partition)
    assert points(dealt) == points(toy())
    assert [len(d) for d in dealt.data.train.values()] == ([30, 20, 50] if partition == "iid" else [100])


@pytest.mark.parametrize(
    ("options", "said"),
    [({"clients": 4}, "not 4"), ({"noise_variance": -1.0}, "noise_variance"), ({"partition": "natural"}, "natural")],
)
def test_mistakes_in_the_data(options, said):
    assert_refused(said, toy, **options)


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_conjugate_sites_are_at_the_least_squares_floor_after_one_round(seed, precision):
    data, module = toy(seed, local_steps=1), cubic()
    fit(module, data, 1, algorithm=ConjugateEP(), precision=precision)
    w, floor = least_squares(data)
    exact = precision == "64-true"
    assert error(module, data) == pytest.approx(floor, rel=1e-9 if exact else 1e-3)
    if exact:
        np.testing.assert_allclose(module.head.weight.detach()[0].numpy(), w, rtol=1e-6, atol=1e-6)


def test_later_rounds_change_nothing_and_absent_clients_stay_in_the_product():
    data, module = toy(local_steps=1), cubic()
    fit(module, data, 3, algorithm=ConjugateEP())
    assert error(module, data) == pytest.approx(least_squares(data)[1], rel=1e-9)
    # one of three clients a round: the floor is reached when the last one has reported, and kept
    data, module = toy(clients_per_round=1, local_steps=1), cubic()
    fit(module, data, 12, algorithm=ConjugateEP())
    assert {k for round_ in range(12) for k in data.cohort(round_)} == {0, 1, 2}
    assert error(module, data) == pytest.approx(least_squares(data)[1], rel=1e-9)


def test_the_posterior_of_bayesian_linear_regression():
    """Mean and covariance (X'X / s + p I)^-1 of all records together, with noise of variance s = 25 and a prior."""

    class Watching(ConjugateEP):
        def round(self, server: Server) -> Rounds:
            yield from super().round(server)
            self.q = self.posterior(server)

    seed_everything(1, verbose=False)
    data, module, algorithm = toy(local_steps=1), cubic(), Watching(prior_precision=2.0, temperature=2 * 25.0)
    initial = module.head.weight.detach().double()[0].numpy().copy()
    fit(module, data, 2, algorithm=algorithm)
    x, y = (t.double().numpy()[:, 0] for t in data.data.val.tensors)
    features = np.vander(x, 4)
    precision = features.T @ features / 25 + 2 * np.eye(4)
    mean = np.linalg.solve(precision, features.T @ y / 25 + 2 * initial)
    np.testing.assert_allclose(algorithm.q.mean.numpy(), mean, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(algorithm.q.covariance.numpy(), np.linalg.inv(precision), rtol=1e-6, atol=1e-10)


def test_sites_that_cannot_be_are_refused():
    for options in ({"prior_precision": -1.0}, {"temperature": 0.0}):
        assert_refused("prior_precision >= 0 and temperature > 0", ConjugateEP, **options)
    sets = [TensorDataset(torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))]
    data = FederatedDataModule.from_datasets(sets, batch_size=3)
    assert_refused("not quadratic", fit, TwoLayers(), data, 1, algorithm=ConjugateEP())
    module = Regression(PolynomialFeatures(3), nn.Linear(4, 300))
    assert_refused("1500 parameters, more than 1000", fit, module, toy(), 1, algorithm=ConjugateEP())
    sets = [TensorDataset(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))]
    data = FederatedDataModule.from_datasets(sets, batch_size=2)
    assert_refused("prior_precision", fit, cubic(), data, 1, algorithm=ConjugateEP())
    fit(cubic(), FederatedDataModule.from_datasets(sets, batch_size=2), 1, algorithm=ConjugateEP(prior_precision=1e-3))


def test_the_picture_shows_every_clients_last_model_and_the_servers(tmp_path, monkeypatch):
    seen: list[tuple[dict[str, Tensor], Tensor]] = []
    original = __import__("lit_epgan.callbacks.curve_fit", fromlist=["draw"]).draw

    def draw(points, line: Tensor, local: dict[str, Tensor], server: Tensor, title: str):
        seen.append((dict(local), server))
        return original(points, line, local, server, title)

    monkeypatch.setattr("lit_epgan.callbacks.curve_fit.draw", draw)
    fit(cubic(0.1), toy(), 2, tmp_path, algorithm=FedAvg(), callbacks=[CurveFit()])
    assert (tmp_path / "pictures" / "curves.png").is_file()
    local, server = seen[-1]
    mean = sum(n * local[f"client-{k}"] for k, n in enumerate((30, 20, 50))) / 100  # the model is linear, so is FedAvg
    torch.testing.assert_close(server, mean, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(local["client-0"], local["client-2"], rtol=1e-2)
