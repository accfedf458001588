"""Expectation propagation with the EP-GAN paper's own sites: a prior tilted by the sigmoid of a learned function."""

import warnings
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_epgan.bayes.gaussian import GaussianFactor, factor_of, own_site, tensors_of
from lit_epgan.bayes.tilted import tilted_moments, tilted_moments_printed
from lit_epgan.bayes.tilted_mixture import Moments, TiltedMixture, gumbel_softmax, tilted_sites
from lit_epgan.engine import Algorithm, Broadcast, Client, OptimizedParameters, Server, merged, scalar
from lit_epgan.federated.features import Features
from lit_epgan.federated.tilted_batch import batch_rows
from lit_epgan.lib.bounds import at_least, one_of, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

Q = "tilted."
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
    """

    class Report(Algorithm.Report):
        """What leaves a client: beside theta_k's change its new sites over the old ones (J, d), the share of the
        coordinates that are not tilted, and 1, or 0 of a client that has taken no step."""

        sites: GaussianFactor = merged("product", GaussianFactor)
        left_out: Tensor = merged("sum")
        tilted: float = merged("count")

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
        at_least(1, self, components=components, tilt_every=tilt_every)
        at_least(0, self, hidden=hidden)
        within("[0, inf)", self, weight=weight, spread=spread, lr=lr)
        within("(0, inf)", self, prior_variance=prior_variance, temperature=temperature)
        within("[1, 6]", self, terms=terms)
        one_of(("loss", "proximal"), self, step=step)
        one_of(("closed-form", "corrected", "printed"), self, variant=variant)
        printed = partial(tilted_moments_printed, variant=variant)
        self.moments: Moments = partial(tilted_moments, terms=terms) if variant == "closed-form" else printed

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
        self.caught = Features(module, self.features)
        self.tilt = Tilt(self.caught.width, self.hidden, self.components, self.temperature)
        return nn.ModuleDict({"tilt": self.tilt})

    def network_optimizer(self, networks: nn.ModuleDict) -> Optimizer:
        return torch.optim.Adam(networks.parameters(), lr=self.lr)

    def start(self, server: Server) -> None:
        mean = server.parameters.double().repeat(self.components, 1)
        if self.components > 1:
            apart = torch.randn(mean.shape, generator=generator_for(server.seed, "components"))
            mean += self.spread * apart.to(mean)
        prior = GaussianFactor(torch.full_like(mean, 1 / self.prior_variance), mean / self.prior_variance)
        server.state |= tensors_of(prior, Q) | server.state

    def posterior(self, server: Server) -> GaussianFactor:
        """q_j, (J, d), in float64."""
        return factor_of(server.state, Q)

    def broadcast(self, server: Server) -> Broadcast:
        return {"parameters": server.parameters, **tensors_of(self.posterior(server), Q)}

    def train(self, client: Client, sent: Broadcast) -> "TiltedExpectationPropagation.Report":
        """Steps under the tilted prior, which the client's own features tilt; then its new sites, which it keeps."""
        old, dtype = own_site(client.state, sent[f"{Q}precision"], Q), client.flat.dtype
        cavity = factor_of(sent, Q) / old
        steps, proximal = TiltedSteps(self, client, cavity), self.step == "proximal"
        with self.caught.watching(client.module):
            client.fit(
                sent["parameters"],
                batch=steps.expect,
                loss=steps.tilt,
                gradient=None if proximal else steps.add_gradient,
                after_step=steps.step_towards if proximal else None,
            )
            if client.step == 0:
                none = GaussianFactor.uniform(cavity.precision)
                return self.Report(change=client.change, sites=none, left_out=scalar(0), tilted=0)
            if not steps.tilted:
                raise UserError(f"the module's training step makes no pass through the features {self.features!r}")
            f = self.caught.mean(client.module, client.data(), self.tilt, client.parameters).double()
        new, left_out = tilted_sites(cavity, f, self.moments)
        client.state |= {name: tensor.to(dtype) for name, tensor in tensors_of(new, Q).items()}
        change = own_site(client.state, cavity.precision, Q) / old
        share = scalar(left_out / new.precision.numel())
        return self.Report(change=client.change, sites=change, left_out=share, tilted=1)

    def merge(self, server: Server, report: Any) -> None:
        """theta, f and pi by FedAvg; q_j by the product, whose p0_j moves with theta where it is to."""
        state, before = server.state, server.parameters.to(torch.float64, copy=True)
        super().merge(server, report)
        q = self.posterior(server) * report.sites
        if self.recentre:
            q.precision_mean.add_((server.parameters - before) / self.prior_variance)
        first = float(state.get(LEFT_OUT, scalar(0))) == 0
        state |= {**tensors_of(q, Q), LEFT_OUT: report.left_out / report.tilted.clamp(min=1)}
        if first and float(state[LEFT_OUT]) > 0:
            share = f"{float(state[LEFT_OUT]):.1%}"
            warnings.warn(f"{share} of the tilted coordinates have no {self.variant} moments: not tilted", stacklevel=2)


class TiltedSteps:
    """The hooks of a client's steps under its cavity, which is tilted anew every few steps."""

    def __init__(self, algorithm: TiltedExpectationPropagation, client: Client, cavity: GaussianFactor) -> None:
        self.algorithm, self.client, self.tilted = algorithm, client, False
        self._vector = torch.empty_like(client.parameters)
        self._priors = {}  # by optimizer; the cavity until it is tilted
        for part in client.optimized:
            own = (_gather(t, part).to(client.flat.dtype) for t in (cavity.precision, cavity.precision_mean))
            self._priors[part.index] = TiltedMixture(GaussianFactor(*own), algorithm.moments)

    def expect(self, batch: Any) -> Any:
        """Have the features of a batch caught whose step tilts."""
        if (self.client.step - 1) % self.algorithm.tilt_every == 0:
            self.algorithm.caught.expect(len(batch_rows(batch)))
        return batch

    def tilt(self) -> Tensor | None:
        """Tilt by the batch's features; zero, with f's and the weights' gradient of -weight log p(theta)."""
        features, network = self.algorithm.caught.take(), self.algorithm.tilt
        if features is None:
            return None
        f = network(features if self.algorithm.train_backbone else features.detach()).mean(0)
        log_weights, slopes = network.log_weights(), f.new_zeros(2, self.algorithm.components)
        for part in self.client.optimized:
            theta = _gather(self.client.parameters, part)
            slopes += torch.stack(self._priors[part.index].tilt(theta, f.detach(), log_weights.detach()))
        self.tilted = True
        # zero: the loss that is logged stays the module's own
        moved = torch.stack([f - f.detach(), log_weights - log_weights.detach()])
        return self.algorithm.weight * (slopes * moved).sum()

    def add_gradient(self, part: OptimizedParameters) -> None:
        """g <- g + weight (theta P - H)."""
        parameters, gradients = part.with_gradient()
        if self.tilted and gradients:
            theta = _gather(self.client.parameters, part)
            pull = self._priors[part.index].attraction(theta)
            _scatter(theta * pull.precision - pull.precision_mean, part, self._vector)
            torch._foreach_add_(gradients, part.flat.views(self._vector, parameters), alpha=self.algorithm.weight)

    def step_towards(self, part: OptimizedParameters) -> None:
        """theta <- (theta + c H) / (1 + c P)."""
        if self.tilted:
            theta, c = _gather(self.client.parameters, part), part.lr * self.algorithm.weight
            pull = self._priors[part.index].attraction(theta)
            _scatter((theta + c * pull.precision_mean) / (1 + c * pull.precision), part, self._vector)
            torch._foreach_copy_(part.live, part.parts(self._vector))


class Tilt(nn.Module):
    """f (rows, J) of features (rows, width), and log weights (J,) of the components, both learned.

    Args:
        width: number of features.
        hidden: width of f's hidden layer; 0 is a linear f.
        components: J.
        temperature: of the weights' Gumbel-softmax.
    """

    def __init__(self, width: int, hidden: int, components: int, temperature: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, hidden), nn.ReLU()) if hidden else nn.Identity()
        self.outer = nn.Linear(hidden or width, components)
        self.temperature = temperature
        # one component needs no weights, and draws no noise for them
        self.logits = nn.Parameter(torch.zeros(components)) if components > 1 else None

    def forward(self, features: Tensor) -> Tensor:
        """f (rows, J) of features (rows, width)."""
        return self.outer(self.inner(features.to(self.outer.weight.dtype)))

    def log_weights(self) -> Tensor:
        """log pi (J,): a draw of the relaxed weights."""
        if self.logits is None:
            return torch.zeros_like(self.outer.bias)
        return gumbel_softmax(self.logits, self.temperature)


def _gather(vectors: Tensor, part: OptimizedParameters) -> Tensor:
    """One optimizer's part (..., n) of flat vectors (..., d); a view where it is in one piece."""
    parts = [vectors[..., where] for where in part.slices]
    return parts[0] if len(parts) == 1 else torch.cat([vectors[..., :0], *parts], -1)


def _scatter(values: Tensor, part: OptimizedParameters, into: Tensor) -> None:
    """Put one optimizer's values (n,) at their places in a flat vector (d,)."""
    sizes = [where.stop - where.start for where in part.slices]
    for where, value in zip(part.slices, values.split(sizes), strict=True):
        into[where] = value
