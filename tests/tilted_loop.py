"""Expectation propagation with the EP-GAN paper's prior as one would write it down: one graph over everything."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from lit_epgan.bayes import GaussianFactor, gumbel_softmax
from lit_epgan.bayes.tilted import tilted_moments
from lit_epgan.engine import Broadcast, Client
from lit_epgan.federated import TiltedExpectationPropagation
from lit_epgan.federated.features import Features
from lit_epgan.lib.randomness import generator_for
from tests.federations import SIZES, client_sets
from tests.mixtures import mixture_log_density
from tests.modules import TwoOptimizers
from tests.plain_loop import PlainLoop
from tests.test_federation import plain_cohort

Networks = dict[str, GaussianFactor]  # by name of the network, natural parameters (J, n)


class RememberingFeatures(Features):
    """Keeps the mean that a client has asked for."""

    def mean(self, *arguments: Any) -> Tensor:
        self.last = super().mean(*arguments)
        return self.last


class Remembering(TiltedExpectationPropagation):
    """Keeps a copy of its networks as they begin, and what each client reports and its f."""

    def build(self, module: nn.Module, seed: int) -> nn.ModuleDict:
        networks = super().build(module, seed)
        self.initial = copy.deepcopy(self.tilt)
        self.f: dict[int, Tensor] = {}
        self.reports: dict[int, TiltedExpectationPropagation.Report] = {}
        self.caught: RememberingFeatures = RememberingFeatures(module, self.features)
        return networks

    def train(self, client: Client, sent: Broadcast) -> TiltedExpectationPropagation.Report:
        self.reports[client.index] = report = super().train(client, sent)
        self.f[client.index] = self.caught.last.double()
        return report


class WithTilt(nn.Module):
    """A module and the tilt's network as one, so that federated averaging merges both."""

    def __init__(self, module: nn.Module, tilt: nn.Module) -> None:
        super().__init__()
        self.module, self.tilt = module, tilt


class PlainTilt:
    """Local work under the prior as the paper writes it: one graph over everything, every step.

    q_j is kept as p0_j and the sites, and formed as their product whenever it is needed.
    """

    def __init__(self, module: TwoOptimizers, algorithm: TiltedExpectationPropagation) -> None:
        self.a = algorithm
        self.centre = {name: self.vector(module, name) for name in ("generator", "discriminator")}
        sizes = [len(v) for v in self.centre.values()]
        spread = algorithm.spread * (algorithm.components > 1)
        noise = torch.randn(algorithm.components, sum(sizes), generator=generator_for(0, "components"))
        self.apart = dict(zip(self.centre, (spread * noise).double().split(sizes, 1), strict=True))
        self.sites: dict[int, Networks] = {}
        self.pending: dict[int, Networks] = {}
        self.round = 0

    @staticmethod
    def vector(module: Any, name: str) -> Tensor:
        return torch.cat([p.flatten() for p in getattr(module, name).parameters()]).double()

    def posterior(self, name: str) -> GaussianFactor:
        mean = self.centre[name].detach() + self.apart[name]
        q = GaussianFactor.from_moments(mean, torch.full_like(mean, self.a.prior_variance))
        for networks in self.sites.values():
            q = q * networks[name]
        return q

    def __call__(self, local: Any, batches: list[Any], client: int, round_: int) -> None:
        if round_ > self.round:
            self.sites |= self.pending
            self.pending, self.round = {}, round_
            if self.a.recentre:
                self.centre = {name: self.vector(local.module, name) for name in self.centre}
        module, tilt = local.module, local.tilt
        cavities = {name: self.posterior(name) for name in self.centre}
        for name in cavities if client in self.sites else ():
            cavities[name] = cavities[name] / self.sites[client][name]
        optimizers = dict(zip(("discriminator", "generator"), module.configure_optimizers(), strict=True))
        own = self.a.network_optimizer(tilt)
        for step, (x, _) in enumerate(batches):
            for name, optimizer in optimizers.items():
                loss = module.losses(x, name[0])
                if name == "discriminator" and step % self.a.tilt_every == 0:
                    features = module.discriminator[1](module.discriminator[0](x))
                    f = tilt(features if self.a.train_backbone else features.detach()).mean(0)
                    log_weights = torch.zeros(1).double()
                    if self.a.components > 1:
                        log_weights = gumbel_softmax(tilt.logits, self.a.temperature)
                    for other in cavities:  # f learns from both networks, at the parameters as they are
                        fixed = self.vector(module, other).detach()
                        loss = loss - self.a.weight * self.log_prior(cavities[other], fixed, f, log_weights)
                    f, log_weights = f.detach(), log_weights.detach()
                    own.zero_grad()
                if self.a.step == "loss":
                    theta = self.vector(module, name)
                    loss = loss - self.a.weight * self.log_prior(cavities[name], theta, f, log_weights)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if name == "discriminator" and step % self.a.tilt_every == 0:
                    own.step()
                if self.a.step == "proximal":
                    self.proximal_step(module, name, cavities[name], f, optimizer.param_groups[0]["lr"], log_weights)
        self.pending[client] = self.new_sites(local, cavities, client)

    def moments(self, cavity: GaussianFactor, f: Tensor) -> tuple[Tensor, Tensor]:
        return tilted_moments(cavity.mean, cavity.variance, f[:, None], terms=self.a.terms)[1:]

    def log_prior(self, cavity: GaussianFactor, theta: Tensor, f: Tensor, log_weights: Tensor) -> Tensor:
        return mixture_log_density(theta, *self.moments(cavity, f), log_weights)

    @torch.no_grad()
    def proximal_step(
        self, module: Any, name: str, cavity: GaussianFactor, f: Tensor, lr: float, log_weights: Tensor
    ) -> None:
        theta = self.vector(module, name)
        mean, variance = self.moments(cavity, f)
        share = torch.softmax(log_weights - 0.5 * ((theta - mean) ** 2 / variance + variance.log()).sum(1), 0)[:, None]
        precision, pulled = (share / variance).sum(0), (share * mean / variance).sum(0)
        c = lr * self.a.weight
        nn.utils.vector_to_parameters((theta + c * pulled) / (1 + c * precision), getattr(module, name).parameters())

    @torch.no_grad()
    def new_sites(self, local: Any, cavities: Networks, client: int) -> Networks:
        x = client_sets()[client].tensors[0]
        f = local.tilt(local.module.discriminator[:2](x)).mean(0)
        return {name: GaussianFactor.from_moments(*self.moments(c, f)) / c for name, c in cavities.items()}


def plain_tilt(module: TwoOptimizers, algorithm: Remembering, rounds: int) -> tuple[nn.Module, PlainTilt]:
    whole = WithTilt(copy.deepcopy(module), copy.deepcopy(algorithm.initial))
    work = PlainTilt(module, algorithm)
    server = PlainLoop(work, cohort=lambda round_: plain_cohort(round_, len(SIZES), 3)).run(whole, rounds)
    work.sites |= work.pending
    return server, work
