"""A Gaussian posterior of a network's parameters around a trained model, and what it predicts.

Laplace's approximation with the generalised Gauss-Newton matrix for the Hessian: over records i with outputs f_i (C,),
their Jacobians J_i (C, m) in the parameters, and the loss's second derivatives B_i (C, C) in the outputs,

    curvature  H = sum_i J_i' B_i J_i      (over records, so that the clients' sum is the pooled one)
    precision  P = H / (noise temperature) + prior_precision I

Daxberger et al. 2021, "Laplace redux", section 2; Ritter et al. 2018. Predictions go through the network made linear at
its mean (Immer et al. 2021, "Improving predictions of Bayesian neural nets via local linearization", equation 8):

    f(x) ~ N(f(x; mean), J(x) P^-1 J(x)')
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

Likelihood = Literal["classification", "regression"]
NUMBERS = 2**25  # of the Jacobians that are held at once
DRAWS = 256  # of outputs, for a softmax's mean
NEWTON, HALVINGS = 100, 40  # steps at most
ENOUGH = 1e-8  # of the objective, that the next step would gain


def jacobians(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Outputs (n, C) and their Jacobians (n, C, m) in ``parameters``, in chunks of records that bound the memory.

    Args:
        module: x -> outputs, in evaluation mode; each record's outputs depend on that record alone.
        parameters: those of its parameters that are uncertain, by name; m numbers together, in this order.
        x: records (rows, ...).

    Raises:
        ValueError: the module cannot be differentiated record by record, as a recurrent layer of torch's.
    """

    def outputs(values: dict[str, Tensor], record: Tensor) -> tuple[Tensor, Tensor]:
        found = functional_call(module, values, (record.unsqueeze(0),)).flatten()
        return found, found

    values = {name: tensor.detach() for name, tensor in parameters.items()}
    size = sum(tensor.numel() for tensor in values.values())
    with torch.no_grad():
        width = module(x[:1]).numel()
    for part in x.split(max(1, NUMBERS // (size * width))):
        try:
            by_name, found = vmap(jacrev(outputs, has_aux=True), (None, 0))(values, part)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"its outputs cannot be differentiated record by record ({error})") from error
        yield found.detach(), torch.cat([by_name[name].flatten(2) for name in values], 2).detach()


def roots(outputs: Tensor, likelihood: Likelihood) -> Tensor:
    """R (n, C, C) with R'R = B, the second derivatives of the negative log-likelihood in the outputs (n, C).

    Of a softmax's logits B = diag(p) - p p' and R = diag(sqrt p) - sqrt(p) p'; of a Gaussian with unit noise B = I.
    """
    if likelihood == "regression":
        return torch.eye(outputs.shape[1]).to(outputs).expand(len(outputs), -1, -1)
    p = outputs.softmax(1)
    return torch.diag_embed(p.sqrt()) - p.sqrt().unsqueeze(2) * p.unsqueeze(1)


@dataclass(frozen=True)
class KroneckerBasis:
    """Axes in which a network's curvature is nearly diagonal: for each parameter tensor those of its two sides.

    A tensor is a matrix M of its first dimension and all others; in the basis it is L' M R. Over records and roots of
    B let M_i be the parameter's rows of R J. L and R are the eigenvectors of sum_i M_i M_i' and of sum_i M_i' M_i, two
    sums over records. All clients' curvatures are diagonal in the one basis, so that their products stay so: the
    numbers on the diagonal, exact, add up. George et al. 2018, "Fast approximate natural gradient descent in a
    Kronecker-factored eigenbasis", with these sums for the inputs' and the gradients' own.

    Attributes:
        left, right: L (r, r) and R (c, c) of each tensor.
    """

    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]

    @classmethod
    def of(cls, factors: Tensor, shapes: Sequence[tuple[int, int]]) -> Self:
        """The basis of what ``kronecker_factors`` gave, summed over all records."""
        sides = _sides(factors, shapes)
        return cls(*(tuple(torch.linalg.eigh(side).eigenvectors for side in each) for each in sides))

    @classmethod
    def read(cls, vector: Tensor, shapes: Sequence[tuple[int, int]]) -> Self:
        """The basis whose ``vector`` it was; ``shapes``: (r, c) of each tensor."""
        return cls(*map(tuple, _sides(vector, shapes)))

    @property
    def vector(self) -> Tensor:
        """All its numbers as one flat vector, L then R of each tensor."""
        return torch.cat([side.flatten() for pair in zip(self.left, self.right, strict=True) for side in pair])

    def into(self, vectors: Tensor) -> Tensor:
        """Flat parameters (..., m) in the basis."""
        return self._turned(vectors, [left.mT for left in self.left], self.right)

    def back(self, vectors: Tensor) -> Tensor:
        """Flat parameters (..., m) from the basis."""
        return self._turned(vectors, self.left, [right.mT for right in self.right])

    @staticmethod
    def _turned(vectors: Tensor, before: Sequence[Tensor], after: Sequence[Tensor]) -> Tensor:
        sizes = [len(a) * len(b) for a, b in zip(before, after, strict=True)]
        parts = zip(vectors.split(sizes, -1), before, after, strict=True)
        turned = [a.to(part) @ part.unflatten(-1, (len(a), len(b))) @ b.to(part) for part, a, b in parts]
        return torch.cat([part.flatten(-2) for part in turned], -1)


def _sides(vector: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    parts = vector.split([size**2 for shape in shapes for size in shape])
    squares = [part.view(math.isqrt(len(part)), -1) for part in parts]
    return squares[::2], squares[1::2]


def shapes_of(parameters: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(rows, columns) of each parameter as a matrix of its first dimension and the others."""
    return [(len(t), t.numel() // len(t)) if t.dim() else (1, 1) for t in parameters.values()]


def kronecker_factors(module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor, likelihood: Likelihood) -> Tensor:
    """sum_i M_i M_i' and sum_i M_i' M_i of each parameter, all one after another, over the records x, in float64.

    Args:
        module, parameters, x, likelihood: as ``curvature``.
    """
    total: Tensor | None = None
    shapes = shapes_of(parameters)
    for outputs, jacobian in jacobians(module, parameters, x):
        rows = torch.einsum("nkc,ncm->nkm", roots(outputs, likelihood), jacobian).flatten(0, 1).double()
        matrices = [p.unflatten(1, s) for p, s in zip(rows.split([r * c for r, c in shapes], 1), shapes, strict=True)]
        sums = [side.sum(0).flatten() for m in matrices for side in (m @ m.mT, m.mT @ m)]
        total = torch.cat(sums) if total is None else total + torch.cat(sums)
    assert total is not None, "factors are those of records"
    return total


def curvature(
    module: nn.Module,
    parameters: Mapping[str, Tensor],
    x: Tensor,
    likelihood: Likelihood,
    diagonal: bool,
    basis: KroneckerBasis | None = None,
) -> Tensor:
    """H of the records x (rows, ...) in float64: (m, m), or its diagonal (m,).

    Args:
        module, parameters, x: as ``jacobians``.
        likelihood: of the targets given the outputs.
        diagonal: whether the diagonal is enough.
        basis: in which it is taken; the parameters' own axes by default.
    """
    total: Tensor | None = None
    for outputs, jacobian in jacobians(module, parameters, x):
        rows = torch.einsum("nkc,ncm->nkm", roots(outputs, likelihood), jacobian).flatten(0, 1).double()
        rows = rows if basis is None else basis.into(rows)
        part = rows.square().sum(0) if diagonal else rows.T @ rows
        total = part if total is None else total + part
    assert total is not None, "a curvature is one of records"
    return total


def negative_log_likelihood(outputs: Tensor, targets: Tensor, likelihood: Likelihood) -> Tensor:
    """Of targets given outputs (n, C), a sum over records in float64, (): of labels, int64 (n,), or, of targets (n, C),
    half the squared error."""
    if likelihood == "classification":
        return nn.functional.cross_entropy(outputs.double(), targets, reduction="sum")
    return (outputs.double() - targets.double().reshape(outputs.shape)).square().sum() / 2


@dataclass(frozen=True)
class Expansion:
    """The negative log-likelihood of records around parameters, of unit noise in regression: to the second order
    loss + gradient' d + d' curvature d / 2, in float64.

    Attributes:
        loss: (); a sum over records.
        gradient: (m,).
        curvature: (m, m), Gauss-Newton's.
    """

    loss: Tensor
    gradient: Tensor
    curvature: Tensor

    @classmethod
    def of(
        cls,
        module: nn.Module,
        parameters: Mapping[str, Tensor],
        records: Sequence[tuple[Tensor, Tensor]],
        likelihood: Likelihood,
        away: Tensor,
    ) -> Self:
        """That of outputs f_i + J_i d, the network made linear at its parameters; exact of a last layer.

        Args:
            module, parameters, likelihood: as ``curvature``.
            records: batches (x, targets).
            away: d (m,), where it is taken.
        """
        loss, gradient, total = away.new_zeros(()), torch.zeros_like(away), away.new_zeros(len(away), len(away))
        for x, targets in records:
            start = 0
            for means, jacobian in jacobians(module, parameters, x):
                part, start = targets[start : start + len(means)], start + len(means)
                jacobian = jacobian.double()
                outputs = means.double() + jacobian @ away
                if likelihood == "classification":
                    residuals = outputs.softmax(1) - nn.functional.one_hot(part, outputs.shape[1])
                else:
                    residuals = outputs - part.double().reshape(outputs.shape)
                rows = torch.einsum("nkc,ncm->nkm", roots(outputs, likelihood), jacobian).flatten(0, 1)
                loss += negative_log_likelihood(outputs, part, likelihood)
                gradient += torch.einsum("nc,ncm->m", residuals, jacobian)
                total += rows.T @ rows
        return cls(loss, gradient, total)


def mode(likelihood: Callable[[Tensor], Expansion], precision: Tensor, pull: Tensor, start: Tensor) -> Tensor:
    """Where likelihood(d).loss + d' P d / 2 - b' d is least, (m,), by Newton's steps, halved until they go down.

    Args:
        likelihood: the expansion at d; its loss is convex.
        precision: P (m, m), positive definite.
        pull: b (m,).
        start: of the steps (m,).
    """
    at, found = start, likelihood(start)
    for _ in range(NEWTON):
        value = found.loss + at @ precision @ at / 2 - pull @ at
        gradient = found.gradient + precision @ at - pull
        step = torch.linalg.solve(found.curvature + precision, gradient)
        if gradient @ step < ENOUGH * (1 + value.abs()):
            return at - step  # the steps' error is squared each time
        for _ in range(HALVINGS):
            found = likelihood(at - step)
            if found.loss + (at - step) @ precision @ (at - step) / 2 - pull @ (at - step) <= value:
                break
            step = step / 2
        at = at - step
    return at


@dataclass(frozen=True)
class Prediction:
    """What is predicted of n records.

    Attributes:
        probabilities: of classes (n, C), the mean over the posterior.
        entropy: of these (n,), in nats.
        expected: the mean over the posterior of the entropy (n,): what no further training data could tell.
    """

    probabilities: Tensor
    entropy: Tensor
    expected: Tensor

    @property
    def information(self) -> Tensor:
        """entropy - expected (n,), the mutual information of label and parameters: what more data could tell."""
        return (self.entropy - self.expected).clamp_min(0)


@dataclass(frozen=True)
class GaussianPosterior:
    """N(mean, P^-1) of the parameters that are uncertain; the other ones are what they are.

    Attributes:
        mean: (m,).
        curvature: H of all clients' records: (m,), its diagonal, or (m, m); float64.
        prior_precision: of N(0, 1 / prior_precision), above 0; 0 where the curvature holds the prior's.
        temperature: what the curvature is divided by, above 0.
        noise: variance of a target around an output; 1 in classification.
        basis: in which the curvature is; the parameters' own axes by default.
    """

    mean: Tensor
    curvature: Tensor
    prior_precision: float = 1.0
    temperature: float = 1.0
    noise: float = 1.0
    basis: KroneckerBasis | None = None

    def with_prior(self, precision: float) -> Self:
        """The same under the prior N(0, 1 / precision)."""
        return replace(self, prior_precision=precision)

    @cached_property
    def precision(self) -> Tensor:
        """P: (m,), its diagonal, or (m, m)."""
        scaled = self.curvature / (self.noise * self.temperature)
        if self.curvature.dim() == 1:
            return scaled + self.prior_precision
        return scaled + self.prior_precision * torch.eye(len(scaled)).to(scaled)

    @cached_property
    def _factor(self) -> Tensor:
        return torch.linalg.cholesky(self.precision)

    def covariance(self, jacobian: Tensor) -> Tensor:
        """J P^-1 J' (n, C, C) of Jacobians (n, C, m): the outputs' covariances."""
        jacobian = jacobian if self.basis is None else self.basis.into(jacobian)
        if self.precision.dim() == 1:
            return torch.einsum("ncm,m,ndm->ncd", jacobian, (1 / self.precision).to(jacobian), jacobian)
        flat = jacobian.flatten(0, 1).double()
        half = torch.linalg.solve_triangular(self._factor, flat.T, upper=False).T.unflatten(0, jacobian.shape[:2])
        return (half @ half.mT).to(jacobian)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """n draws (n, m) of the parameters, float64."""
        normal = torch.randn(n, len(self.mean), dtype=torch.float64, generator=generator).to(self.precision.device)
        if self.precision.dim() == 1:
            away = normal / self.precision.sqrt()
            return self.mean.double() + (away if self.basis is None else self.basis.back(away))
        return self.mean.double() + torch.linalg.solve_triangular(self._factor.mT, normal.T, upper=True).T

    def log_prob(self, parameters: Tensor) -> Tensor:
        """The log density (...) at parameters (..., m)."""
        away = parameters.double() - self.mean.double()
        away = away if self.basis is None else self.basis.into(away)
        if self.precision.dim() == 1:
            square = (away.square() * self.precision).sum(-1)
        else:
            square = ((away @ self._factor).square()).sum(-1)
        return (self.log_determinant - len(self.mean) * math.log(2 * math.pi) - square) / 2

    @property
    def log_determinant(self) -> Tensor:
        """The logarithm of the determinant of P, ()."""
        if self.precision.dim() == 1:
            return self.precision.log().sum()
        return 2 * self._factor.diagonal().log().sum()

    def log_evidence(self, log_likelihood: float) -> float:
        """log p(data) by Laplace (MacKay 1992): log p(data | mean) + log p(mean) - log q(mean), in nats.

        Args:
            log_likelihood: of all records at the mean; divided by the temperature where that is not 1.
        """
        m, square = len(self.mean), float(self.mean.double().square().sum())
        prior = m * math.log(self.prior_precision) - self.prior_precision * square
        return log_likelihood / self.temperature + (prior - float(self.log_determinant)) / 2

    def outputs(self, module: nn.Module, parameters: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        """Means (n, C) and covariances (n, C, C) of the outputs of records x (n, ...), the noise left out.

        Args:
            module: in evaluation mode; it holds the mean.
            parameters: those that are uncertain, by name, in the mean's order.
            x: records.
        """
        parts = [(found, self.covariance(jacobian)) for found, jacobian in jacobians(module, parameters, x)]
        means, covariances = zip(*parts, strict=True)
        return torch.cat(means), torch.cat(covariances)


def predict(means: Tensor, covariances: Tensor, draws: int = DRAWS) -> Prediction:
    """What a softmax of outputs N(means, covariances) predicts, by draws that are the same in every call.

    Args:
        means: (n, C).
        covariances: (n, C, C).
        draws: how many.
    """
    classes = means.shape[1]
    normal = torch.randn(draws, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    normal = torch.cat([normal, -normal]).to(means.device)  # in pairs, so that the draws' mean is exact
    values, vectors = torch.linalg.eigh(covariances.double())
    spread = vectors * values.clamp_min(0).sqrt().unsqueeze(1)
    log_p = (means.double().unsqueeze(0) + torch.einsum("ncd,sd->snc", spread, normal)).log_softmax(2)
    p = log_p.exp()
    expected = -(p * log_p).sum(2).mean(0)
    mean = p.mean(0)
    return Prediction(mean, torch.special.entr(mean).sum(1), expected)
