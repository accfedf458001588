"""What the federation's posterior buys: the same models judged plain, with a temperature, and by their posteriors.

OMP_NUM_THREADS=1 python -m evidence.posteriors --output evidence/results/posteriors.md
OMP_NUM_THREADS=1 python -m evidence.posteriors --data-set fashion_mnist --data-dir data --output
    evidence/results/posteriors_fashion.md

scikit-learn's digits, or all of Fashion-MNIST; an MLP with one hidden layer, FedAvg; each seed has its own partition,
initialisation and batches, of digits its own test images, too. Each client holds out some of its training images (a
fifth; of Fashion-MNIST one in 50). Whatever is chosen, a temperature, a prior precision, is chosen by sums over these;
the test images choose nothing. The first rows judge one trained model. Unlike images are test images turned by a
quarter, and a thousand of another data set at the same size. ``--kept FILE`` keeps what is finished.
"""

import functools
import json
import math
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import ttest_1samp, ttest_rel
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

from benchmarks.side_by_side import markdown, options, publish
from evidence.posterior_peers import FedBE, FedCurv, FedLPA
from lit_epgan.bayes.posterior import GaussianPosterior, Prediction, predict
from lit_epgan.callbacks.posterior_predictive import BINS, risk_by_coverage, scored
from lit_epgan.datamodules import ImageDataModule
from lit_epgan.engine import Algorithm, PlainFederation
from lit_epgan.federated import FedAvg, FedLA, LaplacePosterior, PartitionedVariationalInference
from lit_epgan.federated.bayesian.laplace import PRIORS, SCALES, STATE, TUNING_DRAWS
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for

ROUNDS, MEMBERS = 20, 5
PVI_DRAWS = 64
ADMM = {"temperature": 0.1, "penalty": 1.0, "damping": 0.3, "initial": 0.1}  # the best of 24 as rates are
CURV, LPA = 0.01, 0.1  # the best of four each, with their rates
MARGIN = 0.005  # of accuracy, within which two methods count as equal
TEN = {
    "10 clients, Dirichlet(0.1)": {"clients": 10, "partition": "dirichlet", "beta": 0.1},
    "10 clients, Dirichlet(0.5)": {"clients": 10, "partition": "dirichlet", "beta": 0.5},
    "10 clients, at random": {"clients": 10, "partition": "iid"},
}
HUNDRED = {"clients": 100, "partition": "dirichlet", "beta": 0.5}
METHODS = {
    "plain": "FedAvg",
    "scaled": "FedAvg, a temperature",
    "last_layer": "its posterior, last layer",
    "diagonal": "its posterior, diagonal",
    "kronecker": "its posterior, Kronecker axes",
    "evidence": "the same, last layer, prior by evidence",
    "ensemble": f"mean of {MEMBERS} FedAvg models",
    "pvi": "partitioned variational inference, 64 draws",
    "admm": "IVON-ADMM, 64 draws",
    "fedla": "FedLA, its own posterior",
    "fedcurv": "FedCurv",
    "fedbe": "FedBE, the last round's clients, mean and ten draws",
    "one_mean": "one message, after as many steps: the mean",
    "one_fisher": "one message, after as many steps: Fisher merging",
    "one_lpa": "one message, after as many steps: FedLPA",
    "pooled": "all images in one place, posterior of the last layer",
}
PAIRS = [("admm", "pvi"), ("one_lpa", "one_fisher")]
Dealt = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ImageSet:
    """What is particular to a data set.

    Attributes:
        title: of the report.
        pixels: of an image.
        hidden: units of the MLP.
        classes: its outputs.
        module: settings of ImageDataModule.
        settings: by their names, more of them.
        without: methods that are left out, as they take long.
        other: the data set of images of another kind, and what they are.
        seeds: of the report.
        batch: records in a batch.
        tuned_on: how ``lr`` was chosen.
        lr: of FedAvg's rounds, of each one message, and of all images in one place.
    """

    title: str
    pixels: int
    hidden: int
    classes: int
    module: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    without: tuple[str, ...]
    other: tuple[str, str]
    seeds: range
    batch: int
    tuned_on: str
    lr: dict[str, float]


SETS = {
    "digits": ImageSet(
        title="digits",
        pixels=64,
        hidden=64,
        classes=10,
        module={"split": "by_seed", "val_fraction": 0.2},
        settings={**TEN, "100 clients, Dirichlet(0.5), five local epochs": HUNDRED},
        without=(),
        other=("fashion_mnist", "clothes"),
        seeds=range(300, 310),
        batch=32,
        tuned_on="Rates are the best of .1, .2 and .5 by held-out images of seeds 900 to 902; IVON-ADMM has the best "
        "of 24 settings, FedCurv of 12 and FedLPA of 10.",
        lr=dict.fromkeys(("rounds", "fedcurv", "one_mean", "pooled"), 0.5)
        | dict.fromkeys(("one_fisher", "one_lpa", "fedla"), 0.2),
    ),
    "fashion_mnist": ImageSet(
        title="all 60,000 images of clothes",
        pixels=784,
        hidden=32,
        classes=10,
        module={"val_fraction": 0.02},
        settings={**TEN, "100 clients, Dirichlet(0.5)": HUNDRED},
        without=(
            *("diagonal", "kronecker", "ensemble", "pvi", "admm", "fedla"),
            *("fedcurv", "fedbe", "one_mean", "one_fisher", "one_lpa"),
        ),
        other=("digits", "digits"),
        seeds=range(300, 310),
        batch=128,
        tuned_on="Rates are the best of .1, .2 and .5 by held-out images of seed 900 at Dirichlet(0.5), with 64 hidden "
        "units.",
        lr={"rounds": 0.2, "one_mean": 0.1, "one_fisher": 0.1, "pooled": 0.1},
    ),
}


@dataclass
class Data:
    """Each client's images and labels for training and held out, the test's, and images unlike these."""

    train: Dealt
    held: Dealt
    test: tuple[Tensor, Tensor]
    unlike: dict[str, Tensor]


@dataclass
class Trained:
    """A model in evaluation mode, the server's state, and seconds of one core and bytes up of a client, by round."""

    module: nn.Module
    state: dict[str, Tensor]
    seconds: list[float]
    bytes_up: list[float]

    def cost(self, rounds: int | None = None) -> dict[str, float]:
        """Of so many rounds, the first ones; of all by default."""
        return {"seconds": sum(self.seconds[:rounds]), "bytes_up": sum(self.bytes_up[:rounds])}


class Counted(PlainFederation):
    """A federation that notes what each round costs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seconds: list[float] = []
        self.bytes_up: list[float] = []

    def round(self, number: int) -> Any:
        began = time.process_time()
        done = super().round(number)
        self.seconds.append(time.process_time() - began)
        self.bytes_up.append(float(done.budget["client/bytes_up"]))
        return done


def all_of(dataset: Any) -> tuple[Tensor, Tensor]:
    return tuple(dataset.fetch(list(range(len(dataset)))))


@functools.cache
def elsewhere(name: str, data_dir: str) -> Tensor:
    """The first thousand test images of another data set."""
    return all_of(ImageDataModule(name, data_dir, partition="iid").load().test)[0][:1000]


def dealt(seed: int, name: str, setting: dict[str, Any], data_dir: str) -> Data:
    own = {**SETS[name].module, **setting}
    found = ImageDataModule(name, data_dir, **own, partition_by_seed=True, seed=seed).load()
    assert isinstance(found.val, dict)
    train, held = ({name: all_of(part) for name, part in parts.items()} for parts in (found.train, found.val))
    test = all_of(found.test)
    side = test[0].shape[-1]
    other = nn.functional.interpolate(
        elsewhere(SETS[name].other[0], data_dir), (side, side), mode="bilinear", antialias=True
    )
    return Data(train, held, test, {"turned": test[0][:1000].rot90(1, (2, 3)), "other": other})


class Network(nn.Module):
    """An MLP with one hidden layer; of digits that of digits_classifier.yaml."""

    def __init__(self, seed: int, image_set: ImageSet) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.backbone = nn.Sequential(nn.Flatten(), nn.Linear(image_set.pixels, image_set.hidden), nn.ReLU())
        self.head = nn.Linear(image_set.hidden, image_set.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def trained(
    image_set: ImageSet, data: Data, seed: int, algorithm: Algorithm, rounds: int, epochs: int, kind: str = "rounds"
) -> Trained:
    names = list(data.train)

    def batches(client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data.train[names[client]]
        for epoch in range(epochs):
            order = torch.randperm(len(x), generator=generator_for(seed, round_, client, epoch))
            yield from ((x[rows], y[rows]) for rows in order.split(image_set.batch))

    module = Network(seed, image_set)
    federation = Counted(
        algorithm,
        module,
        lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        lambda parameters: torch.optim.SGD(parameters, lr=image_set.lr[kind]),
        batches,
        [float(len(x)) for x, _ in data.train.values()],
        seed,
    )
    federation.model.data = lambda client, round_: iter([data.train[names[client]]])
    federation.model.held_out = lambda client: iter([data.held[names[client]]] if names[client] in data.held else [])
    with torch.enable_grad():
        federation.run(rounds)
    return Trained(module.eval(), dict(federation.server.state), federation.seconds, federation.bytes_up)


def judged(of: Callable[[Tensor], Tensor | Prediction], data: Data) -> dict[str, float]:
    """All scores of what gives the probabilities of images; how unlike an image looks is the entropy of them."""

    def both(images: Tensor) -> tuple[Tensor, Tensor]:
        found = of(images)
        p = found if isinstance(found, Tensor) else found.probabilities
        return p, torch.special.entr(p).sum(1)

    (probabilities, like), labels = both(data.test[0]), data.test[1]
    risks = risk_by_coverage(probabilities, labels)
    found = {name: float(value) for name, value in scored(probabilities, labels).items()} | {
        "ece": float(multiclass_calibration_error(probabilities, labels, 10, BINS)),
        "risk_at_90": float(risks[math.ceil(0.9 * len(risks)) - 1]),
    }
    for name, images in data.unlike.items():
        p, unlike = both(images)
        of_largest = binary_ranks(1 - p.max(1).values, 1 - probabilities.max(1).values)
        found |= {name: binary_ranks(unlike, like), f"{name}_by_largest": of_largest}
    return found


def binary_ranks(unlike: Tensor, like: Tensor) -> float:
    """The area under the curve of telling the one from the other by these numbers."""
    both, of = torch.cat([unlike, like]), torch.cat([torch.ones(len(unlike)), torch.zeros(len(like))]).long()
    return float(binary_auroc(both.argsort().argsort().double() / len(both), of))  # torchmetrics wants 0 to 1


def by_posterior(
    module: nn.Module, posterior: GaussianPosterior, scale: float, names: Sequence[str]
) -> Callable[[Tensor], Prediction]:
    uncertain = {n: p.detach() for n, p in module.named_parameters() if n.startswith(tuple(names))}

    def of(x: Tensor) -> Prediction:
        means, covariances = posterior.outputs(module, uncertain, x)
        return predict(means / scale, covariances / scale**2)

    return of


def chosen(module: nn.Module, posterior: GaussianPosterior, held: tuple[Tensor, Tensor]) -> Callable[[Tensor], Any]:
    """What a posterior of all parameters predicts, under the best prior and temperature on held-out records."""
    uncertain, (x, labels) = dict(module.named_parameters()), held
    best = (math.inf, posterior, 1.0)
    for prior in PRIORS:
        each = posterior.with_prior(prior)
        means, covariances = each.outputs(module, uncertain, x)
        for scale in SCALES:
            found = predict(means / scale, covariances / scale**2, TUNING_DRAWS).probabilities
            best = min(best, (float(scored(found, labels)["nll"]), each, scale), key=lambda b: b[0])
    return by_posterior(module, best[1], best[2], [""])


Scores = dict[str, float]


class Judged:
    """One seed's data in one setting, its trained models, and their scores by method."""

    def __init__(self, seed: int, name: str, setting: dict[str, Any], data_dir: str) -> None:
        self.seed, self.images, self.data = seed, SETS[name], dealt(seed, name, setting, data_dir)
        self.epochs = 5 if name == "digits" and setting["clients"] == 100 else 1
        self.together = replace(self.data, train={"all": whole(self.data.train)}, held={"all": whole(self.data.held)})
        self.with_posterior = functools.cache(self._with_posterior)
        self.methods: dict[str, Callable[[], Scores]] = {
            "plain": lambda: self.plain([self.with_posterior("last_layer")], rounds=ROUNDS),
            "scaled": self.scaled,
            "last_layer": lambda: self.posterior("last_layer"),
            "diagonal": lambda: self.posterior("diagonal"),
            "kronecker": lambda: self.posterior("kronecker"),
            "evidence": lambda: self.posterior("last_layer", by="evidence"),
            "ensemble": self.ensemble,
            "pvi": self.variational,
            "admm": lambda: self.variational(**ADMM),
            "fedla": self.online_laplace,
            "fedcurv": lambda: self.plain([self.run(FedCurv(CURV), "fedcurv")]),
            "fedbe": self.clients_models,
            "one_mean": lambda: self.once(FedAvg(), "one_mean"),
            "one_fisher": lambda: self.once(FedLA(strength=0), "one_fisher"),
            "one_lpa": lambda: self.once(FedLPA(LPA), "one_lpa"),
            "pooled": lambda: self.posterior("last_layer", pooled=True),
        }

    @torch.no_grad()
    def add(self, asked: set[str], found: dict[str, Scores]) -> None:
        """The scores of the methods that are asked for and not found yet."""
        for each in [name for name in self.methods if name in asked and name not in found]:
            try:
                found[each] = self.methods[each]()
            except UserError as error:  # the engine refuses what is not finite
                print(f"seed {self.seed}, {each}: {error}")
                found[each] = {}

    def run(self, algorithm: Algorithm, kind: str = "rounds", seed: int | None = None) -> Trained:
        """As many rounds as all have."""
        seed = self.seed if seed is None else seed
        return trained(self.images, self.data, seed, algorithm, ROUNDS, self.epochs, kind)

    def _with_posterior(self, structure: str, pooled: bool = False) -> Trained:
        algorithm = LaplacePosterior(ROUNDS, structure=structure)  # type: ignore[arg-type]
        if pooled:
            return trained(self.images, self.together, self.seed, algorithm, ROUNDS + 1, 1, "pooled")
        return trained(self.images, self.data, self.seed, algorithm, ROUNDS + 1, self.epochs)

    def plain(self, runs: Sequence[Trained], scale: float = 1.0, rounds: int | None = None) -> Scores:
        """The mean of the models' probabilities."""

        def of(images: Tensor) -> Tensor:
            return torch.stack([run.module(images) / scale for run in runs]).double().softmax(2).mean(0)

        costs = [run.cost(rounds) for run in runs]
        return judged(of, self.data) | {name: sum(cost[name] for cost in costs) for name in costs[0]}

    def scaled(self) -> Scores:
        run = self.with_posterior("last_layer")
        return self.plain([run], float(run.state[STATE + "plain_scale"]), rounds=ROUNDS)

    def posterior(self, structure: str, pooled: bool = False, **by: Any) -> Scores:
        run = self.with_posterior(structure, pooled)
        scale = float(run.state[STATE + "scale"]) if not by else 1.0
        names = ["head."] if structure == "last_layer" else [""]
        of = by_posterior(run.module, LaplacePosterior.posterior(run.state, **by), scale, names)
        return judged(of, self.data) | run.cost()

    def ensemble(self) -> Scores:
        others = [self.run(FedAvg(), seed=self.seed + 1000 * k) for k in range(1, MEMBERS)]
        return self.plain([self.with_posterior("last_layer"), *others], rounds=ROUNDS)

    def mean_of(self, vectors: Tensor, run: Trained) -> Scores:
        """The mean of the probabilities of models with these parameters (models, d)."""

        def of(images: Tensor) -> Tensor:
            outputs = []
            for vector in vectors:
                nn.utils.vector_to_parameters(vector, run.module.parameters())
                outputs.append(run.module(images).double().softmax(1))
            return torch.stack(outputs).mean(0)

        return judged(of, self.data) | run.cost()

    def variational(self, **options: float) -> Scores:
        algorithm = PartitionedVariationalInference(**options)
        run = self.run(algorithm)
        drawn = algorithm.posterior(run.state).sample(PVI_DRAWS, torch.Generator().manual_seed(self.seed))
        return self.mean_of(drawn.float(), run)

    def clients_models(self) -> Scores:
        run = self.run(FedBE())
        mean = nn.utils.parameters_to_vector(run.module.parameters())
        return self.mean_of(FedBE.members(mean, run.state, torch.Generator().manual_seed(self.seed)), run)

    def online_laplace(self) -> Scores:
        run = self.run(FedLA(), "fedla")
        records = len(self.together.train["all"][0])
        # squared gradients are those of batches' means
        curvature = records * self.images.batch * run.state["precision"].double()
        mean = nn.utils.parameters_to_vector(run.module.parameters())
        of = chosen(run.module, GaussianPosterior(mean, curvature), self.together.held["all"])
        return judged(of, self.data) | run.cost()

    def once(self, algorithm: Algorithm, kind: str) -> Scores:
        """One message after as many steps."""
        run = trained(self.images, self.data, self.seed, algorithm, 1, ROUNDS * self.epochs, kind)
        return self.plain([run])


def whole(parts: Dealt) -> tuple[Tensor, Tensor]:
    x, y = zip(*parts.values(), strict=True)
    return torch.cat(x), torch.cat(y)


def known(path: Path | None) -> dict[tuple[str, int], Any]:
    lines = path.read_text().splitlines() if path is not None and path.is_file() else []
    return {(row["setting"], row["seed"]): row["found"] for row in map(json.loads, lines)}


def equal(differences: list[float]) -> str:
    """p that their mean is outside of plus and minus MARGIN (two one-sided t-tests)."""
    if len(set(differences)) == 1:
        return "0" if abs(differences[0]) < MARGIN else "1"
    below = ttest_1samp(differences, MARGIN, alternative="less").pvalue
    return f"{max(below, ttest_1samp(differences, -MARGIN, alternative='greater').pvalue):.2g}"


def table(name: str, found: list[dict[str, dict[str, float]]], other: str) -> str:
    header = [
        "",
        "NLL",
        "NLL over FedAvg's",
        "p to FedAvg",
        "p to a temperature",
        "Brier",
        "calibration error",
        "accuracy in %",
    ]
    header += [f"p to accuracy off by {MARGIN * 100:g} points", "errors in % of the surest 90 %"]
    header += ["AUROC of turned images", "p to a temperature", f"AUROC of {other}", "p to a temperature"]
    header += ["kB up a client", "seconds"]
    rows = []
    for method, title in METHODS.items():
        own = [each for each in found if each.get(method)]
        if len(own) < 2:
            continue
        ratio = statistics.mean(math.log(each[method]["nll"] / each["plain"]["nll"]) for each in own)
        away = (
            equal([each[method]["accuracy"] - each["plain"]["accuracy"] for each in own]) if method != "plain" else ""
        )
        told = partial(cell, own, method)
        p, to = partial(against, own, method, "scaled"), against(own, method, "plain", "nll")
        few = "" if len(own) == len(found) else f" ({len(own)} seeds)"
        rows.append([title + few, told("nll"), f"{math.exp(ratio):.2f}", to, p("nll"), told("brier"), told("ece"),
            told("accuracy", 100, 1), away, told("risk_at_90", 100, 1), told("turned"), p("turned"),
            told("other"), p("other"), told("bytes_up", 1e-3, 0), told("seconds", 1, 1)])  # fmt: skip
    return markdown(name, header, rows)


def cell(found: list[dict[str, dict[str, float]]], method: str, score: str, factor: float = 1, digits: int = 3) -> str:
    """Mean and standard deviation; empty where a score was not taken."""
    if any(score not in each[method] for each in found):
        return ""
    values = [each[method][score] * factor for each in found]
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def against(found: list[dict[str, dict[str, float]]], method: str, other: str, score: str) -> str:
    """p of the paired t-test; of logarithms of NLL."""
    if any(score not in each[m] for each in found for m in (method, other)):
        return ""
    own, base = ([math.log(e[m][score]) if score == "nll" else e[m][score] for e in found] for m in (method, other))
    return "" if own == base else f"{ttest_rel(own, base).pvalue:.2g}"


def ratios(found: list[dict[str, dict[str, float]]]) -> str:
    """The geometric means of pairs' ratios of NLL, a sentence each."""
    said = []
    for method, other in PAIRS:
        both = [each for each in found if each.get(method) and each.get(other)]
        if len(both) > 1:
            ratio = math.exp(statistics.mean(math.log(each[method]["nll"] / each[other]["nll"]) for each in both))
            p = against(both, method, other, "nll")
            said.append(f"NLL of {METHODS[method]} over that of {METHODS[other]}: {ratio:.2f} (p = {p}).")
    return " ".join(said)


def report(args: Namespace, kept: dict[tuple[str, int], Any]) -> str:
    image_set, parts = SETS[args.data_set], []
    for name in image_set.settings:
        found = [kept[name, seed] for seed in args.seeds if (name, seed) in kept]
        if len(found) > 1:
            parts.append(table(f"{name}, {len(found)} seeds", found, image_set.other[1]).replace("# ", "## ", 1))
            parts += [said for said in [ratios(found)] if said]
    shown = {name for each in kept.values() for name in each}
    others = "; ".join(f"{METHODS[name]}, {lr}" for name, lr in image_set.lr.items() if name in shown)
    text = (
        f"{ROUNDS} rounds of FedAvg, SGD with a rate of {image_set.lr['rounds']}, batches of {image_set.batch}, "
        f"{image_set.hidden} hidden units. Other rates: {others}. {image_set.tuned_on} "
        "Mean and standard deviation over seeds. NLL in nats a record; the ratio is a geometric mean. p is of paired "
        "t-tests of log NLL and of AUROC against FedAvg and against the same models with a temperature, and of two "
        "one-sided ones of the accuracy beside FedAvg's; none is corrected for several comparisons. Temperature and "
        "prior precision are "
        f"chosen by held-out sums, from {len(SCALES)} and ten values. How unlike the others an image looks is the "
        "entropy of its probabilities, in each row. A score that was not taken is empty. Seconds are of one core, for "
        "all clients together, training and questions, beside other work; kB are one client's, up, in all rounds. "
        "FedLA was run with five seeds; any other method with fewer seeds than the rest has diverged on the others."
    )
    return "\n\n".join([f"# What the federation's posterior buys on {image_set.title}", text, *parts]) + "\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data-set", choices=SETS, default="digits")
    parser.add_argument("--data-dir", default="data")
    parser.add_argument("--seeds", nargs="+", type=int, help="those of the data set by default")
    parser.add_argument("--settings", nargs="+", help="some of the data set's; all by default")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="all but those that take long by default")
    parser.add_argument("--kept", type=Path, help="a file of finished runs, one JSON line each, of one data set")
    args = parser.parse_args()
    image_set = SETS[args.data_set]
    args.seeds = args.seeds or list(image_set.seeds)
    asked = set(args.methods or METHODS.keys() - {*image_set.without})
    kept = known(args.kept)
    for seed in args.seeds:
        for name in args.settings or image_set.settings:
            found = kept.setdefault((name, seed), {})
            pooled = next((each["pooled"] for (_, s), each in kept.items() if s == seed and "pooled" in each), None)
            if pooled is not None:  # in one place it is the same images whosever they are
                found.setdefault("pooled", pooled)
            if asked - found.keys():
                Judged(seed, args.data_set, image_set.settings[name], args.data_dir).add(asked, found)
                if args.kept is not None:
                    with args.kept.open("a") as file:
                        file.write(json.dumps({"setting": name, "seed": seed, "found": found}) + "\n")
    publish(report(args, kept), args.output)


if __name__ == "__main__":
    main()
