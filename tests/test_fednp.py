"""FedNP: its loss by hand, its sites, and what it needs of a module."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lit_epgan.bayes.gaussian import GaussianFactor
from lit_epgan.bayes.tilted import tilted_moments_quadrature
from lit_epgan.callbacks.classifier_prior import ClassifierPrior, projected
from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.engine import Algorithm, Broadcast, Client, Rounds, Server
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg, FedNP
from lit_epgan.federated.bayesian.fednp import Q, kl_from_standard_normal
from lit_epgan.federated.bayesian.gaussian_tensors import factor_of, own_site
from tests.federations import federation, fit
from tests.plain_federation import federated


class Classifier(LightningModule):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def ended(algorithm: Algorithm, rounds: int) -> Classifier:
    """Without a Trainer."""
    module = Classifier().double()
    federated(module, federation(), algorithm).run(rounds)
    return module


class Watching(FedNP):
    """Keeps what the federation's Gaussians are, and every step's own loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__("backbone", "head", **{"latent": 4, "hidden": 5, **options})
        self.sites: dict[int, GaussianFactor] = {}
        self.losses: list[tuple[float, float]] = []

    def train(self, client: Client, sent: Broadcast) -> FedNP.Report:
        fit, q = client.fit, factor_of(sent, Q)
        cavity = q / own_site(client.state, q.precision, Q)

        def watched(start: Tensor, *, loss: Any, **told: Any) -> None:
            def extra() -> Tensor | None:
                features, found = self.caught._caught, loss()
                if found is not None and features is not None:
                    self.losses.append((float(found), self._by_hand(client, cavity, features.detach())))
                return found

            fit(start, loss=extra, **told)

        client.fit = watched  # type: ignore[method-assign, assignment]
        report = super().train(client, sent)
        self.sites[client.index] = own_site(client.state, q.precision, Q)
        return report

    def _by_hand(self, client: Client, cavity: GaussianFactor, features: Tensor) -> float:
        """The loss once more, with the moments by quadrature and everything else coordinate by coordinate."""
        head: Any = client.module.head
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
def test_the_loss_by_hand_and_q_is_the_prior_times_the_sites(normalised: bool) -> None:
    """Three rounds; after each the product is checked where it is formed."""
    algorithm = Watching(weight=0.3, normalised=normalised, terms=6)
    ended(algorithm, 3)
    assert len(algorithm.losses) > 20
    for found, expected in algorithm.losses:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-8)


def test_kl_against_torchs() -> None:
    mean, variance = torch.randn(5).double(), torch.rand(5).double() + 0.1
    normal = torch.distributions.Normal(mean, variance.sqrt())
    standard = torch.distributions.Normal(torch.zeros(5).double(), torch.ones(5).double())
    torch.testing.assert_close(
        kl_from_standard_normal(mean, variance), torch.distributions.kl_divergence(normal, standard).sum()
    )


def test_f_and_the_network_are_trained_and_cavities_differ() -> None:
    algorithm = Watching(weight=1.0, lr=0.05)
    before: dict[str, Tensor] = {}
    build = algorithm.build

    def remembered(module: nn.Module, seed: int) -> nn.ModuleDict:
        networks = build(module, seed)
        before.update({name: p.detach().double().clone() for name, p in networks.named_parameters()})
        return networks

    algorithm.build = remembered  # type: ignore[method-assign]
    ended(algorithm, 3)
    now = dict(nn.ModuleDict({"tilt": algorithm.tilt, "network": algorithm.network}).named_parameters())
    for name, value in before.items():
        assert not torch.equal(now[name].detach(), value), name
    first, *others = algorithm.sites.values()
    assert all((first.precision_mean - other.precision_mean).abs().max() > 1e-4 for other in others)


def test_quadrature_and_closed_form_agree() -> None:
    ends = []
    for moments in ("closed-form", "quadrature"):
        module = ended(FedNP("backbone", "head", moments=moments, terms=6, weight=0.1), 2)
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_without_weight_it_is_fedavg() -> None:
    ends = []
    for algorithm in (FedAvg(), FedNP("backbone", "head", weight=0.0)):
        ends.append(ended(algorithm, 2).state_dict())
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, msg=name)


def test_a_resumed_run_ends_at_the_same_bytes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True}
    whole, resumed = Classifier(), Classifier()
    fit(whole, federation(), 4, tmp_path / "a", algorithm=FedNP("backbone", "head"), callbacks=[RoundCheckpoint()],
        **options)  # fmt: skip
    fit(Classifier(), federation(), 2, tmp_path / "b", algorithm=FedNP("backbone", "head"),
        callbacks=[RoundCheckpoint()], **options)  # fmt: skip
    fit(resumed, federation(), 4, tmp_path / "b", algorithm=FedNP("backbone", "head"), callbacks=[RoundCheckpoint()],
        ckpt_path=tmp_path / "b" / "checkpoints" / "last.ckpt", **options)  # fmt: skip
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_a_users_mistakes() -> None:
    for options, said in (
        ({"latent": 0}, "latent is 0"),
        ({"moments": "exact"}, "closed-form or quadrature"),
        ({"weight": -1.0}, "weight is -1.0"),
        ({"terms": 7}, "FedNP.s terms is 7; it must lie in"),
    ):
        with pytest.raises(UserError, match=said):
            FedNP("backbone", "head", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no submodule 'hed' with parameters: choose one of backbone"):
        fit(Classifier(), federation(), 1, algorithm=FedNP("backbone", "hed"))


# ---------------------------------------------------------------- figure 5


class Digits(LightningModule):
    """A classifier of four classes."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone, self.head = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, classes)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch[0].argmax(1).clamp(max=self.head.out_features - 1)
        return F.cross_entropy(self.head(self.backbone(batch[0])), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_what_is_predicted_is_the_networks_of_q(tmp_path: Path) -> None:
    """And the picture is drawn of it."""

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


def test_the_projection_keeps_distances_in_its_plane_and_covariances_by_hand() -> None:
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


def test_the_picture_needs_fednp_and_three_classes() -> None:
    for module, algorithm, said in (
        (Digits(), FedAvg(), "what FedNP predicts"),
        (Digits(2), FedNP("backbone", "head"), "three classes or more"),
    ):
        with pytest.raises(UserError, match=said):
            fit(module, federation(), 1, algorithm=algorithm, callbacks=[ClassifierPrior()])
