"""The federation's Laplace posterior against another library's on the pooled records.

pip install --target /tmp/laplace --no-deps laplace-torch curvlinops-for-pytorch backpack-for-pytorch asdfghjkl einops \
    einconv unfoldNd linear_operator jaxtyping wadler_lindig
OMP_NUM_THREADS=1 PYTHONPATH=.:/tmp/laplace python -m evidence.laplace_torch --output evidence/results/laplace_torch.md

scikit-learn's digits at three clients of unequal size (classification), and a line in ten dimensions (regression); a
network with one hidden layer, trained for some rounds. The other library is laplace-torch (Daxberger et al. 2021), on
all records at once: its precision matrix, its evidence and its outputs' covariances against the federation's.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.engine import PlainFederation
from lit_epgan.federated import LaplacePosterior

SIZES, PRIOR = (30, 200, 70), 3.0


def network(inputs: int, outputs: int) -> nn.Sequential:
    """A hidden layer of 16, and a head."""
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh())
    return nn.Sequential(OrderedDict(backbone=backbone, head=nn.Linear(16, outputs))).double()


def records(likelihood: str) -> tuple[Tensor, Tensor]:
    if likelihood == "classification":
        images, labels = load_digits(return_X_y=True)
        return torch.from_numpy(images[: sum(SIZES)]).double() / 16, torch.from_numpy(labels[: sum(SIZES)]).long()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(SIZES), 10, dtype=torch.float64, generator=generator)
    noise = torch.randn(sum(SIZES), 1, dtype=torch.float64, generator=generator)
    return x, x.sum(1, keepdim=True).sin() + 0.3 * noise


def federated(module: nn.Module, x: Tensor, y: Tensor, structure: Any, likelihood: Any) -> dict[str, Tensor]:
    """The server's state after five rounds and the posterior's."""
    parts = list(zip(x.split(list(SIZES)), y.split(list(SIZES)), strict=True))

    def batches(client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(zip(*(t.split(32) for t in parts[client]), strict=True)))

    loss = nn.functional.cross_entropy if likelihood == "classification" else nn.functional.mse_loss
    federation = PlainFederation(
        LaplacePosterior(5, structure=structure, likelihood=likelihood),
        module,
        lambda model, batch: loss(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batches,
        [float(n) for n in SIZES],
    )
    federation.run(6)
    return dict(federation.server.state)


def apart(a: Tensor, b: Tensor) -> str:
    """The largest difference, relative to the largest number."""
    return f"{float((a.double() - b.double()).abs().max() / b.double().abs().max()):.1e}"


def main() -> None:
    args = options(__doc__).parse_args()
    from laplace import DiagLaplace, FullLaplace, FullLLLaplace  # which nothing else here needs
    from laplace.curvature import BackPackGGN

    kinds = {
        "last_layer": (FullLLLaplace, BackPackGGN),
        "diagonal": (DiagLaplace, BackPackGGN),
        "full": (FullLaplace, BackPackGGN),
    }
    rows = []
    for likelihood in ("classification", "regression"):
        x, y = records(likelihood)
        for structure, (kind, backend) in kinds.items():
            module = network(x.shape[1], 10 if likelihood == "classification" else 1)
            state = federated(module, x, y, structure, likelihood)
            module.eval()
            ours = LaplacePosterior.posterior(state).with_prior(PRIOR)
            uncertain = {n: p.detach() for n, p in module.named_parameters()}
            if structure == "last_layer":
                uncertain = {n: p for n, p in uncertain.items() if n.startswith("head.")}
            means, covariances = ours.outputs(module, uncertain, x[:50])
            more = {"last_layer_name": "head"} if kind is FullLLLaplace else {}
            theirs = kind(
                module, likelihood, sigma_noise=ours.noise**0.5, prior_precision=PRIOR, backend=backend, **more
            )
            theirs.fit(DataLoader(TensorDataset(x, y), 64))
            their_means, their_covariances = theirs._glm_predictive_distribution(x[:50])
            log_likelihood = float(theirs.log_likelihood)
            evidence = ours.log_evidence(log_likelihood)
            their_evidence = float(theirs.log_marginal_likelihood())
            rows.append(
                [
                    likelihood,
                    structure,
                    str(len(ours.mean)),
                    apart(ours.precision, theirs.posterior_precision),
                    f"{abs(evidence - their_evidence) / abs(their_evidence):.1e}",
                    apart(means, their_means),
                    apart(covariances, their_covariances),
                ]
            )
    header = ["likelihood", "structure", "parameters", "precision", "evidence", "outputs", "outputs' covariances"]
    notes = (
        f"{sum(SIZES)} records at {len(SIZES)} clients of {', '.join(map(str, SIZES))}; laplace-torch 0.3 on all at "
        f"once, prior precision {PRIOR:g}, float64. Largest differences, relative to the largest number."
    )
    publish(markdown("The federation's Laplace posterior and the pooled one", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
