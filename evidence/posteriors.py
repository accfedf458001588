"""What the federation's posterior buys: the same models judged plain, with a temperature, and by their posteriors.

OMP_NUM_THREADS=1 python -m evidence.posteriors --output evidence/results/posteriors.md

scikit-learn's digits, an MLP with 64 hidden units, FedAvg; each seed has its own partition, initialisation and batches.
Each client holds out a fifth of its training images. Whatever is chosen, a temperature, a prior precision, is chosen by
sums over these; the test images choose nothing. All rows but the ensemble and the pooled one judge the same trained
model. Unlike images are the test images turned by a quarter. ``--kept FILE`` keeps what is finished.
"""

import functools
import json
import math
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import ttest_rel
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.bayes.posterior import GaussianPosterior, Prediction, predict
from lit_epgan.callbacks.posterior_predictive import BINS, risk_by_coverage, scored
from lit_epgan.datamodules import ImageDataModule
from lit_epgan.engine import Algorithm, PlainFederation
from lit_epgan.federated import LaplacePosterior, PartitionedVariationalInference
from lit_epgan.federated.bayesian.laplace import SCALES, STATE
from lit_epgan.lib.randomness import generator_for

ROUNDS, BATCH, MEMBERS = 20, 32, 5
LR = 0.5  # the best of .1, .2, .5 by held-out images of seeds 900 to 902: at clients, in one place, and of PVI
PVI_DRAWS = 64
SETTINGS: dict[str, dict[str, Any]] = {
    "10 clients, Dirichlet(0.1)": {"clients": 10, "partition": "dirichlet", "beta": 0.1},
    "10 clients, Dirichlet(0.5)": {"clients": 10, "partition": "dirichlet", "beta": 0.5},
    "10 clients, at random": {"clients": 10, "partition": "iid"},
    "100 clients, Dirichlet(0.5), five local epochs": {"clients": 100, "partition": "dirichlet", "beta": 0.5},
}
METHODS = {
    "plain": "FedAvg",
    "scaled": "FedAvg, a temperature",
    "last_layer": "its posterior, last layer",
    "diagonal": "its posterior, diagonal",
    "kronecker": "its posterior, Kronecker axes",
    "evidence": "the same, last layer, prior by evidence",
    "ensemble": f"mean of {MEMBERS} FedAvg models",
    "pvi": "partitioned variational inference, 64 draws",
    "pooled": "all images in one place, posterior of the last layer",
}
SCORES = ("nll", "brier", "ece", "accuracy", "risk_at_90", "auroc")
Dealt = dict[str, tuple[Tensor, Tensor]]


@dataclass
class Data:
    """Each client's images and labels for training and held out, and the test's."""

    train: Dealt
    held: Dealt
    test: tuple[Tensor, Tensor]


def dealt(seed: int, setting: dict[str, Any]) -> Data:
    module = ImageDataModule("digits", **setting, partition_by_seed=True, val_fraction=0.2, seed=seed, split="by_seed")
    found = module.load()

    def all_of(dataset: Any) -> tuple[Tensor, Tensor]:
        return tuple(dataset.fetch(list(range(len(dataset)))))

    assert isinstance(found.val, dict)
    train, held = ({name: all_of(part) for name, part in parts.items()} for parts in (found.train, found.val))
    return Data(train, held, all_of(found.test))


class Network(nn.Module):
    """The MLP of digits_classifier.yaml."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def trained(data: Data, seed: int, epochs: int, structure: str | None) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of so many rounds of FedAvg, and the server's state with its posterior, if a structure is given; of PVI
    where that is ``pvi``."""
    names = list(data.train)

    def batches(client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data.train[names[client]]
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=generator_for(seed, round_, client, epoch))
            yield from ((x[rows], y[rows]) for rows in order.split(BATCH))

    by_laplace = structure not in (None, "pvi")
    algorithm: Algorithm = PartitionedVariationalInference()
    if structure != "pvi":
        algorithm = LaplacePosterior(ROUNDS, structure=structure or "last_layer")  # type: ignore[arg-type]
    module = Network(seed)
    federation = PlainFederation(
        algorithm,
        module,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=LR),
        batches,
        [float(len(x)) for x, _ in data.train.values()],
        seed,
    )
    federation.model.data = lambda client, round_: iter([data.train[names[client]]])
    federation.model.held_out = lambda client: iter([data.held[names[client]]] if names[client] in data.held else [])
    federation.run(ROUNDS + by_laplace)
    return module.eval(), dict(federation.server.state)


def judged(probabilities: Tensor, labels: Tensor, unlike: Tensor, like: Tensor) -> dict[str, float]:
    """All scores; ``unlike`` and ``like``: how strange turned and upright test images look."""
    risks = risk_by_coverage(probabilities, labels)
    strange, of = torch.cat([unlike, like]), torch.cat([torch.ones(len(unlike)), torch.zeros(len(like))]).long()
    ranks = strange.argsort().argsort().double() / len(strange)  # torchmetrics takes numbers from 0 to 1
    return {name: float(value) for name, value in scored(probabilities, labels).items()} | {
        "ece": float(multiclass_calibration_error(probabilities, labels, 10, BINS)),
        "risk_at_90": float(risks[math.ceil(0.9 * len(risks)) - 1]),
        "auroc": float(binary_auroc(ranks, of)),
    }


def by_posterior(
    module: nn.Module, posterior: GaussianPosterior, scale: float, names: Sequence[str]
) -> Callable[[Tensor], Any]:
    uncertain = {n: p.detach() for n, p in module.named_parameters() if n.startswith(tuple(names))}

    def of(x: Tensor) -> Prediction:
        means, covariances = posterior.outputs(module, uncertain, x)
        return predict(means / scale, covariances / scale**2)

    return of


@torch.no_grad()
def judge(seed: int, setting: dict[str, Any], found: dict[str, dict[str, float]]) -> None:
    """Add the scores of the methods that are not found yet on one seed."""
    data, epochs = dealt(seed, setting), 5 if setting["clients"] == 100 else 1
    together = Data({"all": whole(data.train)}, {"all": whole(data.held)}, data.test)
    x, labels = data.test
    turned = x.rot90(1, (2, 3))

    @functools.cache
    def model(structure: str | None, member: int = 0, pooled: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
        with torch.enable_grad():
            if pooled:
                return trained(together, seed, 1, structure)
            return trained(data, seed + 1000 * member, epochs, structure)

    def plain(scale: float, models: Sequence[nn.Module]) -> dict[str, float]:
        outputs = ([m(images) / scale for m in models] for images in (x, turned))
        upright, other = (torch.stack(each).double().softmax(2).mean(0) for each in outputs)
        return judged(upright, labels, 1 - other.max(1).values, 1 - upright.max(1).values)

    def posterior(structure: str, pooled: bool = False, **by: Any) -> dict[str, float]:
        module, state = model(structure, pooled=pooled)
        scale = float(state[STATE + "scale"]) if not by else 1.0
        names = ["head."] if structure == "last_layer" else [""]
        of = by_posterior(module, LaplacePosterior.posterior(state, **by), scale, names)
        upright, other = of(x), of(turned)
        return judged(upright.probabilities, labels, other.entropy, upright.entropy)

    def ensemble() -> dict[str, float]:
        return plain(1.0, [model("last_layer")[0], *(model(None, k)[0] for k in range(1, MEMBERS))])

    def variational() -> dict[str, float]:
        module, state = model("pvi")
        torch.manual_seed(seed)
        drawn = PartitionedVariationalInference().posterior(state).sample(PVI_DRAWS).float()
        probabilities = []
        for images in (x, turned):
            outputs = []
            for vector in drawn:
                nn.utils.vector_to_parameters(vector, module.parameters())
                outputs.append(module(images).double().softmax(1))
            probabilities.append(torch.stack(outputs).mean(0))
        entropies = [torch.special.entr(p).sum(1) for p in probabilities]
        return judged(probabilities[0], labels, entropies[1], entropies[0])

    methods: dict[str, Callable[[], dict[str, float]]] = {
        "plain": lambda: plain(1.0, [model("last_layer")[0]]),
        "scaled": lambda: plain(float(model("last_layer")[1][STATE + "plain_scale"]), [model("last_layer")[0]]),
        "last_layer": lambda: posterior("last_layer"),
        "diagonal": lambda: posterior("diagonal"),
        "kronecker": lambda: posterior("kronecker"),
        "evidence": lambda: posterior("last_layer", by="evidence"),
        "ensemble": ensemble,
        "pvi": variational,
        "pooled": lambda: posterior("last_layer", pooled=True),
    }
    found |= {name: method() for name, method in methods.items() if name not in found}


def whole(parts: Dealt) -> tuple[Tensor, Tensor]:
    x, y = zip(*parts.values(), strict=True)
    return torch.cat(x), torch.cat(y)


def known(path: Path | None) -> dict[tuple[str, int], Any]:
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    return {(row["setting"], row["seed"]): row["found"] for row in map(json.loads, lines)}


def table(name: str, found: list[dict[str, dict[str, float]]]) -> str:
    header = ["", "NLL", "NLL over FedAvg's", "p to a temperature", "Brier", "calibration error", "accuracy in %"]
    header += ["errors in % of the surest 90 %", "AUROC of turned images", "p to a temperature"]
    rows = []
    for method, title in METHODS.items():
        values = {score: [each[method][score] for each in found] for score in SCORES}
        ratio = statistics.mean(math.log(each[method]["nll"] / each["plain"]["nll"]) for each in found)
        logs = [[math.log(each[m]["nll"]) for each in found] for m in (method, "scaled")]
        told = [[each[m]["auroc"] for each in found] for m in (method, "scaled")]
        p, p_told = ("" if method == "scaled" else f"{ttest_rel(*each).pvalue:.2g}" for each in (logs, told))
        cells = [f"{statistics.mean(v) * f:.{d}f} ± {statistics.stdev(v) * f:.{d}f}" for v, f, d in (
            (values["nll"], 1, 3), (values["brier"], 1, 3), (values["ece"], 1, 3), (values["accuracy"], 100, 1),
            (values["risk_at_90"], 100, 1), (values["auroc"], 1, 3))]  # fmt: skip
        rows.append([title, cells[0], f"{math.exp(ratio):.2f}", p, *cells[1:], p_told])
    return markdown(name, header, rows)


def report(args: Namespace, kept: dict[tuple[str, int], Any]) -> str:
    parts = []
    for name in SETTINGS:
        found = [kept[name, seed] for seed in args.seeds if (name, seed) in kept]
        if len(found) > 1:
            parts.append(table(f"{name}, {len(found)} seeds", found).replace("# ", "## ", 1))
    text = (
        f"{ROUNDS} rounds of FedAvg, SGD with a rate of {LR}, batches of {BATCH}; the rate is the best of .1, .2 and "
        ".5 by held-out images of three other seeds, at clients and in one place. Mean and standard deviation over "
        "seeds. NLL in nats a record; the ratio is a geometric mean. p is of paired t-tests of log NLL and of AUROC "
        "against the same models with a temperature, not corrected for several comparisons. Temperature and prior "
        f"precision are chosen by held-out sums, from {len(SCALES)} and ten values."
    )
    return "\n\n".join(["# What the federation's posterior buys on digits", text, *parts]) + "\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(300, 310)))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--kept", type=Path, help="a file of finished runs, one JSON line each")
    args = parser.parse_args()
    kept = known(args.kept)
    for seed in args.seeds:
        for name in args.settings:
            found = kept.setdefault((name, seed), {})
            if METHODS.keys() - found:
                judge(seed, SETTINGS[name], found)
                if args.kept is not None:
                    with args.kept.open("a") as file:
                        file.write(json.dumps({"setting": name, "seed": seed, "found": kept[name, seed]}) + "\n")
    publish(report(args, kept), args.output)


if __name__ == "__main__":
    main()
