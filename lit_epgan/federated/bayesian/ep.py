"""Expectation propagation in parameter space, with a Gaussian site factor for each client."""

import torch
from torch import Tensor

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
from lit_epgan.federated.bayesian.laplace import LaplaceSites
from lit_epgan.federated.bayesian.site_rule import SiteRule
from lit_epgan.inference.gaussian import GaussianFactor, damped

NORMALISERS = ("normaliser", "mean_records", "cohort")
Q = GaussianSites()


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

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(
        self,
        prior_scale: float = 300.0,
        prior_precision: float = 0.0,
        sites: SiteRule | None = None,
        damping: float = 1.0,
        tied: bool = False,
    ) -> None:
        if not prior_scale >= 0:
            raise UserError(f"ExpectationPropagation's prior_scale is {prior_scale}; it must be 0 or more")
        if not prior_precision >= 0:
            raise UserError(f"ExpectationPropagation's prior_precision is {prior_precision}; it must be 0 or more")
        if not 0 < damping <= 1:
            raise UserError(f"ExpectationPropagation's damping is {damping}; it must lie in (0, 1], 1 for none")
        self.prior_scale = prior_scale
        self.prior_precision = prior_precision
        self.sites = sites if sites is not None else LaplaceSites()
        self.damping = damping
        self.tied = tied

    def start(self, server: Server) -> None:
        """q = p0, no sites."""
        precision = torch.full_like(server.parameters, self.prior_precision, dtype=torch.float64)
        prior = GaussianFactor(precision, precision * server.parameters)
        if self.tied and "prior_precision_mean" not in server.state:
            server.state["prior_precision_mean"] = prior.precision_mean.clone()
        server.state.setdefault("sites", scalar(0).to(precision.device))
        Q.start(server.state, prior)

    def posterior(self, server: Server) -> GaussianFactor:
        """q, the product of the prior and all sites, in float64."""
        return Q.of(server.state)

    def prior(self, tensors: Broadcast) -> GaussianFactor:
        """p0, in float64; kept by the server, and sent once, where sites are tied."""
        mean = tensors["prior_precision_mean"]
        return GaussianFactor(torch.full_like(mean, self.prior_precision), mean)

    def exchanges(self, start: int, stop: int) -> int:
        """One a round, and that of the normalisers in the first."""
        return super().exchanges(start, stop) + (start == 0)

    def round(self, server: Server) -> Rounds:
        """q out, the sites' changes back; in the first round the normalisers before them."""
        state = server.state
        kept = {"prior_precision_mean": 0} if self.tied else {}
        total = yield Exchange(self._sent(server), kept=kept)
        if float(total["cohort"]) == 0:  # no client took a step
            return
        normalisers = {name: total[name] for name in NORMALISERS}
        if "normaliser" not in state:
            total = yield Exchange(normalisers, question="site", training=False)
        if self.tied:
            share = float(total["cohort"]) / server.clients
            # q / p0 = g^K, so (g^(1 - d m/K) (prod g_k)^(d/K))^K
            prior = self.prior(state)
            left = (Q.of(state) / prior) ** (1 - self.damping * share)
            Q.keep(state, prior * left * Q.of(total.sums) ** self.damping)
            state["sites"] = state["sites"] * (1 - share) + total["cohort"]
        else:
            Q.update(state, total)
            state["sites"] += total["sites"]
        state.update(normalisers)
        server.parameters.copy_(Q.of(state).mean)

    def _sent(self, server: Server) -> Broadcast:
        """q, whose mean is the server's model; the model itself where q has no mean yet, or the module moved it."""
        state, dtype = server.state, server.parameters.dtype
        names = ["sites", *(["prior_precision_mean"] if self.tied else [])]
        sent = {name: state[name] for name in (*names, *NORMALISERS) if name in state}
        if not state["sites"]:
            return {**sent, "parameters": server.parameters}
        moved = not torch.equal(server.parameters, Q.of(state).mean.to(dtype))
        return {**sent, **Q.broadcast(state), **({"parameters": server.parameters} if moved else {})}

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """Training towards the tilted distribution; the site by itself where it had to wait for the normalisers."""
        return [(TiltedTraining if question == "train" else LateSite)(self, client, received)]


class SiteReport:
    """What a client's site is, and how it changes q, from a statistic and a centre of its training.

    Args:
        settings: the algorithm.
        client: who reports.
        received: q and the normalisers.
    """

    def __init__(self, settings: ExpectationPropagation, client: Client, received: Broadcast) -> None:
        self.settings, self.client, self.received = settings, client, received

    @property
    def posterior(self) -> GaussianFactor:
        """q; before the first site it is p0, which is not sent."""
        if Q.known(self.received):
            return Q.of(self.received)
        initial = self.received["parameters"].double()
        precision = torch.full_like(initial, self.settings.prior_precision)
        return GaussianFactor(precision, precision * initial)

    def site(self) -> GaussianFactor:
        """The client's site factor in q; uniform before its first report."""
        if self.settings.tied:
            return (self.posterior / self.settings.prior(self.received)) ** (1 / self.client.clients)
        return Q.own(self.client.state, self.client.parameters.double())

    def cavity(self) -> GaussianFactor:
        """q without the client's site."""
        return self.posterior / self.site()

    def others(self) -> float:
        """How many sites of others the cavity holds."""
        sites, clients = float(self.received["sites"]), self.client.clients
        return sites * (clients - 1) / clients if self.settings.tied else sites - Q.known(self.client.state)

    def normalisers(self, statistic: Tensor) -> Report:
        """Sums that relative precisions need: means of the ``statistic`` (d,), records, clients."""
        means = [
            sum(float(part.sum()) for part in optimized.parts(statistic))
            / max(1, sum(s.stop - s.start for s in optimized.slices))
            for optimized in self.client.optimized
        ]
        return {
            "normaliser": torch.tensor(means, dtype=torch.float64),
            "mean_records": Count(self.client.weight, True),
            "cohort": Count(1),
        }

    def of(self, statistic: Tensor, centre: Tensor) -> Report:
        """The new site, as a change of the old one (as itself where sites are tied); the client keeps it."""
        precision = self._precision(statistic)
        new = GaussianFactor(precision, precision * centre)
        if self.settings.tied:
            return {**Q.report(new), "cohort": Count(1)}
        old, first = self.site(), not Q.known(self.client.state)
        new = damped(old, new, self.settings.damping)
        Q.keep(self.client.state, new)
        return {**Q.report(new / old), "sites": Count(first), "cohort": Count(1)}

    def unchanged(self) -> Report:
        """Of a client that has learnt nothing: it counts neither in q nor in the normalisers."""
        return {
            **Q.report(GaussianFactor.uniform(self.client.parameters.double())),
            "normaliser": torch.zeros(len(self.client.optimized), dtype=torch.float64),
            **{name: Count(0) for name in ("mean_records", "cohort", "sites")},
        }

    def _precision(self, statistic: Tensor) -> Tensor:
        received, rule = self.received, self.settings.sites
        means = received["normaliser"] / received["cohort"]
        relative = torch.ones_like(statistic, dtype=torch.float64)
        statistic = statistic.double()
        for optimized, mean in zip(self.client.optimized, means.tolist(), strict=True):
            for part in optimized.slices:
                relative[part] = rule.relative_precision(statistic[part], mean)
        records = float(received["mean_records"] / received["cohort"])
        return relative.clamp_(*rule.clip) * (self.client.weight / records)


class TiltedTraining(Training):
    """The client's own steps, each followed by a step towards the cavity; at the end its new site."""

    def __init__(self, settings: ExpectationPropagation, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.settings, self.rule = settings, settings.sites
        self.reports = SiteReport(settings, client, received)

    def start(self) -> Tensor:
        """q's mean, or the model where it came by itself."""
        if "parameters" in self.received:
            return self.received["parameters"]
        return self.client.remember("q.mean", lambda: self.reports.posterior.mean.to(self.client.flat.dtype))

    def begin(self) -> None:
        """The cavity, and from it the proximal step's factors for each optimizer."""
        self.rule.begin(self.client)
        self._pull: dict[int, list[tuple[Tensor, Tensor]]] = {}
        others, settings = self.reports.others(), self.settings
        if others == 0 and settings.prior_precision == 0:
            return
        cavity, dtype = self.reports.cavity(), self.client.flat.dtype
        for optimized in self.client.optimized:
            c = optimized.lr * settings.prior_scale * cavity.precision / (others or 1.0)
            shrink = 1 / (1 + c)
            # c mu / (1 + c), without dividing by a precision that p0 may leave at zero
            pull = optimized.lr * settings.prior_scale / (others or 1.0) * cavity.precision_mean * shrink
            parts = zip(optimized.parts(pull.to(dtype)), optimized.parts(shrink.to(dtype)), strict=True)
            self._pull[optimized.index] = list(parts)

    def adjust_gradients(self, optimized: OptimizedParameters) -> None:
        """The rule looks at the gradients."""
        self.rule.adjust_gradients(self.client, optimized)

    def after_step(self, optimized: OptimizedParameters) -> None:
        """theta <- (theta + c mu) / (1 + c)."""
        for theta, (pull, shrink) in zip(optimized.live, self._pull.get(optimized.index, ()), strict=False):
            torch.addcmul(pull, theta, shrink, out=theta)

    def after_local_step(self) -> None:
        """The rule looks at the parameters."""
        self.rule.after_local_step(self.client)

    def report(self) -> Report:
        """The normalisers and the site; where they are not known yet, what the site will be made of is kept."""
        client, rule = self.client, self.rule
        if not rule.knows(client):
            rule.end_round(client, keep=not self.settings.tied)
            return self.reports.unchanged()
        statistic, centre = rule.statistic(client), rule.centre(client)
        report = dict(self.reports.normalisers(statistic))
        if "normaliser" in self.received:
            report |= self.reports.of(statistic, centre)
        else:
            client.state |= {"late.statistic": statistic.clone(), "late.centre": centre.clone()}
        rule.end_round(client, keep=not self.settings.tied)
        return report


class LateSite(Work):
    """The site of a training that is over, once everybody's normalisers are known."""

    def __init__(self, settings: ExpectationPropagation, client: Client, received: Broadcast) -> None:
        super().__init__(client, received)
        self.reports = SiteReport(settings, client, received)

    def report(self) -> Report:
        """The site's change."""
        state = self.client.state
        if "late.statistic" not in state:
            return self.reports.unchanged()
        return self.reports.of(state.pop("late.statistic"), state.pop("late.centre"))
