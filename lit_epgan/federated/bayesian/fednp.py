"""FedNP: expectation propagation over a latent description of everybody's data, which is the classifier's prior."""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, Server
from lit_epgan.federated.features import Features
from lit_epgan.federated.report import Report
from lit_epgan.federated.tilted_batch import batch_rows
from lit_epgan.inference.gaussian import GaussianFactor
from lit_epgan.inference.tilted import tilted_moments
from lit_epgan.inference.tilted_quadrature import tilted_moments_quadrature
from lit_epgan.networks.natural_parameter import NaturalParameterNetwork

PRECISION, PRECISION_MEAN = "latent.precision", "latent.precision_mean"


class FedNP(FederatedAlgorithm):
    """Federated learning with a neural prior (FedNP, AAAI 2023, algorithm 1), with the errata.

    A latent z (``latent`` numbers) stands for the global data distribution: q(z) = p(z) prod_k g_k(z), p = N(0, I).
    f is a number per client, the mean over records of a linear function of a submodule's features. For client k:

        cavity       q / g_k = N(m, s)
        tilted       N(m', s'), of the moments of N(z; m, s) sigma(f z) in every coordinate (closed form, or quadrature)
        prior        N(mu, sigma^2) of the classifier's parameters w: a natural-parameter network of (m', s')
        loss         the module's own + weight [mean_i (w_i - mu_i)^2 / (2 sigma_i^2) + KL(N(m', s') || p)]
        new site     g_k = N(m', s') / N(m, s), at the round's end; f the mean over all own records
        server       w, f and the network by FedAvg; q by the product of p and the sites

    Corrected against the published code: variances stand where it takes standard deviations, f is trained by the loss,
    and cavities do not collapse. As printed the loss has no log sigma_i, so that sigma^2 may grow without bound;
    ``normalised`` adds 1/2 mean_i log sigma_i^2, which makes it the Gaussian's negative log-likelihood.

    The module's step must begin with a pass of its records through the features.

    Price: beside FedAvg's vector that of f and of the network (``hidden`` x parameters of the classifier, twice), and
    2 ``latent`` numbers; all messages sum. A client keeps 2 ``latent`` numbers.

    Args:
        features: submodule whose output f is a function of, as in ``backbone``.
        classifier: submodule whose parameters get the prior, as in ``head``.
        latent: dimension of z.
        hidden: width of the natural-parameter network's hidden layer.
        weight: lambda.
        moments: ``closed-form``, or ``quadrature`` (Quad-FedNP) with ``points``.
        points: of the quadrature.
        terms: of the closed form, 1 to 6.
        normalised: whether the prior's term includes 1/2 log sigma^2.
        lr: Adam's, for f and the network.

    Raises:
        UserError: if an argument is out of its range, or there is no such submodule.
    """

    def __init__(
        self,
        features: str,
        classifier: str,
        latent: int = 10,
        hidden: int = 64,
        weight: float = 0.01,
        moments: Literal["closed-form", "quadrature"] = "closed-form",
        points: int = 100,
        terms: int = 3,
        normalised: bool = False,
        lr: float = 1e-3,
    ) -> None:
        self.features, self.classifier = features, classifier
        self.latent, self.hidden, self.weight = latent, hidden, weight
        self.moments, self.points, self.terms = moments, points, terms
        self.normalised, self.lr = normalised, lr
        wanted = {
            "latent": (latent >= 1, "at least 1"),
            "hidden": (hidden >= 1, "at least 1"),
            "weight": (0 <= weight < math.inf, "0 or more"),
            "moments": (moments in ("closed-form", "quadrature"), "closed-form or quadrature"),
            "points": (points >= 2, "at least 2"),
            "terms": (1 <= terms <= 6, "from 1 to 6"),
            "lr": (0 <= lr < math.inf, "0 or more"),
        }
        for name, (good, what) in wanted.items():
            if not good:
                raise UserError(f"FedNP's {name} is {getattr(self, name)}; it must be {what}")
        closed = moments == "closed-form"
        self._moments: Any = (
            partial(tilted_moments, terms=terms) if closed else partial(tilted_moments_quadrature, points=points)
        )

    def build(self, module: nn.Module) -> nn.ModuleDict:
        self._features = Features(module, self.features)
        known = [name for name, part in module.named_modules() if name and any(True for _ in part.parameters())]
        if self.classifier not in known:
            raise UserError(
                f"{type(module).__name__} has no submodule {self.classifier!r} with parameters: choose one of "
                f"{', '.join(known)}"
            )
        numel = sum(p.numel() for p in module.get_submodule(self.classifier).parameters())
        self._tilt = nn.Linear(self._features.width, 1)
        self._network = NaturalParameterNetwork(self.latent, self.hidden, numel)
        return nn.ModuleDict({"tilt": self._tilt, "network": self._network})

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        return torch.optim.Adam(networks.parameters(), lr=self.lr)

    def start_fit(self, server: Server) -> None:
        if PRECISION not in server.state:
            server.state[PRECISION] = torch.ones(self.latent, dtype=torch.float64, device=server.parameters.device)
            server.state[PRECISION_MEAN] = torch.zeros_like(server.state[PRECISION])

    def posterior(self, server: Server) -> GaussianFactor:
        """q(z), in float64."""
        return GaussianFactor(server.state[PRECISION], server.state[PRECISION_MEAN])

    def site(self, client: Client) -> GaussianFactor:
        """The client's g_k(z), in float64; uniform before its first report."""
        if PRECISION not in client.state:
            return GaussianFactor.uniform(client.server.state[PRECISION])
        return GaussianFactor(client.state[PRECISION], client.state[PRECISION_MEAN])

    @torch.no_grad()
    def predicted(self, server: Server) -> tuple[Tensor, Tensor]:
        """Mean and variance (parameters of the classifier,) that the network predicts from q(z), in their order."""
        q = self.posterior(server)
        mean, variance = (t.to(server.parameters.dtype) for t in q.moments)
        mu, sigma_squared = self._network(mean, variance)
        return mu, sigma_squared

    def client_download(self, client: Client) -> Report:
        q = {name: client.server.state[name] for name in (PRECISION, PRECISION_MEAN)}
        return dict(super().client_download(client)) | q

    def start_client(self, client: Client) -> None:
        self._features.watch(client.server.module)
        cavity = self.posterior(client.server) / self.site(client)
        self._cavity = [t.to(client.parameters.dtype) for t in cavity.moments]
        self._classifier = list(client.server.module.get_submodule(self.classifier).parameters())
        self._seen = False

    def client_batch(self, client: Client, batch: Any) -> Any:
        self._features.expect(len(batch_rows(batch)))
        return batch

    def extra_loss(self, client: Client) -> Tensor | None:
        features = self._features.take()
        if features is None:
            return None
        self._seen = True
        mean, variance = self._tilted(self._tilt(features).mean())
        mu, sigma_squared = self._network(mean, variance)
        w = torch.cat([p.flatten() for p in self._classifier])
        prior = (w - mu).square() / (2 * sigma_squared)
        if self.normalised:
            prior = prior + sigma_squared.log() / 2
        return self.weight * (prior.mean() + kl_from_standard_normal(mean, variance))

    def end_client(self, client: Client) -> None:
        if not self._seen:
            raise UserError(f"the module's training step makes no pass through the features {self.features!r}")
        f = self._features.mean(client.server.module, client.data(), self._tilt, client.parameters)
        self._features.leave()
        client.state["latent.f"] = f.double()

    def client_report(self, client: Client) -> Report:
        old, q = self.site(client), self.posterior(client.server)
        f = client.state["latent.f"].expand(self.latent)
        _, mean, variance = self._moments(*(q / old).moments, f)
        change = GaussianFactor.from_moments(mean, variance) / q
        new = old * change
        client.state[PRECISION], client.state[PRECISION_MEAN] = new.precision, new.precision_mean
        return {
            **super().client_report(client),
            PRECISION: change.precision,
            PRECISION_MEAN: change.precision_mean,
        }

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        super().server_update(server, total)
        for name in (PRECISION, PRECISION_MEAN):
            server.state[name] += total[name]

    def _tilted(self, f: Tensor) -> tuple[Tensor, Tensor]:
        _, mean, variance = self._moments(*self._cavity, f.expand(self.latent))
        return mean, variance


def kl_from_standard_normal(mean: Tensor, variance: Tensor) -> Tensor:
    """KL(N(m, s) || N(0, 1)) = 1/2 (s + m^2 - 1 - log s), the sum over coordinates."""
    return (variance + mean.square() - 1 - variance.log()).sum() / 2
