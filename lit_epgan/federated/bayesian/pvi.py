"""Partitioned variational inference: each client's site is what its own records add to the posterior of all."""

from typing import Any

import torch
from torch import Tensor

from lit_epgan.bayes.gaussian import GaussianFactor, damped, factor_of, own_site, tensors_of
from lit_epgan.bayes.posterior import GaussianPosterior
from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters, Server, merged
from lit_epgan.lib.bounds import above, within
from lit_epgan.lib.errors import UserError


class PartitionedVariationalInference(Algorithm):
    """q(theta) = p0(theta) prod_k t_k(theta), diagonal Gaussians: each client betters q by its records, then its t_k.

        cavity      c = q / t_k
        train       q_k = argmax  E_q[log p(D_k | theta)] - KL(q || c)
        new site    t_k <- t_k^(1-d) (q_k / c)^d;    the server multiplies q by each site's change

    (Bui et al. 2018, arXiv 1811.11206, algorithm 1, all clients at once.) A client's maximum is found by its module's
    own steps at parameters that are drawn from q_k, m + sigma e with e ~ N(0, I), one draw a step. The optimizer moves
    the mean m by the gradient g of the loss, the mean over records of the negative log-likelihood; then m is pulled
    towards c's mean mu. The precision follows from Price's estimate of the loss's second derivatives, as in IVON (Shen
    et al. 2024, arXiv 2402.17641, algorithm 1, whose last term keeps h + delta positive):

        delta       c's precision / n_k
        pull        m <- (m + lr delta mu) / (1 + lr delta)
        estimate    f = g e / sigma
        h           <- h + r (f - h) + r^2 (f - h)^2 / (2 (h + delta)),    r = 1 - decay
        precision   n_k max(h, 0) + c's precision

    Price: two vectors up and two down per client and round; all messages sum.

    Args:
        prior_precision: of p0 = N(initial parameters, 1 / prior_precision).
        decay: of the running mean h of second derivatives.
        initial: the first h of every parameter.
        damping: d in (0, 1]. All clients change their sites at once, so that too large a d goes too far.

    Raises:
        UserError: the module has several optimizers, as a GAN has.
    """

    class Report(Message):
        """What leaves a client: its new site over the old one; uniform of a client that has taken no step."""

        site: GaussianFactor = merged("product", GaussianFactor, like="precision")

    def __init__(
        self, prior_precision: float = 1.0, decay: float = 0.99, initial: float = 1.0, damping: float = 0.3
    ) -> None:
        above(0, self, prior_precision=prior_precision, initial=initial)
        within("[0, 1)", self, decay=decay)
        within("(0, 1]", self, damping=damping)
        self.prior_precision, self.decay, self.initial, self.damping = prior_precision, decay, initial, damping

    def start(self, server: Server) -> None:
        initial = server.parameters.double()
        precision = torch.full_like(initial, self.prior_precision)
        server.state |= tensors_of(GaussianFactor(precision, precision * initial)) | server.state

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
        draws = _Draws(self, client, cavity := q / site)
        client.fit(q.mean.to(client.flat.dtype), batch=draws.draw, gradient=draws.gradient, after_step=draws.pull)
        draws.to_mean()
        if client.step == 0:
            return self.Report(site=GaussianFactor.uniform(q.mean))
        precision = cavity.precision + client.records * draws.curvature.clamp_min(0).double()
        found = GaussianFactor(precision, precision * client.parameters.double())
        new = damped(site, found / cavity, self.damping)
        client.state |= tensors_of(new)
        return self.Report(site=new / site)

    def merge(self, server: Server, report: Any) -> None:
        q = factor_of(server.state) * report.site
        server.state |= tensors_of(q)
        server.parameters.copy_(q.mean)

    def posterior(self, state: Broadcast) -> GaussianPosterior:
        """q of a server's state, as a checkpoint has it: its mean and precision (d,)."""
        q = factor_of(state)
        return GaussianPosterior(q.mean, q.precision - self.prior_precision, self.prior_precision)


class _Draws:
    """A client's steps at parameters drawn from q_k, while the optimizer moves its mean.

    Attributes:
        curvature: h (d,), the running mean of second derivatives.
    """

    def __init__(self, algorithm: PartitionedVariationalInference, client: Client, cavity: GaussianFactor) -> None:
        dtype = client.flat.dtype
        self._client, self._decay, self._initial = client, algorithm.decay, algorithm.initial
        self._precision, self._centre = cavity.precision.to(dtype), cavity.mean.to(dtype)
        self._mean: Tensor | None = None

    def draw(self, batch: Any) -> Any:
        """Put a draw in the mean's place before the step's first batch goes through the module."""
        client = self._client
        if client.step == 1:  # the number of records is known by now
            first = torch.full_like(self._precision, self._initial * client.records)
            self.curvature = client.state.get("precision", first).to(first) / client.records
        if self._mean is None:
            self._mean = client.parameters.clone()
            self._noise = torch.randn_like(self._mean)
            self._sigma = (self._precision + client.records * self.curvature.clamp_min(0)).rsqrt()
            client.parameters.addcmul_(self._noise, self._sigma)
        return batch

    def gradient(self, part: OptimizedParameters) -> None:
        """Learn the second derivatives, and go back to the mean."""
        parameters, gradients = part.with_gradient()
        found, rest = torch.zeros_like(self._noise), 1 - self._decay
        torch._foreach_copy_(part.flat.views(found, parameters), gradients)
        delta = self._precision / self._client.records
        towards = found * self._noise / self._sigma - self.curvature
        self.curvature += rest * towards + (rest * towards).square() / (2 * (self.curvature + delta))
        self.to_mean()

    def pull(self, part: OptimizedParameters) -> None:
        """m <- (m + lr delta mu) / (1 + lr delta), mu the cavity's mean: a step that no precision makes too long."""
        strength = part.lr * self._precision / self._client.records
        for m, c, mu in zip(part.live, part.parts(strength), part.parts(self._centre), strict=True):
            m.addcmul_(c, mu).div_(1 + c)

    def to_mean(self) -> None:
        """Take the draw back, if one is in the mean's place."""
        if self._mean is not None:
            self._client.flat.load(self._mean)
            self._mean = None
