"""Partitioned variational inference: each client's site is what its own records add to the posterior of all."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.bayes.gaussian import GaussianFactor, factor_of, own_site, tensors_of
from lit_epgan.bayes.posterior import GaussianPosterior
from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters, Server, merged
from lit_epgan.lib.bounds import above, within
from lit_epgan.lib.errors import UserError

SITES = "sites_"  # in the server's state: p0 prod_k t_k, where q is not the same


class PartitionedVariationalInference(Algorithm):
    """q(theta) = p0(theta) prod_k t_k(theta), diagonal Gaussians: each client betters q by its records, then its t_k.

        train       q_k = argmin  E_q'[n_k l_k / T + log t_k] / rho + KL(q' || q)
        new site    t_k <- t_k (q_k / q)^(d rho)
        merge       q <- p0 prod_k t_k

    l_k is the loss, the mean over records of the negative log-likelihood. With T = rho = 1 it is Bui et al. 2018 (arXiv
    1811.11206, algorithm 1, all clients at once), whose cavity is q / t_k. With a penalty rho it is the augmented
    Lagrangian IVON-ADMM (Moellenhoff et al. 2025, arXiv 2506.13150, figure 4): of K clients, the server merges

        q <- (mean_k q_k)^(1-a) (p0 prod_k t_k)^a,    a = 1 / (1 + K rho),    the mean one of natural parameters

    A client's optimum is found by its module's own steps at parameters that are drawn from q_k, m + sigma e with
    e ~ N(0, I), one draw a step. The optimizer moves the mean m by the gradient g of l_k and of the site's share; then
    m is pulled towards q's mean mu. The precision follows from Price's estimate of second derivatives, as in IVON (Shen
    et al. 2024, arXiv 2402.17641, algorithm 1, whose last term keeps h + delta positive). With N = n_k / (T rho) and
    t_k = exp(-S theta^2 / 2 + v theta):

        delta       q's precision / N
        gradient    g <- g + (v - S m) T / n_k
        pull        m <- (m + lr delta mu) / (1 + lr delta)
        estimate    f = g e / sigma - S T / n_k       with g before that
        h           <- h + r (f - h) + r^2 (f - h)^2 / (2 (h + delta)),    r = 1 - decay
        precision   N h + q's precision

    Price: two vectors up and two down per client and round; all messages sum.

    Args:
        prior_precision: of p0 = N(initial parameters, 1 / prior_precision).
        decay: of the running mean h of second derivatives.
        initial: h of every parameter in a client's first round; in later ones it begins at 0, as q_k does at q.
        damping: d in (0, 1]. All clients change their sites at once, so that too large a d goes too far.
        temperature: T; below 1 the posterior is narrower, and steps are less noisy.
        penalty: rho; without one the server merges as Bui et al. do.

    Raises:
        UserError: the module has several optimizers, as a GAN has.
    """

    class Report(Message):
        """What leaves a client: its new site over the old one; uniform of a client that has taken no step."""

        site: GaussianFactor = merged("product", GaussianFactor, like="precision")
        answers: float = merged("count")

    def __init__(
        self,
        prior_precision: float = 1.0,
        decay: float = 0.99,
        initial: float = 1.0,
        damping: float = 0.3,
        temperature: float = 1.0,
        penalty: float | None = None,
    ) -> None:
        above(0, self, prior_precision=prior_precision, initial=initial, temperature=temperature, penalty=penalty)
        within("[0, 1)", self, decay=decay)
        within("(0, 1]", self, damping=damping)
        self.prior_precision, self.decay, self.initial, self.damping = prior_precision, decay, initial, damping
        self.temperature, self.penalty = temperature, penalty

    @property
    def rho(self) -> float:
        """The penalty, 1 without one."""
        return 1.0 if self.penalty is None else self.penalty

    def start(self, server: Server) -> None:
        initial = server.parameters.double()
        precision = torch.full_like(initial, self.prior_precision)
        prior = GaussianFactor(precision, precision * initial)
        held = tensors_of(prior) | ({} if self.penalty is None else tensors_of(prior, SITES))
        server.state |= held | server.state

    def broadcast(self, server: Server) -> Broadcast:
        """q, whose mean is the server's model."""
        return tensors_of(factor_of(server.state))

    def train(self, client: Client, sent: Broadcast) -> "PartitionedVariationalInference.Report":
        """Steps at draws of q_k; then the site's change."""
        if len(client.optimized) > 1:
            raise UserError(
                f"{type(self).__name__} needs a module with one optimizer; {len(client.optimized)} are there"
            )
        q = factor_of(sent)
        site = own_site(client.state, q.mean)
        draws = _Draws(self, client, q, site)
        client.fit(q.mean.to(client.flat.dtype), batch=draws.draw, gradient=draws.gradient, after_step=draws.pull)
        draws.to_mean()
        if client.step == 0:
            return self.Report(site=GaussianFactor.uniform(q.mean), answers=0)
        precision = q.precision + draws.records * draws.curvature.double()
        change = (GaussianFactor(precision, precision * client.parameters.double()) / q) ** (self.damping * self.rho)
        client.state |= tensors_of(site * change)
        return self.Report(site=change, answers=1)

    def merge(self, server: Server, report: Any) -> None:
        q = factor_of(server.state)
        if self.penalty is None:
            q = q * report.site
        elif float(report.answers):
            sites = factor_of(server.state, SITES) * report.site
            mean = q * report.site ** (1 / (self.damping * self.penalty * float(report.answers)))
            share = 1 / (1 + server.clients * self.penalty)
            q = mean ** (1 - share) * sites**share
            server.state |= tensors_of(sites, SITES)
        server.state |= tensors_of(q)
        server.parameters.copy_(q.mean)

    def posterior(self, state: Broadcast) -> GaussianPosterior:
        """q of a server's state, as a checkpoint has it: its mean and precision (d,)."""
        q = factor_of(state)
        return GaussianPosterior(q.mean, q.precision - self.prior_precision, self.prior_precision)


class _Draws:
    """A client's steps at parameters drawn from q_k, while the optimizer moves its mean.

    Attributes:
        curvature: h (d,), the running mean of second derivatives, the site's share among them.
    """

    def __init__(
        self, algorithm: PartitionedVariationalInference, client: Client, q: GaussianFactor, site: GaussianFactor
    ) -> None:
        self._algorithm, self._client, self._new = algorithm, client, "precision" not in client.state
        self._precision, self._centre, self._site, self._pull = (
            each.to(client.flat.dtype) for each in (q.precision, q.mean, site.precision, site.precision_mean)
        )
        self._mean: Tensor | None = None

    @property
    def records(self) -> float:
        """N, as many as the client's records count beside q."""
        return self._client.records / (self._algorithm.temperature * self._algorithm.rho)

    def draw(self, batch: Any) -> Any:
        """Put a draw in the mean's place before the step's first batch goes through the module."""
        client = self._client
        if client.step == 1:  # the number of records is known by now
            self.curvature = torch.full_like(self._precision, self._algorithm.initial if self._new else 0)
            share = self._algorithm.temperature / client.records
            self._site, self._pull = self._site * share, self._pull * share
        if self._mean is None:
            self._mean = client.parameters.clone()
            self._noise = torch.randn_like(self._mean)
            self._sigma = (self._precision + self.records * self.curvature).rsqrt()
            client.parameters.addcmul_(self._noise, self._sigma)
        return batch

    def gradient(self, part: OptimizedParameters) -> None:
        """Learn the second derivatives, go back to the mean, and add the site's share."""
        parameters, gradients = part.with_gradient()
        found, rest = torch.zeros_like(self._noise), 1 - self._algorithm.decay
        torch._foreach_copy_(part.flat.views(found, parameters), gradients)
        delta = self._precision / self.records
        towards = found * self._noise / self._sigma - self._site - self.curvature
        self.curvature += rest * towards + (rest * towards).square() / (2 * (self.curvature + delta))
        self.to_mean()
        share = torch.addcmul(self._pull, self._site, self._client.parameters, value=-1)
        torch._foreach_add_(gradients, part.flat.views(share, parameters))

    def pull(self, part: OptimizedParameters) -> None:
        """m <- (m + lr delta mu) / (1 + lr delta), mu q's mean: a step that no precision makes too long."""
        strength = part.lr * self._precision / self.records
        for m, c, mu in zip(part.live, part.parts(strength), part.parts(self._centre), strict=True):
            m.addcmul_(c, mu).div_(1 + c)

    def to_mean(self) -> None:
        """Take the draw back, if one is in the mean's place."""
        if self._mean is not None:
            self._client.flat.load(self._mean)
            self._mean = None
