# ruff: noqa: B027  a rule has nothing to do where it does not say so
"""Expectation propagation in parameter space, with a Gaussian site factor for each client."""

from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lit_epgan.bayes.gaussian import GaussianFactor, damped, factor_of, own_site, tensors_of
from lit_epgan.engine import (
    Algorithm,
    Broadcast,
    Client,
    Exchange,
    Message,
    OptimizedParameters,
    Rounds,
    Server,
    merged,
    scalar,
)
from lit_epgan.lib.bounds import at_least, within
from lit_epgan.lib.errors import UserError

TINY = 1e-30  # of a variance


class SiteRule(ABC):
    """Base of the kinds of site that ``ExpectationPropagation`` can keep: a centre, and relative precisions around it.

    A rule watches the local steps and gathers a ``statistic`` of one positive number per parameter; its mean over the
    clients and over the parameters of one optimizer is published, so that precisions are relative to it.

    Args:
        clip: smallest and largest precision of a site, relative to the mean.
    """

    def __init__(self, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        if not 0 < clip[0] <= clip[1]:
            raise UserError(f"{type(self).__name__}' clip is {tuple(clip)}; give 0 < smallest <= largest")
        self.clip = clip

    def begin(self, client: Client) -> None:
        """When a client has loaded the server's parameters: get ``client.state`` ready."""

    def gradient(self, client: Client, part: OptimizedParameters) -> None:
        """Look at the gradients before one optimizer's step."""

    def after_local_step(self, client: Client) -> None:
        """Look at the parameters after a whole local step, which may have been several optimizers'."""

    def knows(self, client: Client) -> bool:
        """Whether the client has taken the steps that a site is made of; otherwise its site stays what it was."""
        return client.step > 0

    @abstractmethod
    def statistic(self, client: Client) -> Tensor:
        """The client's numbers (d,), non-negative."""

    @abstractmethod
    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        """Precisions, about 1 on average, of one optimizer's part of the statistic and its mean over all clients."""

    def centre(self, client: Client) -> Tensor:
        """The site's mean (d,)."""
        return client.parameters

    def end_round(self, client: Client, keep: bool) -> None:
        """After the report: take out of ``client.state`` what the next round does not need; without ``keep``, all."""


class LaplaceSites(SiteRule):
    """N(theta_k, 1/w_k) with w_k relative to F_k / s: where the client ends, as precise as its gradients are large.

    F_k is the running mean of the client's squared minibatch gradients, its diagonal (empirical) Fisher information,
    kept from round to round; s is the mean of F over clients and over the parameters of one optimizer.

    Args:
        fisher_decay: of the running mean of squared gradients.
        clip: smallest and largest precision of a site, relative to the mean.
    """

    def __init__(self, fisher_decay: float = 0.99, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        super().__init__(clip)
        within("[0, 1)", self, fisher_decay=fisher_decay)
        self.fisher_decay = fisher_decay

    def begin(self, client: Client) -> None:
        if "fisher" not in client.state:
            client.state["fisher"] = torch.zeros_like(client.parameters)

    def gradient(self, client: Client, part: OptimizedParameters) -> None:
        """F <- decay F + (1 - decay) g^2."""
        parameters, gradients = part.with_gradient()
        if gradients:
            fisher = part.flat.views(client.state["fisher"], parameters)
            torch._foreach_mul_(fisher, self.fisher_decay)
            torch._foreach_addcmul_(fisher, gradients, gradients, value=1 - self.fisher_decay)

    def statistic(self, client: Client) -> Tensor:
        return client.state["fisher"]

    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        return statistic / max(mean, 1e-30)

    def end_round(self, client: Client, keep: bool) -> None:
        if not keep:
            client.state.pop("fisher")


class SampleMoments(SiteRule):
    """N(mean of theta, 1/w_k) with w_k relative to s / V_k: where the client's chain dwells, and how widely it ranges.

    Mean and variance V_k are those of the parameters after each of the last local steps of the round (Welford's
    recursion, on flat vectors), whatever drives them: SGHMC, which then samples the client's tilted distribution, or
    the minibatch noise of any optimizer. s is the mean of V over clients and over the parameters of one optimizer, so
    that a chain's temperature does not matter. A parameter that never moves gets the largest precision.

    FedPA (Al-Shedivat et al. 2021) forms its clients' posteriors from such samples, too.

    Args:
        share: of the round's local steps, the last, that count as samples; all of them where a client does not know
            how many there will be.
        clip: smallest and largest precision of a site, relative to the mean.
    """

    def __init__(self, share: float = 0.5, clip: tuple[float, float] = (0.01, 10.0)) -> None:
        super().__init__(clip)
        within("(0, 1]", self, share=share)
        self.share = share

    def after_local_step(self, client: Client) -> None:
        n = self._samples(client)
        if n == 1:
            client.state["samples.mean"] = client.parameters.clone()
            client.state["samples.squares"] = torch.zeros_like(client.parameters)
        elif n > 1:
            drift = client.parameters - client.state["samples.mean"]
            client.state["samples.mean"].add_(drift, alpha=1 / n)
            client.state["samples.squares"].addcmul_(drift, drift, value=1 - 1 / n)

    def knows(self, client: Client) -> bool:
        return self._samples(client) > 0

    def statistic(self, client: Client) -> Tensor:
        return client.state["samples.squares"] / self._samples(client)

    def relative_precision(self, statistic: Tensor, mean: float) -> Tensor:
        return max(mean, TINY) / statistic.clamp_min(TINY)

    def centre(self, client: Client) -> Tensor:
        """The samples' mean (d,)."""
        return client.state["samples.mean"]

    def end_round(self, client: Client, keep: bool) -> None:
        for name in ("samples.mean", "samples.squares"):
            client.state.pop(name, None)

    def _samples(self, client: Client) -> int:
        """How many samples there are by now; zero or less: the first is yet to come."""
        skipped = 0 if client.steps is None else client.steps - max(1, int(self.share * client.steps))
        return client.step - skipped


class ExpectationPropagation(Algorithm):
    """q(theta) = p0(theta) prod_k g_k(theta): each client's site factor g_k is a diagonal Gaussian where it trained to.

        cavity        q / g_k = N(mu, 1/W)
        local step    an optimizer step on the client's own loss, then, outside the optimizer,
                      theta <- (theta + c mu) / (1 + c),   c = lr prior_scale W / (number of other sites)
        new site      g_k = N(m_k, 1/w_k),   w_k = clip(relative precision) n_k / mean n,   m_k and it by ``sites``;
                      damped: g_k^(1-d) N(m_k, 1/w_k)^d

    and the server's model is q's mean, the product-of-Gaussians merge sum w_k m_k / sum w_k. Sites are reported as
    changes, so that the factor of an absent client stays in the product. What relative precisions are relative to, a
    mean over clients and over the parameters of one optimizer, is the previous round's; in the first round a second
    exchange asks for the sites once the sum of these scalars is known. Until then every client keeps what its site will
    be made of, two vectors: clip is not linear, so the server cannot add sites up first and scale their sum later. lr
    in c is the rate before any schedule.

    ``tied`` is stochastic EP (Li, Hernandez-Lobato and Turner 2015): q = p0 g^K with one site for all K clients, the
    cavity p0 g^(K-1) for everyone, and g <- g^(1-d/K) g_k^(d/K) for every client of the cohort. Neither the server nor
    a client keeps anything of a single client from round to round.

    EP-GAN, section 4 and algorithm 2, with sites in place of posteriors in the product and its precision where the
    print says variance (docs/errata); ``TiltedExpectationPropagation`` has the printed tilt, which does not keep the
    modes of a GAN. Price: two vectors up and two down per client and round; all messages sum.

    Args:
        prior_scale: strength of the cavity as a prior; some hundreds for small GANs, at 100 rounds or more.
        prior_precision: of p0 = N(initial parameters, 1 / prior_precision); 0 is a uniform p0.
        sites: where a site lies, and how precise it is; ``LaplaceSites()`` by default.
        damping: d in (0, 1]; 1 replaces a site at once.
        tied: one site for all clients.
    """

    class Report(Message):
        """What leaves a client; in the first round its site follows once everybody's normalisers are known.

        Attributes:
            normaliser: mean of its statistic over each optimizer's parameters (optimizers,).
            records: n_k.
            site: its new site over the old one; the new one itself where sites are tied.
            new: whether it has had no site before.
            cohort: 1; 0 of a client that has learnt nothing.
        """

        normaliser: Tensor | None = merged("sum", default=None)
        records: float | None = merged("records", default=None)
        site: GaussianFactor | None = merged("product", GaussianFactor, like="precision", default=None)
        new: float | None = merged("count", default=None)
        cohort: float = merged("count")

    def __init__(
        self,
        prior_scale: float = 300.0,
        prior_precision: float = 0.0,
        sites: SiteRule | None = None,
        damping: float = 1.0,
        tied: bool = False,
    ) -> None:
        at_least(0, self, prior_scale=prior_scale, prior_precision=prior_precision)
        within("(0, 1]", self, damping=damping)
        self.prior_scale, self.prior_precision = prior_scale, prior_precision
        self.sites = sites if sites is not None else LaplaceSites()
        self.damping, self.tied = damping, tied

    # The server ------------------------------------------------------------------------------------------------------

    def start(self, server: Server) -> None:
        state, prior = server.state, self._prior_at(server.parameters)
        if self.tied:
            state.setdefault("prior_precision_mean", prior.precision_mean.clone())
        state.setdefault("sites", scalar(0).to(prior.precision.device))
        state |= tensors_of(prior) | state

    def posterior(self, server: Server) -> GaussianFactor:
        """q, the product of the prior and all sites, in float64."""
        return factor_of(server.state)

    def prior(self, tensors: Broadcast) -> GaussianFactor:
        """p0, in float64; kept by the server, and sent once, where sites are tied."""
        mean = tensors["prior_precision_mean"]
        return GaussianFactor(torch.full_like(mean, self.prior_precision), mean)

    def exchanges(self, start: int, stop: int) -> int:
        """One a round, and that of the normalisers in the first."""
        return super().exchanges(start, stop) + (start == 0)

    def broadcast(self, server: Server) -> Broadcast:
        """q, whose mean is the server's model; the model itself where q has no mean yet, or the module moved it."""
        state, model = server.state, server.parameters
        names = ("sites", "normaliser", "mean_records", "prior_precision_mean")
        sent = {name: state[name] for name in names if name in state}
        if not state["sites"]:
            return {**sent, "parameters": model}
        q = factor_of(state)
        moved = not torch.equal(model, q.mean.to(model.dtype))
        return {**sent, **tensors_of(q), **({"parameters": model} if moved else {})}

    def round(self, server: Server) -> Rounds:
        """q out, the sites' changes back; in the first round the normalisers before them."""
        state, q = server.state, factor_of(server.state)
        kept = {"prior_precision_mean": 0} if self.tied else {}
        report = yield Exchange(self.broadcast(server), kept=kept)
        if float(report.cohort) == 0:  # no client took a step
            return
        means = {"normaliser": report.normaliser / report.cohort, "mean_records": report.records / report.cohort}
        if "normaliser" not in state:
            report = yield Exchange(means, question="late_site", training=False)
        if self.tied:
            # q / p0 = g^K, so (g^(1 - d m/K) (prod g_k)^(d/K))^K
            share, prior = float(report.cohort) / server.clients, self.prior(state)
            q = prior * (q / prior) ** (1 - self.damping * share) * report.site**self.damping
            state["sites"] = state["sites"] * (1 - share) + report.cohort
        else:
            q = q * report.site
            state["sites"] += report.new
        state |= tensors_of(q) | means
        server.parameters.copy_(q.mean)

    # A client --------------------------------------------------------------------------------------------------------

    def train(self, client: Client, sent: Broadcast) -> "ExpectationPropagation.Report":
        """Steps towards the tilted distribution; then the site, or what it will be made of is kept."""
        rule, q = self.sites, self._posterior(sent)
        start = sent.get("parameters")
        if start is None:
            start = client.remember("q.mean", lambda: q.mean.to(client.flat.dtype))
        rule.begin(client)
        pulls = self._pulls(client, *self.cavity(client, sent))

        def pull(part: OptimizedParameters) -> None:
            for theta, (towards, shrink) in zip(part.live, pulls.get(part.index, ()), strict=False):
                torch.addcmul(towards, theta, shrink, out=theta)

        gradient, after_local_step = partial(rule.gradient, client), partial(rule.after_local_step, client)
        client.fit(start, gradient=gradient, after_step=pull, after_local_step=after_local_step)
        if not rule.knows(client):
            report = self._unchanged(client)
        else:
            statistic, centre, site = rule.statistic(client), rule.centre(client), dict[str, Any]()
            if "normaliser" in sent:
                site = self._new_site(client, sent, statistic, centre)
            else:
                client.state |= {"late.statistic": statistic.clone(), "late.centre": centre.clone()}
            means = torch.tensor([_mean(part.parts(statistic)) for part in client.optimized], dtype=torch.float64)
            report = self.Report(normaliser=means, records=client.records, cohort=1, **site)
        rule.end_round(client, keep=not self.tied)
        return report

    def late_site(self, client: Client, sent: Broadcast) -> "ExpectationPropagation.Report":
        """The site of a training that is over, once everybody's normalisers are known."""
        state = client.state
        if "late.statistic" not in state:
            return self._unchanged(client)
        site = self._new_site(client, sent, state.pop("late.statistic"), state.pop("late.centre"))
        return self.Report(cohort=1, **site)

    def cavity(self, client: Client, sent: Broadcast) -> tuple[GaussianFactor, float]:
        """q without the client's site, and how many sites of others it holds."""
        sites = float(sent["sites"])
        others = sites * (client.clients - 1) / client.clients if self.tied else sites - ("precision" in client.state)
        return self._posterior(sent) / self._site(client, sent), others

    def _site(self, client: Client, sent: Broadcast) -> GaussianFactor:
        """The client's site factor in q; uniform before its first report."""
        if self.tied:
            return (self._posterior(sent) / self.prior(sent)) ** (1 / client.clients)
        return own_site(client.state, client.parameters.double())

    def _posterior(self, sent: Broadcast) -> GaussianFactor:
        """q; before the first site it is p0, which is not sent."""
        return factor_of(sent) if "precision" in sent else self._prior_at(sent["parameters"])

    def _prior_at(self, initial: Tensor) -> GaussianFactor:
        precision = torch.full_like(initial, self.prior_precision, dtype=torch.float64)
        return GaussianFactor(precision, precision * initial)

    def _pulls(self, client: Client, cavity: GaussianFactor, others: float) -> dict[int, list[tuple[Tensor, Tensor]]]:
        """By optimizer c mu / (1 + c) and 1 / (1 + c) in step with its live parameters; none where q is uniform."""
        if others == 0 and self.prior_precision == 0:
            return {}
        pulls, dtype = {}, client.flat.dtype
        for part in client.optimized:
            strength = part.lr * self.prior_scale / (others or 1.0)
            shrink = 1 / (1 + part.lr * self.prior_scale * cavity.precision / (others or 1.0))
            # c mu / (1 + c), without dividing by a precision that p0 may leave at zero
            towards = strength * cavity.precision_mean * shrink
            pulls[part.index] = list(zip(part.parts(towards.to(dtype)), part.parts(shrink.to(dtype)), strict=True))
        return pulls

    def _new_site(self, client: Client, sent: Broadcast, statistic: Tensor, centre: Tensor) -> dict[str, Any]:
        """A report's fields: the new site, as a change of the old one unless sites are tied; the client keeps it."""
        rule, statistic = self.sites, statistic.double()
        relative = torch.ones_like(statistic)
        for part, mean in zip(client.optimized, sent["normaliser"].tolist(), strict=True):
            for where in part.slices:
                relative[where] = rule.relative_precision(statistic[where], mean)
        precision = relative.clamp_(*rule.clip) * (client.records / float(sent["mean_records"]))
        new = GaussianFactor(precision, precision * centre)
        if self.tied:
            return {"site": new}
        first, old = "precision" not in client.state, self._site(client, sent)
        new = damped(old, new, self.damping)
        client.state |= tensors_of(new)
        return {"site": new / old, "new": first}

    def _unchanged(self, client: Client) -> "ExpectationPropagation.Report":
        """Of a client that has learnt nothing: it counts neither in q nor in the normalisers."""
        uniform = GaussianFactor.uniform(client.parameters.double())
        zeros = torch.zeros(len(client.optimized), dtype=torch.float64)
        return self.Report(normaliser=zeros, records=0, site=uniform, new=0, cohort=0)


def _mean(parts: list[Tensor]) -> float:
    return sum(float(part.sum()) for part in parts) / max(1, sum(part.numel() for part in parts))
