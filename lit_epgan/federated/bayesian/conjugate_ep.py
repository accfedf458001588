"""Expectation propagation with exact sites, where a client's loss is quadratic in the parameters."""

import torch
from torch import Tensor

from lit_epgan.bayes.gaussian import FullGaussianFactor, ImproperFactorError, tensors_of
from lit_epgan.engine import Algorithm, Broadcast, Client, Exchange, Message, Rounds, Server, merged
from lit_epgan.lib.errors import UserError

Q = "conjugate."
LARGEST = 1000  # parameters: a precision matrix of 8 MB, and as many passes over a client's records
TOLERANCE = 1e-2  # relative: single precision leaves 1e-3 on badly scaled features


class ConjugateEP(Algorithm):
    """q(theta) = p0(theta) prod_k g_k(theta) with the site g_k = exp(-n_k l_k(theta) / temperature) itself.

    l_k is the module's loss, its mean over the client's n_k records. Where it is quadratic, as squared error of a model
    that is linear in its parameters, g_k is a Gaussian with a full precision matrix, p0 is conjugate, the tilted
    distribution is Gaussian, and so expectation propagation (Minka 2001) is exact at once: q is the posterior of all
    clients' records together as soon as each has reported. The server's model is q's mean.
    With gradients of l_k at the origin and at the unit vectors e_i,

        precision  n_k H / temperature,   H e_i = grad l_k(e_i) - grad l_k(0)
        precision x mean                  -n_k grad l_k(0) / temperature

    The module takes no steps of its own. Sites are reported once, as changes.

    Price: d + 2 passes over a client's records and d^2 + d numbers up, once; all messages sum. What is sent determines
    a client's least-squares problem completely.

    Args:
        prior_precision: of p0 = N(initial parameters, 1 / prior_precision); 0 is a uniform p0.
        temperature: 2 s for mean squared error of observations with noise of variance s. Without p0 the mean does not
            depend on it.

    Raises:
        UserError: if an argument is out of its range, the module has too many parameters, its loss is not quadratic, or
            the reports so far leave q improper.
    """

    class Report(Message):
        """What leaves a client: g_k the first time, 1 from then on."""

        site: FullGaussianFactor = merged("product", FullGaussianFactor)

    def __init__(self, prior_precision: float = 0.0, temperature: float = 1.0) -> None:
        if not prior_precision >= 0 or not temperature > 0:
            raise UserError(
                f"ConjugateEP's prior_precision and temperature are {prior_precision} and {temperature}; "
                "give prior_precision >= 0 and temperature > 0"
            )
        self.prior_precision, self.temperature = prior_precision, temperature

    def trains(self, round_: int) -> bool:
        """Never: gradients at given points are all that is asked for."""
        return False

    def start(self, server: Server) -> None:
        initial = server.parameters.double()
        if len(initial) > LARGEST:
            raise UserError(
                f"ConjugateEP keeps a full precision matrix, and the module has {len(initial)} parameters, more than "
                f"{LARGEST}: use ExpectationPropagation, whose sites are diagonal"
            )
        precision = self.prior_precision * torch.eye(len(initial)).to(initial)
        prior = FullGaussianFactor(precision, self.prior_precision * initial)
        server.state |= tensors_of(prior, Q) | server.state

    def posterior(self, server: Server) -> FullGaussianFactor:
        """q, with a full precision matrix (d, d), in float64."""
        return FullGaussianFactor(server.state[f"{Q}precision"], server.state[f"{Q}precision_mean"])

    def round(self, server: Server) -> Rounds:
        """Whoever has not reported its site does; q's mean is the model."""
        report = yield Exchange({}, question="site", training=False)
        q = self.posterior(server) * report.site
        server.state |= tensors_of(q, Q)
        try:
            server.parameters.copy_(q.mean)
        except ImproperFactorError as error:
            raise UserError(
                "ConjugateEP: the records of the clients so far do not determine the parameters; set prior_precision "
                "above 0, or let all clients take part in the first round"
            ) from error

    def site(self, client: Client, sent: Broadcast) -> "ConjugateEP.Report":
        """The exact site once, from gradients of the client's whole loss; then no change."""
        origin = torch.zeros_like(client.parameters)
        if "reported" in client.state:
            return self.Report(site=FullGaussianFactor.uniform(origin.double()))
        client.state["reported"] = torch.ones(1)

        def gradient(point: Tensor) -> Tensor:
            client.flat.load(point)
            return client.gradient().double()

        at_origin = gradient(origin)
        hessian = torch.stack([gradient(e) - at_origin for e in torch.eye(len(origin)).to(origin)], 1)
        foreseen = hessian.sum(1) + at_origin
        if not torch.allclose(gradient(origin + 1), foreseen, 0, TOLERANCE * float(hessian.abs().max())):
            raise UserError(
                f"the loss of {type(client.module).__name__} is not quadratic in its parameters, so that its "
                "site is no Gaussian: use ExpectationPropagation"
            )
        scale = client.records / self.temperature
        return self.Report(site=FullGaussianFactor(scale * (hessian + hessian.T) / 2, -scale * at_origin))
