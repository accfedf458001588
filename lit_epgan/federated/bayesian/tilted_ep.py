"""Expectation propagation with the EP-GAN paper's own sites: a prior tilted by the sigmoid of a learned function."""

import math
import warnings
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Count,
    Exchange,
    OptimizedParameters,
    Report,
    Rounds,
    Server,
    Training,
    Work,
    scalar,
)
from lit_epgan.errors import UserError
from lit_epgan.federated.bayesian.gaussian_sites import GaussianSites
from lit_epgan.federated.bayesian.tilt import Tilt
from lit_epgan.federated.features import Features
from lit_epgan.federated.tilted_batch import batch_rows
from lit_epgan.inference.gaussian import GaussianFactor
from lit_epgan.inference.tilted import tilted_moments, tilted_moments_printed
from lit_epgan.inference.tilted_mixture import Moments, TiltedMixture, tilted_sites
from lit_epgan.randomness import generator_for

Q = GaussianSites("tilted.")
LEFT_OUT = "tilted.left_out"


class TiltedExpectationPropagation(Algorithm):
    """EP-GAN's prior: q_j(theta) = p0_j(theta) prod_k g_kj(theta), j = 1 .. J, whose sites are sigmoids of a network.

    f is a head of J outputs on features of a client's records. For client k, in every coordinate of theta:

        cavity       q_j / g_kj = N(m_j, s_j)
        tilted       N(m'_j, s'_j), of the moments of N(theta; m_j, s_j) sigma(f_j theta); f the minibatch's mean
        prior        p(theta) = sum_j pi_j N(theta; m'_j, s'_j), one for the parameters of each optimizer
        loss         own loss - weight log p(theta), which trains theta, f and pi (a Gumbel-softmax)
        new site     g_kj = N(m'_j, s'_j) / N(m_j, s_j), at the round's end; f the mean over the client's own records
        server       theta, f and pi by FedAvg; q_j by the product of p0_j and the sites

    EP-GAN, sections 4.1 and 4.2, appendices E.2, E.5 and F.3.2, with the errata: sites in place of posteriors in the
    product, its precision where the print says variance, and the sign of (46). One component is EP-BGAN's and
    EP-ProbGAN's prior, several the mixture's; the likelihood is the module's. p0_j = N(initial parameters,
    prior_variance) is the paper's first global prior (algorithm 2, line 2): a uniform one would leave cavities
    improper, because a sigmoid's site is all but flat. Components begin ``spread`` apart, or they would stay equal.

    The module's step must begin with a pass of the real rows through the features, alone or ahead of others. The first
    part of ``features`` names the network that is to take records by themselves, for the new site. theta's gradient is
    closed-form; f's takes a graph over theta, every ``tilt_every`` steps.

    Price: beside FedAvg's vector 2 J up and 2 J down; all messages sum. A client keeps 2 J.

    Args:
        features: submodule whose output f is a function of, as in ``discriminator.layers.3``.
        components: J.
        hidden: width of f's hidden layer; 0 is a linear f.
        weight: of the prior in the loss; under ``step: proximal`` its strength, as ``ExpectationPropagation``'s
            prior_scale.
        step: ``loss`` adds the prior's gradient ahead of the optimizer's step; ``proximal`` follows it with
            theta <- (theta + c H) / (1 + c P), P = sum_j r_j / s'_j, H = sum_j r_j m'_j / s'_j, c = lr weight.
        tilt_every: local steps that f and the tilted moments hold for; 1 is the paper's.
        variant: ``closed-form`` moments, or the paper's theorem 4.1 ``corrected`` or as ``printed``; coordinates where
            these give no moments are not tilted, and a warning says how many.
        terms: of the closed form, 1 to 6.
        prior_variance: of p0.
        recentre: whether p0 moves with the server's parameters from round to round.
        spread: standard deviation of the components' first means around the initial parameters.
        temperature: of the Gumbel-softmax.
        train_backbone: whether the prior trains the features, too; a sum over all parameters can swamp their own loss.
        lr: of f's Adam.

    Raises:
        UserError: if an argument is out of its range, or there are no such features.
    """

    def __init__(
        self,
        features: str,
        components: int = 1,
        hidden: int = 128,
        weight: float = 1e-3,
        step: Literal["loss", "proximal"] = "loss",
        tilt_every: int = 8,
        variant: Literal["closed-form", "corrected", "printed"] = "closed-form",
        terms: int = 3,
        prior_variance: float = 1.0,
        recentre: bool = False,
        spread: float = 0.01,
        temperature: float = 1.0,
        train_backbone: bool = False,
        lr: float = 3e-4,
    ) -> None:
        self.features, self.components, self.hidden = features, components, hidden
        self.weight, self.step, self.tilt_every = weight, step, tilt_every
        self.variant, self.terms = variant, terms
        self.prior_variance, self.recentre, self.spread = prior_variance, recentre, spread
        self.temperature, self.train_backbone, self.lr = temperature, train_backbone, lr
        self._check_arguments()
        printed = partial(tilted_moments_printed, variant=variant)
        self.moments: Moments = partial(tilted_moments, terms=terms) if variant == "closed-form" else printed

    def _check_arguments(self) -> None:
        wanted = {
            "components": (self.components >= 1, "at least 1"),
            "hidden": (self.hidden >= 0, "0 (a linear f) or more"),
            "weight": (0 <= self.weight < math.inf, "0 or more"),
            "step": (self.step in ("loss", "proximal"), "loss or proximal"),
            "tilt_every": (self.tilt_every >= 1, "at least 1"),
            "variant": (self.variant in ("closed-form", "corrected", "printed"), "closed-form, corrected or printed"),
            "terms": (1 <= self.terms <= 6, "from 1 to 6"),
            "prior_variance": (0 < self.prior_variance < math.inf, "positive and finite"),
            "spread": (0 <= self.spread < math.inf, "0 or more"),
            "temperature": (0 < self.temperature < math.inf, "positive"),
            "lr": (0 <= self.lr < math.inf, "0 or more"),
        }
        for name, (good, what) in wanted.items():
            if not good:
                raise UserError(f"TiltedExpectationPropagation's {name} is {getattr(self, name)}; it must be {what}")

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
        """f and the components' weights."""
        self.tilt = Tilt(Features(module, self.features).width, self.hidden, self.components, self.temperature)
        return nn.ModuleDict({"tilt": self.tilt})

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        """Adam at the rate ``lr``."""
        return torch.optim.Adam(networks.parameters(), lr=self.lr)

    def start(self, server: Server) -> None:
        """q_j = p0_j."""
        mean = server.parameters.double().repeat(self.components, 1)
        if self.components > 1:
            apart = torch.randn(mean.shape, generator=generator_for(server.seed, "components"))
            mean += self.spread * apart.to(mean)
        Q.start(
            server.state, GaussianFactor(torch.full_like(mean, 1 / self.prior_variance), mean / self.prior_variance)
        )

    def posterior(self, server: Server) -> GaussianFactor:
        """q_j, (J, d), in float64."""
        return Q.of(server.state)

    def round(self, server: Server) -> Rounds:
        """theta and q out; their changes back."""
        state, before = server.state, server.parameters.to(torch.float64, copy=True)
        total = yield Exchange({"parameters": server.parameters, **Q.broadcast(state)})
        server.parameters += total.mean("parameters")
        Q.update(state, total)
        if self.recentre:
            state[Q.precision_mean] += (server.parameters - before) / self.prior_variance
        first = float(state.get(LEFT_OUT, scalar(0))) == 0
        state[LEFT_OUT] = total[LEFT_OUT] / total["tilted.clients"].clamp(min=1)
        if first and float(state[LEFT_OUT]) > 0:
            share = f"{float(state[LEFT_OUT]):.1%}"
            warnings.warn(f"{share} of the tilted coordinates have no {self.variant} moments: not tilted", stacklevel=2)

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """Training under the tilted prior."""
        return [TiltedPrior(self, client, received)]


class TiltedPrior(Training):
    """A client's steps under the tilted prior, which its own features tilt; at the end its new sites."""

    def __init__(self, settings: TiltedExpectationPropagation, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings, self.tilt = settings, settings.tilt
        self.features: Features = client.remember("features", lambda: Features(client.module, settings.features))

    def site(self) -> GaussianFactor:
        """The client's g_kj, (J, d), in float64; uniform before its first report."""
        return Q.own(self.client.state, self.received[Q.precision])

    def begin(self) -> None:
        """The cavity is the prior until it is tilted."""
        self.features.watch(self.client.module)
        cavity, dtype = Q.of(self.received) / self.site(), self.client.flat.dtype
        self._priors: dict[int, TiltedMixture] = {}
        for optimized in self.client.optimized:
            parts = (_gather(t, optimized).to(dtype) for t in (cavity.precision, cavity.precision_mean))
            self._priors[optimized.index] = TiltedMixture(GaussianFactor(*parts), self.settings.moments)
        self._moved = torch.empty_like(self.client.parameters)
        self._tilted = False

    def batch(self, batch: Any) -> Any:
        """The next pass is of these rows."""
        if self.client.step % self.settings.tilt_every == 0:
            self.features.expect(len(batch_rows(batch)))
        return batch

    def extra_loss(self) -> Tensor | None:
        """Zero, with the gradient of -weight log p(theta) in f and the weights."""
        settings, features = self.settings, self.features.take()
        if features is None:
            return None
        f = self.tilt(features if settings.train_backbone else features.detach()).mean(0)
        log_weights = self.tilt.log_weights()
        theta, slopes = self.client.parameters, f.new_zeros(2, settings.components)
        for optimized in self.client.optimized:
            own = _gather(theta, optimized)
            slopes += torch.stack(self._priors[optimized.index].tilt(own, f.detach(), log_weights.detach()))
        self._tilted = True
        # zero, with the prior's gradient: the loss that is logged stays the module's own
        return settings.weight * (slopes * torch.stack([f - f.detach(), log_weights - log_weights.detach()])).sum()

    def adjust_gradients(self, optimized: OptimizedParameters) -> None:
        """g <- g + weight (theta P - H)."""
        parameters, gradients = optimized.with_gradient()
        if self.settings.step == "loss" and self._tilted and gradients:
            theta = _gather(self.client.parameters, optimized)
            pull = self._priors[optimized.index].attraction(theta)
            slope = self._scatter(theta * pull.precision - pull.precision_mean, optimized)
            torch._foreach_add_(gradients, optimized.flat.views(slope, parameters), alpha=self.settings.weight)

    def after_step(self, optimized: OptimizedParameters) -> None:
        """theta <- (theta + c H) / (1 + c P)."""
        if self.settings.step == "proximal" and self._tilted:
            theta, c = _gather(self.client.parameters, optimized), optimized.lr * self.settings.weight
            pull = self._priors[optimized.index].attraction(theta)
            moved = self._scatter((theta + c * pull.precision_mean) / (1 + c * pull.precision), optimized)
            torch._foreach_copy_(optimized.live, optimized.parts(moved))

    def end(self) -> None:
        """f over all own records."""
        client = self.client
        if self.client.step == 0:
            return
        if not self._tilted:
            raise UserError(f"the module's training step makes no pass through the features {self.settings.features!r}")
        self._f = self.features.mean(client.module, client.data(), self.tilt, client.parameters).double()
        self.leave()

    def leave(self) -> None:
        """Watch no more."""
        self.features.leave()

    def report(self) -> Report:
        """theta's change, and the sites'; the client keeps its sites in the parameters' precision.

        Without a step there is no change.
        """
        if self.client.step == 0:
            change = GaussianFactor.uniform(self.received[Q.precision].flatten())
            counts: Report = {LEFT_OUT: scalar(0), "tilted.clients": Count(0)}
            return {**super().report(), **Q.report(change), **counts}
        state, dtype, old = self.client.state, self.client.flat.dtype, self.site()
        new, left_out = tilted_sites(Q.of(self.received) / old, self._f, self.settings.moments)
        Q.keep(state, GaussianFactor(new.precision.to(dtype), new.precision_mean.to(dtype)))
        change = self.site() / old
        return {
            **super().report(),
            **Q.report(GaussianFactor(change.precision.flatten(), change.precision_mean.flatten())),
            LEFT_OUT: scalar(left_out / new.precision.numel()),
            "tilted.clients": Count(1),
        }

    def _scatter(self, values: Tensor, optimized: OptimizedParameters) -> Tensor:
        """A flat vector (d,) with one optimizer's values at their places."""
        sizes = [part.stop - part.start for part in optimized.slices]
        for part, value in zip(optimized.slices, values.split(sizes), strict=True):
            self._moved[part] = value
        return self._moved


def _gather(vectors: Tensor, optimized: OptimizedParameters) -> Tensor:
    """One optimizer's part (..., n) of flat vectors (..., d); a view where it is in one piece."""
    parts = [vectors[..., part] for part in optimized.slices]
    return parts[0] if len(parts) == 1 else torch.cat([vectors[..., :0], *parts], -1)
