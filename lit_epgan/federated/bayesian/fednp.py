"""FedNP: expectation propagation over a latent description of everybody's data, which is the classifier's prior."""

import math
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.bayes.gaussian import GaussianFactor, factor_of, own_site, tensors_of
from lit_epgan.bayes.tilted import tilted_moments, tilted_moments_quadrature
from lit_epgan.engine import Algorithm, Broadcast, Client, Server, merged
from lit_epgan.federated.features import Features
from lit_epgan.federated.tilted_batch import batch_rows
from lit_epgan.lib.bounds import at_least, one_of, within
from lit_epgan.lib.errors import UserError

Q = "latent."
SMALLEST = 1e-6  # variance


class FedNP(Algorithm):
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
    """

    class Report(Algorithm.Report):
        """What leaves a client: beside w's change its new site over the old one, (latent,)."""

        site: GaussianFactor = merged("product", GaussianFactor)

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
        at_least(1, self, latent=latent, hidden=hidden)
        at_least(2, self, points=points)
        within("[0, inf)", self, weight=weight, lr=lr)
        within("[1, 6]", self, terms=terms)
        one_of(("closed-form", "quadrature"), self, moments=moments)
        closed = moments == "closed-form"
        self.tilted_moments: Any = (
            partial(tilted_moments, terms=terms) if closed else partial(tilted_moments_quadrature, points=points)
        )

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
        self.caught = Features(module, self.features)
        known = [name for name, part in module.named_modules() if name and any(True for _ in part.parameters())]
        if self.classifier not in known:
            raise UserError(
                f"{type(module).__name__} has no submodule {self.classifier!r} with parameters: choose one of "
                f"{', '.join(known)}"
            )
        numel = sum(p.numel() for p in module.get_submodule(self.classifier).parameters())
        self.tilt = nn.Linear(self.caught.width, 1)
        self.network = NaturalParameterNetwork(self.latent, self.hidden, numel)
        return nn.ModuleDict({"tilt": self.tilt, "network": self.network})

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        return torch.optim.Adam(networks.parameters(), lr=self.lr)

    def start(self, server: Server) -> None:
        ones = torch.ones(self.latent, dtype=torch.float64, device=server.parameters.device)
        server.state |= tensors_of(GaussianFactor(ones, torch.zeros_like(ones)), Q) | server.state

    def posterior(self, server: Server) -> GaussianFactor:
        """q(z), in float64."""
        return factor_of(server.state, Q)

    @torch.no_grad()
    def predicted(self, server: Server) -> tuple[Tensor, Tensor]:
        """Mean and variance (parameters of the classifier,) that the network predicts from q(z), in their order."""
        mean, variance = (t.to(server.parameters.dtype) for t in self.posterior(server).moments)
        mu, sigma_squared = self.network(mean, variance)
        return mu, sigma_squared

    def broadcast(self, server: Server) -> Broadcast:
        return {"parameters": server.parameters, **tensors_of(self.posterior(server), Q)}

    def train(self, client: Client, sent: Broadcast) -> "FedNP.Report":
        """Steps under the prior that the network makes of the client's tilted latent; then its new site."""
        q, old = factor_of(sent, Q), own_site(client.state, sent[f"{Q}precision"], Q)
        cavity = [t.to(client.flat.dtype) for t in (q / old).moments]
        classifier = list(client.module.get_submodule(self.classifier).parameters())
        seen = False

        def expect(batch: Any) -> Any:
            self.caught.expect(len(batch_rows(batch)))
            return batch

        def prior_loss() -> Tensor | None:
            nonlocal seen
            features = self.caught.take()
            if features is None:
                return None
            seen = True
            _, mean, variance = self.tilted_moments(*cavity, self.tilt(features).mean().expand(self.latent))
            mu, sigma_squared = self.network(mean, variance)
            w = torch.cat([p.flatten() for p in classifier])
            prior = (w - mu).square() / (2 * sigma_squared)
            if self.normalised:
                prior = prior + sigma_squared.log() / 2
            return self.weight * (prior.mean() + kl_from_standard_normal(mean, variance))

        with self.caught.watching(client.module):
            client.fit(sent["parameters"], batch=expect, loss=prior_loss)
            if client.step == 0:
                return self.Report(change=client.change, site=GaussianFactor.uniform(q.precision))
            if not seen:
                raise UserError(f"the module's training step makes no pass through the features {self.features!r}")
            f = self.caught.mean(client.module, client.data(), self.tilt, client.parameters).double()
        _, mean, variance = self.tilted_moments(*(q / old).moments, f.expand(self.latent))
        change = GaussianFactor.from_moments(mean, variance) / q
        client.state |= tensors_of(old * change, Q)
        return self.Report(change=client.change, site=change)

    def merge(self, server: Server, report: "FedNP.Report") -> None:
        super().merge(server, report)
        server.state |= tensors_of(self.posterior(server) * report.site, Q)


def kl_from_standard_normal(mean: Tensor, variance: Tensor) -> Tensor:
    """KL(N(m, s) || N(0, 1)) = 1/2 (s + m^2 - 1 - log s), the sum over coordinates."""
    return (variance + mean.square() - 1 - variance.log()).sum() / 2


class GaussianLinear(nn.Module):
    """A linear layer whose weights and biases are independent Gaussians (Wang, Shi and Yeung 2016, section 2.3).

    For inputs of mean m and variance s, weights of mean W and variance V, biases of mean b and variance c:

        mean = m W + b,    variance = s V + s W^2 + m^2 V + c

    exactly the moments of the output, if all are independent.

    Args:
        inputs, outputs: widths.
        variance: of the weights and biases at the beginning, relative to the means' initial variance.
    """

    def __init__(self, inputs: int, outputs: int, variance: float = 0.1) -> None:
        super().__init__()
        layer = nn.Linear(inputs, outputs)
        self.weight, self.bias = nn.Parameter(layer.weight.detach().T.clone()), nn.Parameter(layer.bias.detach())
        initial = _inverse_softplus(variance / (3 * inputs))  # nn.Linear draws from +-1 / inputs^(1/2)
        self.raw_weight = nn.Parameter(torch.full((inputs, outputs), initial))
        self.raw_bias = nn.Parameter(torch.full((outputs,), initial))

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., outputs) of inputs of ``mean`` and ``variance`` (..., inputs)."""
        spread, shift = F.softplus(self.raw_weight), F.softplus(self.raw_bias)
        out = variance @ (spread + self.weight.square()) + mean.square() @ spread + shift
        return mean @ self.weight + self.bias, out


class GaussianSigmoid(nn.Module):
    """Mean and variance of sigma(x) of Gaussian x, by Gauss-Hermite quadrature.

    The probit approximation of sigma^2 (Wang, Shi and Yeung 2016, equation 9) misses the standard deviation, most where
    the input is almost certain; a few nodes cost no more than a layer does.

    Args:
        nodes: of the quadrature.
    """

    places: Tensor
    weights: Tensor

    def __init__(self, nodes: int = 20) -> None:
        super().__init__()
        places, weights = np.polynomial.hermite.hermgauss(nodes)
        self.register_buffer("places", torch.from_numpy(places * 2**0.5), persistent=False)
        self.register_buffer("weights", torch.from_numpy(weights / weights.sum()), persistent=False)

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (...), the latter at least 1e-6, of inputs of ``mean`` and ``variance`` (...)."""
        places, weights = (self.places.to(mean), self.weights.to(mean))
        values = torch.sigmoid(mean[..., None] + variance.clamp_min(SMALLEST).sqrt()[..., None] * places)
        first = values @ weights
        return first, ((values - first[..., None]).square() @ weights).clamp_min(SMALLEST)


class NaturalParameterNetwork(nn.Module):
    """Gaussian linear layers of such widths with sigmoids between them: the distribution of the outputs given that of
    the inputs."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(GaussianLinear(i, o) for i, o in pairwise(widths))
        self.activation = GaussianSigmoid()

    def forward(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance (..., outputs) of inputs of ``mean`` and ``variance`` (..., inputs)."""
        for position, layer in enumerate(self.layers):
            if position:
                mean, variance = self.activation(mean, variance)
            mean, variance = layer(mean, variance)
        return mean, variance


def _inverse_softplus(value: float) -> float:
    return math.log(math.expm1(value))
