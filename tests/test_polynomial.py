"""The FedNP paper's toy: its points, the regression module, and expectation propagation that is exact at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks.curve_fit import CurveFit
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.toy import PolynomialDataModule
from lit_epgan.engine import Algorithm, Rounds, Server
from lit_epgan.errors import UserError
from lit_epgan.federated import MOON, ConjugateEP, FedAvg, FedNP
from lit_epgan.modules.supervised import Regression
from lit_epgan.networks.mlp import PolynomialFeatures
from tests.federations import fit
from tests.modules import Regression as TwoLayers


def cubic(lr: float = 0.01) -> Regression:
    head = nn.Linear(4, 1, bias=False)
    return Regression(PolynomialFeatures(3), head, lambda parameters: torch.optim.RMSprop(parameters, lr=lr))


def toy(seed: int = 3, **options: Any) -> PolynomialDataModule:
    return PolynomialDataModule(batch_size=10, data_seed=None, seed=seed, **options)


def least_squares(data: FederatedDataModule) -> tuple[np.ndarray, float]:
    """The cubic of least squared error on all points, and that error."""
    x, y = (t.double().numpy()[:, 0] for t in data.data.val.tensors)
    w = np.polynomial.Polynomial.fit(x, y, 3).convert().coef[::-1]
    return w, float(np.mean((np.polyval(w, x) - y) ** 2))


def error(module: Regression, data: FederatedDataModule) -> float:
    x, y = (t.double() for t in data.data.val.tensors)
    return float((module.double()(x) - y).square().mean())


# ---------------------------------------------------------------- the points


def test_the_points_are_those_of_the_paper() -> None:
    data = toy(noise_variance=0.0).data
    x = [d.tensors[0][:, 0] for d in data.train.values()]
    assert [len(own) for own in x] == [30, 20, 50]
    assert [(float(own.min()), float(own.max())) for own in x] == [(-7, -5), (-2, 2), (4, 8)]
    for own in x:
        assert torch.allclose(own.diff(), own.diff()[:1], atol=1e-5)
    for own_x, own_y in (d.tensors for d in data.train.values()):
        torch.testing.assert_close(own_y, -(own_x**2) + 2 * own_x + 4)


def test_the_noise_has_its_variance_and_follows_the_seed() -> None:
    def noise(seed: int) -> Tensor:
        x, y = toy(seed).data.val.tensors
        return y + x**2 - 2 * x - 4

    drawn = torch.cat([noise(seed) for seed in range(40)])
    assert float(drawn.var()) == pytest.approx(25, rel=4 * (2 / 4000) ** 0.5)
    assert float(drawn.mean()) == pytest.approx(0, abs=4 * 5 / 4000**0.5)
    assert not torch.equal(noise(0), noise(1))
    assert torch.equal(toy(0).data.val.tensors[1], PolynomialDataModule(data_seed=0, seed=5).data.val.tensors[1])


@pytest.mark.parametrize("partition", ["iid", "pooled"])
def test_other_partitions_deal_out_the_same_points(partition: Any) -> None:
    def points(data: PolynomialDataModule) -> list[list[float]]:
        return sorted(torch.cat([torch.cat(d.tensors, 1) for d in data.data.train.values()]).tolist())

    dealt = toy(partition=partition)
    assert points(dealt) == points(toy())
    assert [len(d) for d in dealt.data.train.values()] == ([30, 20, 50] if partition == "iid" else [100])


def test_fewer_clients_have_fewer_points() -> None:
    data = toy(clients=2).data
    assert [len(d) for d in (*data.train.values(), data.val)] == [30, 20, 50]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"clients": 4}, "not 4"), ({"noise_variance": -1.0}, "noise_variance"), ({"partition": "natural"}, "natural")],
)
def test_mistakes_in_the_data(options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        toy(**options)


def test_polynomial_features() -> None:
    assert PolynomialFeatures(3)(torch.tensor([[2.0], [-1.0]])).tolist() == [[8, 4, 2, 1], [-1, 1, -1, 1]]
    with pytest.raises(UserError, match="degree is -1"):
        PolynomialFeatures(-1)


# ---------------------------------------------------------------- conjugate sites


@pytest.mark.parametrize("precision", ["64-true", "32-true"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_conjugate_sites_are_at_the_least_squares_floor_after_one_round(seed: int, precision: Any) -> None:
    data, module = toy(seed, local_steps=1), cubic()
    fit(module, data, 1, algorithm=ConjugateEP(), precision=precision)
    w, floor = least_squares(data)
    exact = precision == "64-true"
    assert error(module, data) == pytest.approx(floor, rel=1e-9 if exact else 1e-3)
    if exact:
        np.testing.assert_allclose(module.head.weight.detach()[0].numpy(), w, rtol=1e-6, atol=1e-6)


def test_later_rounds_change_nothing() -> None:
    data, module = toy(local_steps=1), cubic()
    fit(module, data, 3, algorithm=ConjugateEP())
    assert error(module, data) == pytest.approx(least_squares(data)[1], rel=1e-9)


def test_cohorts_fill_the_product_and_absent_clients_stay_in_it() -> None:
    """One of three clients a round: the floor is reached when the last one has reported, and kept."""
    data, module = toy(clients_per_round=1, local_steps=1), cubic()
    fit(module, data, 12, algorithm=ConjugateEP())
    assert {k for round_ in range(12) for k in data.cohort(round_)} == {0, 1, 2}
    assert error(module, data) == pytest.approx(least_squares(data)[1], rel=1e-9)


def test_the_posterior_of_bayesian_linear_regression() -> None:
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


def test_sites_of_a_loss_that_is_not_quadratic_are_refused() -> None:
    sets = [TensorDataset(torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))]
    data = FederatedDataModule.from_datasets(sets, batch_size=3)
    with pytest.raises(UserError, match="not quadratic"):
        fit(TwoLayers(), data, 1, algorithm=ConjugateEP())


def test_too_few_records_are_refused_and_a_prior_helps() -> None:
    sets = [TensorDataset(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [2.0]]))]
    data = FederatedDataModule.from_datasets(sets, batch_size=2)
    with pytest.raises(UserError, match="prior_precision"):
        fit(cubic(), data, 1, algorithm=ConjugateEP())
    fit(cubic(), FederatedDataModule.from_datasets(sets, batch_size=2), 1, algorithm=ConjugateEP(prior_precision=1e-3))


@pytest.mark.parametrize("options", [{"prior_precision": -1.0}, {"temperature": 0.0}])
def test_mistakes_in_conjugate_ep(options: Any) -> None:
    with pytest.raises(UserError, match="prior_precision >= 0 and temperature > 0"):
        ConjugateEP(**options)


def test_a_large_module_is_referred_to_diagonal_sites() -> None:
    module = Regression(PolynomialFeatures(3), nn.Linear(4, 300))
    with pytest.raises(UserError, match="1500 parameters, more than 1000"):
        fit(module, toy(), 1, algorithm=ConjugateEP())


# ---------------------------------------------------------------- the module under other algorithms, and the picture


def test_gradients_are_cleared_in_every_step() -> None:
    """The published script never does; two rounds with one batch a client are two plain steps from there."""
    sets = [TensorDataset(torch.full((4, 1), 2.0), torch.ones(4, 1))]
    module = Regression(PolynomialFeatures(1), nn.Linear(2, 1, bias=False), lambda p: torch.optim.SGD(p, lr=0.01))
    w = module.head.weight.detach().double().clone()
    fit(module, FederatedDataModule.from_datasets(sets, batch_size=4), 2, algorithm=FedAvg())
    features = torch.tensor([2.0, 1.0]).double()
    for _ in range(2):
        w = w - 0.01 * 2 * (w @ features - 1) * features
    torch.testing.assert_close(module.head.weight.detach().double(), w)


@pytest.mark.parametrize("algorithm", [FedNP("backbone", "head"), FedNP("backbone", "head", moments="quadrature")])
def test_the_names_of_the_submodules_are_what_fednp_asks_for(algorithm: Algorithm) -> None:
    data, module = toy(), cubic()
    fit(module, data, 2, algorithm=algorithm)
    assert np.isfinite(error(module, data))


def test_moon_is_fedavg_where_the_representation_has_nothing_to_train() -> None:
    modules = []
    for algorithm in (FedAvg(), MOON("backbone", mu=5.0)):
        seed_everything(0, verbose=False)
        modules.append(cubic())
        fit(modules[-1], toy(), 3, algorithm=algorithm)
    assert torch.equal(modules[0].head.weight, modules[1].head.weight)


def test_the_picture_shows_every_clients_last_model_and_the_servers(tmp_path: Path, monkeypatch: Any) -> None:
    seen: list[tuple[dict[str, Tensor], Tensor]] = []
    original = __import__("lit_epgan.callbacks.curve_fit", fromlist=["draw"]).draw

    def draw(points: Any, line: Tensor, local: dict[str, Tensor], server: Tensor, title: str) -> Any:
        seen.append((dict(local), server))
        return original(points, line, local, server, title)

    monkeypatch.setattr("lit_epgan.callbacks.curve_fit.draw", draw)
    fit(cubic(0.1), toy(), 2, tmp_path, algorithm=FedAvg(), callbacks=[CurveFit()])
    assert (tmp_path / "pictures" / "curves.png").is_file()
    local, server = seen[-1]
    mean = sum(n * local[f"client-{k}"] for k, n in enumerate((30, 20, 50))) / 100  # the model is linear, so is FedAvg
    torch.testing.assert_close(server, mean, rtol=1e-4, atol=1e-3)
    assert not torch.allclose(local["client-0"], local["client-2"], rtol=1e-2)


def test_the_picture_of_other_data_is_refused() -> None:
    sets = [TensorDataset(torch.randn(9, 3, dtype=torch.float64), torch.randn(9, 1, dtype=torch.float64))]
    data = FederatedDataModule.from_datasets(sets, batch_size=3)
    with pytest.raises(UserError, match="points \\(x, y\\) on a line"):
        fit(TwoLayers(), data, 1, algorithm=FedAvg(), callbacks=[CurveFit()])
