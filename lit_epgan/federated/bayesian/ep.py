"""Expectation propagation in parameter space, with a Gaussian site factor for each client."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server, scalar
from lit_epgan.federated.bayesian.laplace import LaplaceSites
from lit_epgan.federated.bayesian.site_rule import SiteRule
from lit_epgan.federated.report import Report
from lit_epgan.inference.ep import damped
from lit_epgan.inference.gaussian import GaussianFactor


class ExpectationPropagation(FederatedAlgorithm):
    """q(theta) = p0(theta) prod_k g_k(theta): each client's site factor g_k is a diagonal Gaussian where it trained to.

        cavity        q / g_k = N(mu, 1/W)
        local step    an optimizer step on the client's own loss, then, outside the optimizer,
                      theta <- (theta + c mu) / (1 + c),   c = lr prior_scale W / (number of other sites)
        new site      g_k = N(m_k, 1/w_k),   w_k = clip(relative precision) n_k / mean n,   m_k and it by ``sites``;
                      damped: g_k^(1-d) N(m_k, 1/w_k)^d

    and the server's model is q's mean, the product-of-Gaussians merge sum w_k m_k / sum w_k. Sites are reported as
    changes, so that the factor of an absent client stays in the product. What relative precisions are relative to, a
    mean over clients and over the parameters of one optimizer, is the previous round's; the first round's comes from a
    sum of scalars before the reports. lr in c is the rate before any schedule.

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
        self._pull: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def start_fit(self, server: Server) -> None:
        if "precision" not in server.state:
            precision = torch.full_like(server.parameters, self.prior_precision, dtype=torch.float64)
            server.state["precision"] = precision
            server.state["precision_mean"] = precision * server.parameters
            server.state["sites"] = scalar(0).to(precision.device)
            if self.tied:
                server.state["prior_precision_mean"] = server.state["precision_mean"].clone()

    def prior(self, server: Server) -> GaussianFactor:
        """p0, in float64; kept where sites are tied."""
        mean = server.state["prior_precision_mean"]
        return GaussianFactor(torch.full_like(mean, self.prior_precision), mean)

    def posterior(self, server: Server) -> GaussianFactor:
        """q, the product of the prior and all sites, in float64."""
        return GaussianFactor(server.state["precision"], server.state["precision_mean"])

    def site(self, client: Client) -> GaussianFactor:
        """The client's site factor in q; uniform before its first report."""
        if self.tied:
            return (self.posterior(client.server) / self.prior(client.server)) ** (1 / client.server.clients)
        if "precision" not in client.state:
            return GaussianFactor.uniform(client.server.parameters.double())
        return GaussianFactor(client.state["precision"], client.state["precision_mean"])

    def client_download(self, client: Client) -> Report:
        """q, whose mean is the server's model."""
        return {name: client.server.state[name] for name in ("precision", "precision_mean")}

    def start_client(self, client: Client) -> None:
        self.sites.start_client(client)
        self._pull = {}
        others = self._others(client)
        if others == 0 and self.prior_precision == 0:
            return
        cavity = self.posterior(client.server) / self.site(client)
        for optimized in client.server.optimized:
            c = optimized.lr * self.prior_scale * cavity.precision / (others or 1.0)
            shrink = 1 / (1 + c)
            # c mu / (1 + c), without dividing by a precision that p0 may leave at zero
            pull = optimized.lr * self.prior_scale / (others or 1.0) * cavity.precision_mean * shrink
            dtype = client.server.parameters.dtype
            parts = zip(optimized.parts(pull.to(dtype)), optimized.parts(shrink.to(dtype)), strict=True)
            self._pull[optimized.index] = list(parts)

    def client_batch(self, client: Client, batch: Any) -> Any:
        if client.step:
            self.sites.after_local_step(client)
        return batch

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        self.sites.adjust_gradients(client, optimized)

    def after_step(self, client: Client, optimized: OptimizedParameters) -> None:
        for theta, (pull, shrink) in zip(optimized.live, self._pull.get(optimized.index, ()), strict=False):
            torch.addcmul(pull, theta, shrink, out=theta)

    def end_client(self, client: Client) -> None:
        self.sites.after_local_step(client)

    def pre_report(self, client: Client) -> Report | None:
        if "normaliser" in client.server.state:
            return None
        return self._normalisers(client)

    def client_report(self, client: Client) -> Report:
        precision = self._precision(client)
        new = GaussianFactor(precision, precision * self.sites.centre(client))
        report = {**self._normalisers(client), **(self._factor(new) if self.tied else self._change(client, new))}
        self.sites.end_round(client, keep=not self.tied)
        return report

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        state = server.state
        if self.tied:
            share = float(total["cohort"]) / server.clients
            # q / p0 = g^K, so (g^(1 - d m/K) (prod g_k)^(d/K))^K
            factors = GaussianFactor(total["precision"], total["precision_mean"])
            kept = (self.posterior(server) / self.prior(server)) ** (1 - self.damping * share)
            q = self.prior(server) * kept * factors**self.damping
            state["precision"], state["precision_mean"] = q.precision, q.precision_mean
            state["sites"] = state["sites"] * (1 - share) + total["cohort"]
        else:
            for name in ("precision", "precision_mean", "sites"):
                state[name] += total[name]
        for name in ("normaliser", "mean_records", "cohort"):
            state[name] = total[name]
        server.parameters.copy_(self.posterior(server).mean)

    def _others(self, client: Client) -> float:
        """How many sites of others the cavity holds."""
        sites, clients = float(client.server.state["sites"]), client.server.clients
        return sites * (clients - 1) / clients if self.tied else sites - ("precision" in client.state)

    def _change(self, client: Client, new: GaussianFactor) -> Report:
        old, first = self.site(client), "precision" not in client.state
        new = damped(old, new, self.damping)
        client.state["precision"], client.state["precision_mean"] = new.precision, new.precision_mean
        return {**self._factor(new / old), "sites": scalar(first)}

    def _factor(self, factor: GaussianFactor) -> Report:
        return {"precision": factor.precision, "precision_mean": factor.precision_mean}

    def _normalisers(self, client: Client) -> Report:
        statistic = self.sites.statistic(client)
        means = [
            sum(float(part.sum()) for part in optimized.parts(statistic))
            / max(1, sum(s.stop - s.start for s in optimized.slices))
            for optimized in client.server.optimized
        ]
        return {
            "normaliser": torch.tensor(means, dtype=torch.float64),
            "mean_records": scalar(client.weight),
            "cohort": scalar(1),
        }

    def _precision(self, client: Client) -> Tensor:
        state = client.server.state
        means = state["normaliser"] / state["cohort"]
        relative = torch.ones_like(client.server.parameters, dtype=torch.float64)
        statistic = self.sites.statistic(client).double()
        for optimized, mean in zip(client.server.optimized, means.tolist(), strict=True):
            for part in optimized.slices:
                relative[part] = self.sites.relative_precision(statistic[part], mean)
        records = float(state["mean_records"] / state["cohort"])
        return relative.clamp_(*self.sites.clip) * (client.weight / records)
