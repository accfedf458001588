"""A posterior of the merged model after any algorithm: one round without training asks for the clients' curvature."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lit_epgan.bayes.posterior import (
    Expansion,
    GaussianPosterior,
    KroneckerBasis,
    Likelihood,
    Prediction,
    curvature,
    jacobians,
    kronecker_factors,
    mode,
    negative_log_likelihood,
    predict,
    shapes_of,
)
from lit_epgan.engine import (
    Algorithm,
    Around,
    Broadcast,
    Client,
    Exchange,
    FlatParameters,
    Message,
    Rounds,
    Server,
    merged,
    scalar,
)
from lit_epgan.engine.parameters import matches
from lit_epgan.lib.bounds import at_least
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few
from lit_epgan.networks.modes import evaluating

STATE = "posterior."
LARGEST = 8000  # parameters of a full matrix: half a gigabyte
PRIORS = tuple(10.0 ** (k / 2) for k in (-4, -2, -1, 0, 1, 2, 3, 4, 6, 8))
SCALES = tuple(2.0 ** (k / 4) for k in range(-6, 7))  # of logits; the middle one is 1
OWN_PRECISIONS = tuple(10.0 ** (k / 2) for k in (8, 3, 2, 1, 0, -1))  # precisions of clients around the federation
COLDNESS = (1.0, 0.1, 0.01)  # what clients' own covariances are multiplied by
TUNING_DRAWS = 64
BINS = 100
LEAST = 1e-9  # nats of mutual information, the first bin's upper edge
MOST_ALIKE = 0.99  # of held-out records are not flagged
NEVER = 1e9  # nats, which no record has
Structure = Literal["last_layer", "diagonal", "kronecker", "full"]


class LaplacePosterior(Around):
    """Any algorithm for so many rounds, then one round that makes a Gaussian posterior of the model it has come to.

        q(theta) = N(theta*, (sum_k H_k + prior_precision I)^-1),    H_k = sum_i J_i' B_i J_i over client k's records

    the generalised Gauss-Newton matrix at the merged model theta* (``bayes.posterior``; Daxberger et al. 2021). H is a
    sum over records, so the federation's posterior is the one of all records pooled. A second question asks for sums
    over the records that clients hold out, as ``data.val_fraction``: the negative log-likelihood of what is predicted
    under each of ten prior precisions with logits divided by each of thirteen temperatures, and of the plain model with
    these temperatures (Guo et al. 2017). The server takes the least of the former, and of the latter. The prior
    precision of largest evidence is kept beside; where nobody holds records out, it is taken, and no temperature.

    The posterior stands in every checkpoint that follows; ``callbacks.PosteriorPredictive`` uses it. The Trainer's
    rounds are one more than ``rounds``.

    With ``personal`` each client makes a posterior of its own last layer, too. Clients lie around the federation,
    theta_k ~ N(theta, I / t) (Lindley and Smith 1972), so that what all others say of theta is client k's prior:

        q_k(theta_k) ~ prod_i p(y_i | x_i, theta_k) N(theta_k; theta* + P_k^-1 g_k, P_k^-1 + I / t),   P_k = P - H_k

    over client k's records. The prior is the federation's posterior N(theta*, P^-1) over the client's own factor, whose
    gradient of the loss at theta* is g_k: no record counts twice. A large t gives the federation's posterior, a small
    one the client's alone. Newton's steps find the mode, as the loss is convex, and Laplace's approximation the width.
    Held-out sums choose t of six, what the covariance is multiplied by of three, and the logits' temperature. Without
    records held out the largest t is taken. A client keeps its posterior; it is not sent.

    Price: one exchange of m or m^2 numbers up, m the parameters that are uncertain, and one of some thousand; all sum.
    ``personal`` adds two more of some hundred, and m^2 numbers that a client keeps.

    Args:
        rounds: of the inner algorithm.
        inner: the algorithm; FedAvg by default.
        structure: which parameters are uncertain, and how they vary together: ``last_layer``, those of ``head``, with a
            full matrix; ``diagonal``, all federated ones, each by itself; ``kronecker``, all, each by itself in axes
            that fit each tensor's two sides, which one more question finds; ``full``, all, with a full matrix.
        head: the name of the module's last layer.
        likelihood: ``classification``, the module gives logits; ``regression``, it gives means, whose noise is the mean
            squared error of training.
        personal: whether clients make posteriors of their own; of the last layer alone.

    Raises:
        UserError: there is no such layer, a full matrix would be too large, or the module cannot be differentiated
            record by record.
    """

    class Curvature(Message):
        """What a client's records say of the model.

        Attributes:
            curvature: H_k.
            loss: their negative log-likelihood, of unit noise in regression (1,).
            outputs: how many outputs they have together.
        """

        curvature: Tensor = merged("sum")
        loss: Tensor = merged("sum")
        outputs: float = merged("records")

    class PersonalLoss(Message):
        """What a client's held-out records say of its own posteriors.

        Attributes:
            loss: their negative log-likelihood (precisions, factors of covariances, temperatures of logits).
        """

        loss: Tensor = merged("sum")

    class Factors(Message):
        """What the axes of the structure ``kronecker`` are made of: ``kronecker_factors`` of the client's records."""

        factors: Tensor = merged("sum")

    class HeldOut(Message):
        """What a client's held-out records say of settings.

        Attributes:
            loss: their negative log-likelihood (priors + 1, temperatures); the last row is the plain model's.
            alike: how many have how much mutual information (priors, temperatures, bins).
            outputs: how many outputs they have together.
        """

        loss: Tensor = merged("sum")
        alike: Tensor = merged("sum")
        outputs: float = merged("records")

    clipped = False

    def __init__(
        self,
        rounds: int,
        inner: Algorithm | None = None,
        structure: Structure = "last_layer",
        head: str = "head",
        likelihood: Likelihood = "classification",
        personal: bool = False,
    ) -> None:
        super().__init__(inner)
        at_least(1, self, rounds=rounds)
        if personal and structure != "last_layer":
            raise UserError(f"LaplacePosterior's personal posteriors are the last layer's, not {structure}: choose it")
        self.rounds, self.structure, self.head, self.likelihood = rounds, structure, head, likelihood
        self.personal = personal

    def trains(self, round_: int) -> bool:
        """Not once the model is there."""
        return round_ < self.rounds and self.inner.trains(round_)

    def exchanges(self, start: int, stop: int) -> int:
        """The inner algorithm's, and two to four in each round after them."""
        inner = self.inner.exchanges(min(start, self.rounds), min(stop, self.rounds))
        after = 2 + (self.structure == "kronecker") + 2 * self.personal
        return inner + after * (max(stop, self.rounds) - max(start, self.rounds))

    def start(self, server: Server) -> None:
        super().start(server)
        uncertain = self._of(server.module, server.flat)
        size = sum(p.numel() for p in uncertain.values())
        if self.structure == "kronecker":
            size = max(max(shape) for shape in shapes_of(uncertain))
        if self.structure != "diagonal" and size > LARGEST:
            raise UserError(
                f"LaplacePosterior's structure {self.structure!r} keeps a matrix of {size} x {size} numbers, more than "
                f"{LARGEST} x {LARGEST}: choose "
                + ("last_layer or diagonal" if self.structure == "full" else "diagonal")
            )

    def uncertain(self, named: Mapping[str, Tensor], of: str) -> dict[str, Tensor]:
        """Those of the federated parameters, by name and in their order, that are uncertain.

        Args:
            named: all federated parameters.
            of: the module's class, for the message.

        Raises:
            UserError: the last layer is none of them.
        """
        if self.structure != "last_layer":
            return {name: parameter.detach() for name, parameter in named.items()}
        found = {n: p.detach() for n, p in named.items() if matches(n, [self.head, f"{self.head}.*"])}
        if not found:
            layers = sorted({name.rpartition(".")[0] for name in named})
            raise UserError(
                f"{of} has no trained parameters called {self.head}.*, as LaplacePosterior's head has it: name the "
                f"last layer, one of {few(layers)}"
            )
        return found

    def _of(self, module: nn.Module, flat: FlatParameters) -> dict[str, Tensor]:
        return self.uncertain(dict(zip(flat.names, flat.parameters, strict=True)), type(module).__name__)

    def round(self, server: Server) -> Rounds:
        """The inner algorithm's, or the posterior's."""
        if server.round < self.rounds:
            yield from self.inner.round(server)
            return
        model: dict[str, Tensor] = {"parameters": server.parameters}
        uncertain = self._of(server.module, server.flat)
        if self.structure == "kronecker":
            report = yield Exchange(model, question="factors", training=False, answer=self.Factors)
            shapes = shapes_of(uncertain)
            model |= {"basis": KroneckerBasis.of(report.factors, shapes).vector, "shapes": torch.tensor(shapes)}
        found = yield Exchange(model, question="curvature", training=False, answer=self.Curvature)
        mean = torch.cat([p.flatten() for p in uncertain.values()])
        noise = 1.0 if self.likelihood == "classification" else float(2 * found.loss / found.outputs)
        posterior = GaussianPosterior(mean, found.curvature, noise=noise, basis=basis_of(model))
        log_likelihood = -float(found.loss) / noise
        if self.likelihood == "regression":
            log_likelihood -= float(found.outputs) / 2 * math.log(2 * math.pi * noise)
        evidence = [posterior.with_prior(prior).log_evidence(log_likelihood) for prior in PRIORS]
        by_evidence = PRIORS[evidence.index(max(evidence))]
        sent = {**model, "curvature": found.curvature, "noise": scalar(noise)}
        held = yield Exchange(sent, question="held_out", training=False, answer=self.HeldOut)
        prior, own_scale, scale, alike = by_evidence, 1.0, 1.0, NEVER
        if float(held.outputs) > 0:
            row, column = divmod(int(held.loss[:-1].argmin()), len(SCALES))
            prior = PRIORS[row]
            if self.likelihood == "classification":
                own_scale, scale = SCALES[column], SCALES[int(held.loss[-1].argmin())]
                shares = held.alike[row, column].cumsum(0) / held.alike[row, column].sum()
                alike = min(NEVER, float(edges()[int((shares < MOST_ALIKE).sum())]))
        kept = {"prior_precision": prior, "evidence": by_evidence, "noise": noise, "alike": alike}
        kept |= {"scale": own_scale, "plain_scale": scale}
        server.state |= {STATE + name: scalar(value) for name, value in kept.items()}
        server.state |= {STATE + "mean": mean, STATE + "curvature": found.curvature}
        server.state |= {STATE + name: model[name] for name in ("basis", "shapes") if name in model}
        if self.personal:
            sent |= {
                "prior_precision": scalar(prior),
                "own_precisions": mean.new_tensor(OWN_PRECISIONS, dtype=torch.float64),
            }
            tried = yield Exchange(sent, question="own", training=False, answer=self.PersonalLoss)
            row, best = divmod(int(tried.loss.argmin()), len(COLDNESS) * len(SCALES))
            cold, column = divmod(best, len(SCALES))
            chosen = {"own_precisions": sent["own_precisions"][row : row + 1]}
            yield Exchange(sent | chosen, question="own", training=False, answer=self.PersonalLoss)
            own_scale = SCALES[column] if self.likelihood == "classification" and float(held.outputs) > 0 else 1.0
            kept = {"own_precision": OWN_PRECISIONS[row], "own_temperature": COLDNESS[cold], "own_scale": own_scale}
            server.state |= {STATE + name: scalar(value) for name, value in kept.items()}

    def factors(self, client: Client, sent: Broadcast) -> "LaplacePosterior.Factors":
        """What the client's records say of the axes, at the model that was sent."""
        uncertain = self._of(client.module, client.flat)
        size = sum(r**2 + c**2 for r, c in shapes_of(uncertain))
        total = torch.zeros(size, dtype=torch.float64, device=client.flat.device)
        with evaluating(client.module), self._told(client.module):
            for x, _ in self._records(client.data()):
                total += kronecker_factors(client.module, uncertain, x, self.likelihood)
        return self.Factors(factors=total)

    def curvature(self, client: Client, sent: Broadcast) -> "LaplacePosterior.Curvature":
        """H_k at the model that was sent, and the likelihood of the client's records there."""
        module, uncertain = client.module, self._of(client.module, client.flat)
        size = sum(p.numel() for p in uncertain.values())
        diagonal, basis = self.structure in ("diagonal", "kronecker"), basis_of(sent)
        total = torch.zeros((size,) if diagonal else (size, size), dtype=torch.float64, device=client.flat.device)
        loss, outputs = torch.zeros(1, dtype=torch.float64, device=client.flat.device), 0
        with evaluating(module), self._told(module):
            for x, targets in self._records(client.data()):
                total += curvature(module, uncertain, x, self.likelihood, diagonal, basis)
                found = module(x)
                loss += negative_log_likelihood(found, targets, self.likelihood)
                outputs += len(x) if self.likelihood == "classification" else found.numel()
        return self.Curvature(curvature=total, loss=loss, outputs=outputs)

    def held_out(self, client: Client, sent: Broadcast) -> "LaplacePosterior.HeldOut":
        """How well each setting predicts the records that the client has held out."""
        module, uncertain = client.module, self._of(client.module, client.flat)
        mean = torch.cat([p.flatten() for p in uncertain.values()])
        posterior = GaussianPosterior(mean, sent["curvature"], noise=float(sent["noise"]), basis=basis_of(sent))
        shape, like = (len(PRIORS), len(SCALES)), mean.double()
        loss, alike, outputs = like.new_zeros(shape[0] + 1, shape[1]), like.new_zeros(*shape, BINS), 0
        candidates = [posterior.with_prior(prior) for prior in PRIORS]
        with evaluating(module):
            for x, targets in self._records(client.held_out()):
                start = 0
                for means, jacobian in jacobians(module, uncertain, x):
                    part = targets[start : start + len(means)]
                    start += len(means)
                    outputs += len(means) if self.likelihood == "classification" else means.numel()
                    for row, each in enumerate(candidates):
                        losses, found = self._losses(means, each.covariance(jacobian), each.noise, part)
                        loss[row] += losses
                        for column, prediction in enumerate(found):
                            bins = torch.bucketize(prediction.information, edges().to(mean.device)[:-1])
                            alike[row, column] += torch.bincount(bins, minlength=BINS)
                    if self.likelihood == "classification":
                        for column, scale in enumerate(SCALES):
                            loss[-1, column] += negative_log_likelihood(means / scale, part, self.likelihood)
        return self.HeldOut(loss=loss, alike=alike, outputs=outputs)

    def _losses(
        self, means: Tensor, covariances: Tensor, noise: float, targets: Tensor
    ) -> tuple[Tensor, list[Prediction]]:
        """Negative log-likelihoods of targets (temperatures,), and what is predicted at each; of a regression one."""
        if self.likelihood == "regression":
            return gaussian_loss(means, covariances, noise, targets).expand(len(SCALES)), []
        found = [predict(means / scale, covariances / scale**2, TUNING_DRAWS) for scale in SCALES]
        own = torch.stack([each.probabilities.gather(1, targets.unsqueeze(1)) for each in found])
        return -own.clamp_min(1e-30).log().sum((1, 2)), found

    def own(self, client: Client, sent: Broadcast) -> "LaplacePosterior.PersonalLoss":
        """How the client's own posteriors predict its held-out records, by the precisions that were sent; it keeps the
        last."""
        module, uncertain = client.module, self._of(client.module, client.flat)
        mean = torch.cat([p.flatten() for p in uncertain.values()]).double()
        noise, precisions = float(sent["noise"]), sent["own_precisions"].tolist()
        loss, away = mean.new_zeros(len(precisions), len(COLDNESS), len(SCALES)), torch.zeros_like(mean)
        with evaluating(module):
            records = list(self._records(client.data()))

            def at(vector: Tensor) -> Expansion:
                return Expansion.of(module, uncertain, records, self.likelihood, vector)

            site, unit = at(away), torch.eye(len(mean)).to(mean)
            cavity = sent["curvature"] - site.curvature + float(sent["prior_precision"]) * noise * unit
            for row, precision in enumerate(precisions):
                shrunk = torch.linalg.inv(unit + cavity / (precision * noise))
                prior = cavity @ shrunk
                away = mode(at, prior, shrunk @ site.gradient, away)
                curved = prior + at(away).curvature
                posterior = GaussianPosterior(mean + away, curved, 0.0, noise=noise)
                for x, targets in self._records(client.held_out()):
                    start = 0
                    for means, jacobian in jacobians(module, uncertain, x):
                        part, start = targets[start : start + len(means)], start + len(means)
                        outputs = means + (jacobian.double() @ away).to(means)
                        covariances = posterior.covariance(jacobian)
                        for column, cold in enumerate(COLDNESS):
                            loss[row, column] += self._losses(outputs, cold * covariances, noise, part)[0]
        client.state |= {STATE + "mean": mean + away, STATE + "curvature": curved}
        return self.PersonalLoss(loss=loss)

    @staticmethod
    @contextmanager
    def _told(module: nn.Module) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:
            raise UserError(
                f"{type(module).__name__} has no forward, which gives LaplacePosterior the outputs of inputs"
            ) from error
        except ValueError as error:
            raise UserError(f"LaplacePosterior: of {type(module).__name__}, {error}") from error

    @staticmethod
    def posterior(
        state: Mapping[str, Tensor],
        by: Literal["held_out", "evidence"] = "held_out",
        own: Mapping[str, Tensor] | None = None,
    ) -> GaussianPosterior:
        """The posterior that a server's state holds, as a checkpoint has it.

        Args:
            state: the server's tensors, by name.
            by: what has chosen the prior precision.
            own: a client's tensors, by name, whose personal posterior it is then.

        Raises:
            UserError: it holds none, as its training has not come to it.
        """
        if STATE + "curvature" not in state:
            raise UserError(
                "there is no posterior yet: train with LaplacePosterior, one round more than its rounds say "
                "(trainer.max_epochs)"
            )
        prior = float(state[STATE + ("prior_precision" if by == "held_out" else "evidence")])
        mean, found, noise = state[STATE + "mean"], state[STATE + "curvature"], float(state[STATE + "noise"])
        basis = basis_of({name: state[STATE + name] for name in ("basis", "shapes") if STATE + name in state})
        if own is not None:
            cold = float(state[STATE + "own_temperature"])
            return GaussianPosterior(own[STATE + "mean"], own[STATE + "curvature"], 0.0, cold, noise)
        return GaussianPosterior(mean, found, prior, noise=noise, basis=basis)

    @staticmethod
    def _records(batches: Iterator[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            if not isinstance(batch, Sequence) or len(batch) < 2 or not all(isinstance(t, Tensor) for t in batch[:2]):
                raise UserError("LaplacePosterior needs batches whose first two entries are tensors, x and targets")
            yield batch[0], batch[1]


def basis_of(sent: Mapping[str, Tensor]) -> KroneckerBasis | None:
    """The basis that stands in a message or a state; None if there is none."""
    if "basis" not in sent:
        return None
    return KroneckerBasis.read(sent["basis"], [(r, c) for r, c in sent["shapes"].tolist()])


def gaussian_loss(means: Tensor, covariances: Tensor, noise: float, targets: Tensor) -> Tensor:
    """-log N(targets; means, covariances' diagonals + noise), a sum over all outputs (n, C), in float64, ()."""
    variance = covariances.diagonal(dim1=1, dim2=2).double() + noise
    away = targets.double().reshape(means.shape) - means.double()
    return ((2 * math.pi * variance).log() + away.square() / variance).sum() / 2


def edges() -> Tensor:
    """Upper edges (BINS,) of bins of mutual information in nats; the last bin is open."""
    return torch.cat([torch.logspace(math.log10(LEAST), 1, BINS - 1, dtype=torch.float64), torch.tensor([torch.inf])])
