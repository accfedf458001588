"""Expectation propagation in parameter space, with diagonal Laplace sites."""

import torch
from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server, scalar
from lit_epgan.federated.report import Report
from lit_epgan.inference.gaussian import GaussianFactor


class ExpectationPropagation(FederatedAlgorithm):
    """q(theta) = p0(theta) prod_k g_k(theta): each client's site factor g_k is a diagonal Gaussian at its own optimum.

    Client k, with F_k the running mean of its squared minibatch gradients (diagonal Fisher; never reset):

        cavity        q_k = q / g_k = N(mu, 1/W)
        local step    an optimizer step on the client's own loss, then, outside the optimizer,
                      theta <- (theta + c mu) / (1 + c),   c = lr prior_scale W / (number of other sites)
        new site      g_k = N(theta_k, 1/w_k),   w_k = clip(F_k / s) n_k / mean n

    and the server's model is q's mean, the product-of-Gaussians merge sum w_k theta_k / sum w_k. Sites are reported as
    changes, so that the factor of an absent client stays in the product. The normaliser s, the mean of F over clients
    and parameters of one optimizer, is the previous round's; the first round's comes from a sum of scalars before the
    reports. lr in c is the rate before any schedule.

    EP-GAN, section 4 and algorithm 2, with sites in place of posteriors in the product and its precision where the
    print says variance (docs/errata); the sites are Laplace approximations because the printed tilt does not keep
    the modes of a GAN. Price: two vectors up and two down per client and round; all messages sum.

    Args:
        prior_scale: strength of the cavity as a prior; some hundreds for small GANs, at 100 rounds or more.
        fisher_decay: of the running mean of squared gradients.
        clip: smallest and largest precision of a site, relative to the mean.
        prior_precision: of p0 = N(initial parameters, 1 / prior_precision); 0 is a uniform p0.

    Raises:
        UserError: if an argument is out of its range.
    """

    def __init__(
        self,
        prior_scale: float = 300.0,
        fisher_decay: float = 0.99,
        clip: tuple[float, float] = (0.01, 10.0),
        prior_precision: float = 0.0,
    ) -> None:
        if not prior_scale >= 0:
            raise UserError(f"ExpectationPropagation's prior_scale is {prior_scale}; it must be 0 or more")
        if not 0 <= fisher_decay < 1:
            raise UserError(f"ExpectationPropagation's fisher_decay is {fisher_decay}; it must lie in [0, 1)")
        if not 0 < clip[0] <= clip[1]:
            raise UserError(f"ExpectationPropagation's clip is {tuple(clip)}; give 0 < smallest <= largest")
        if not prior_precision >= 0:
            raise UserError(f"ExpectationPropagation's prior_precision is {prior_precision}; it must be 0 or more")
        self.prior_scale = prior_scale
        self.fisher_decay = fisher_decay
        self.clip = clip
        self.prior_precision = prior_precision
        self._pull: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def start_fit(self, server: Server) -> None:
        if "precision" not in server.state:
            precision = torch.full_like(server.parameters, self.prior_precision, dtype=torch.float64)
            server.state["precision"] = precision
            server.state["precision_mean"] = precision * server.parameters
            server.state["sites"] = scalar(0).to(precision.device)

    def posterior(self, server: Server) -> GaussianFactor:
        """q, the product of the prior and all sites, in float64."""
        return GaussianFactor(server.state["precision"], server.state["precision_mean"])

    def site(self, client: Client) -> GaussianFactor:
        """The client's site factor; uniform before its first report."""
        if "precision" not in client.state:
            return GaussianFactor.uniform(client.server.parameters.double())
        return GaussianFactor(client.state["precision"], client.state["precision_mean"])

    def start_client(self, client: Client) -> None:
        if "fisher" not in client.state:
            client.state["fisher"] = torch.zeros_like(client.server.parameters)
        self._pull = {}
        others = float(client.server.state["sites"]) - ("precision" in client.state)
        if others < 1 and self.prior_precision == 0:
            return
        cavity = self.posterior(client.server) / self.site(client)
        for optimized in client.server.optimized:
            c = optimized.lr * self.prior_scale * cavity.precision / max(others, 1.0)
            shrink = 1 / (1 + c)
            # c mu / (1 + c), without dividing by a precision that p0 may leave at zero
            pull = optimized.lr * self.prior_scale / max(others, 1.0) * cavity.precision_mean * shrink
            dtype = client.server.parameters.dtype
            parts = zip(optimized.parts(pull.to(dtype)), optimized.parts(shrink.to(dtype)), strict=True)
            self._pull[optimized.index] = list(parts)

    def adjust_gradients(self, client: Client, optimized: OptimizedParameters) -> None:
        parameters, gradients = optimized.with_gradient()
        if gradients:
            fisher = optimized.flat.views(client.state["fisher"], parameters)
            torch._foreach_mul_(fisher, self.fisher_decay)
            torch._foreach_addcmul_(fisher, gradients, gradients, value=1 - self.fisher_decay)

    def after_step(self, client: Client, optimized: OptimizedParameters) -> None:
        for theta, (pull, shrink) in zip(optimized.live, self._pull.get(optimized.index, ()), strict=False):
            torch.addcmul(pull, theta, shrink, out=theta)

    def pre_report(self, client: Client) -> Report | None:
        if "normaliser" in client.server.state:
            return None
        return self._normalisers(client)

    def client_report(self, client: Client) -> Report:
        precision = self._precision(client)
        new = GaussianFactor(precision, precision * client.parameters)
        change = new / self.site(client)
        first = "precision" not in client.state
        client.state["precision"], client.state["precision_mean"] = new.precision, new.precision_mean
        return {
            "precision": change.precision,
            "precision_mean": change.precision_mean,
            "sites": scalar(first),
            **self._normalisers(client),
        }

    def server_update(self, server: Server, total: dict[str, Tensor]) -> None:
        for name in ("precision", "precision_mean", "sites"):
            server.state[name] += total[name]
        for name in ("normaliser", "mean_records", "cohort"):
            server.state[name] = total[name]
        server.parameters.copy_(self.posterior(server).mean)

    def _normalisers(self, client: Client) -> Report:
        means = [
            sum(float(part.sum()) for part in optimized.parts(client.state["fisher"]))
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
        s = state["normaliser"] / state["cohort"]
        relative = torch.ones_like(client.server.parameters, dtype=torch.float64)
        fisher = client.state["fisher"].double()
        for optimized, mean in zip(client.server.optimized, s.tolist(), strict=True):
            for part in optimized.slices:
                relative[part] = fisher[part] / max(mean, 1e-30)
        return relative.clamp_(*self.clip) * (client.weight / float(state["mean_records"] / state["cohort"]))
