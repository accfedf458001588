"""Models of clients' own: posteriors that start from the federation's, beside fine-tuning and its kin.

OMP_NUM_THREADS=1 python -m evidence.personal_posteriors --output evidence/results/personal_posteriors.md

scikit-learn's digits, an MLP with 64 hidden units, 20 rounds of one local epoch; each seed has its own partition,
initialisation and batches. Of each client's images 60 % train; 20 % are held out, and choose by sums over clients a
temperature of every method's logits, and what the posteriors choose; 20 % are judged, each by its client's model.
``--tune`` says which of eight settings of each method predicts held-out images best, on seeds that no result uses.
``--kept FILE`` keeps what is finished.
"""

import copy
import json
import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_calibration_error

from benchmarks.side_by_side import markdown, options, publish
from evidence.posteriors import ROUNDS, SETS, Dealt, Network
from lit_epgan.bayes.posterior import predict
from lit_epgan.callbacks.posterior_predictive import BINS, scored
from lit_epgan.cli.significance import holm, paired
from lit_epgan.datamodules import ImageDataModule
from lit_epgan.engine import Algorithm, PlainFederation
from lit_epgan.federated import Ditto, FedRep, LaplacePosterior
from lit_epgan.federated.bayesian.laplace import SCALES, STATE
from lit_epgan.lib.randomness import generator_for

SETTINGS: dict[str, dict[str, Any]] = {
    "10 clients, Dirichlet(0.1)": {"clients": 10, "partition": "dirichlet", "beta": 0.1},
    "10 clients, Dirichlet(0.5)": {"clients": 10, "partition": "dirichlet", "beta": 0.5},
    "10 clients, at random": {"clients": 10, "partition": "iid"},
}
METHODS = {
    "fedavg": "FedAvg",
    "posterior": "its posterior of the last layer",
    "personal": "clients' own posteriors, begun from it",
    "mean": "the same, their means alone",
    "finetuned": "FedAvg, then fine-tuning",
    "fedrep": "FedRep",
    "ditto": "Ditto",
    "alone": "every client alone",
}
RATES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5)
TRIED: dict[str, list[tuple[float, ...]]] = {
    "fedavg": [(rate,) for rate in RATES],
    "finetuned": [(epochs, rate) for epochs in (3, 10) for rate in (0.01, 0.05, 0.2, 0.5)],
    "fedrep": [(rate,) for rate in RATES],
    "ditto": [(lam, rate) for lam in (0.01, 0.1, 1.0, 3.0) for rate in (0.1, 0.3)],
    "alone": [(rate,) for rate in RATES],
}
TUNED = ("fedavg", "finetuned", "fedrep", "ditto", "alone")
BEST: dict[str, dict[str, tuple[float, ...]]] = {  # as ``--tune --seeds 900 901 902`` says
    name: dict(zip(TUNED, best, strict=True))
    for name, best in {
        "10 clients, Dirichlet(0.1)": [(0.5,), (10, 0.2), (0.5,), (1.0, 0.1), (0.5,)],
        "10 clients, Dirichlet(0.5)": [(0.5,), (10, 0.05), (0.7,), (1.0, 0.1), (0.3,)],
        "10 clients, at random": [(1.0,), (3, 0.2), (1.0,), (1.0, 0.3), (0.5,)],
    }.items()
}
CHOSEN = {"own_precision": "precisions", "own_temperature": "factors of covariances", "own_scale": "temperatures"}
DIGITS = SETS["digits"]
Outputs = dict[str, tuple[Tensor, Tensor]]  # of each client: logits and labels


def dealt(seed: int, setting: dict[str, Any]) -> tuple[Dealt, Dealt, Dealt]:
    """Each client's images and labels: to train, held out, to be judged."""
    module = ImageDataModule("digits", **setting, partition_by_seed=True, val_fraction=0.4, seed=seed, split="by_seed")
    found = module.load()
    assert isinstance(found.val, dict)

    def all_of(dataset: Any, rows: list[int]) -> tuple[Tensor, Tensor]:
        return tuple(dataset.fetch(rows))

    held, judged = {}, {}
    for name, part in found.val.items():
        order = torch.randperm(len(part), generator=generator_for(seed, "held out", name)).tolist()
        held[name], judged[name] = (all_of(part, rows) for rows in (order[::2], order[1::2] or order))
    return {name: all_of(part, list(range(len(part)))) for name, part in found.train.items()}, held, judged


class Trained(Network):
    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def trained(
    algorithm: Algorithm, train: Dealt, held: Dealt, seed: int, rate: float, rounds: int = ROUNDS, **options: Any
) -> PlainFederation:
    names = list(train)

    def batches(client: int, round_: int) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = train[names[client]]
        order = torch.randperm(len(x), generator=generator_for(seed, round_, client))
        yield from ((x[rows], y[rows]) for rows in order.split(DIGITS.batch))

    federation = PlainFederation(
        algorithm,
        Trained(seed, DIGITS),
        Trained.training_step,
        lambda parameters: torch.optim.SGD(parameters, lr=rate),
        batches,
        [float(len(x)) for x, _ in train.values()],
        seed,
        names=names,
        **options,
    )
    federation.model.data = lambda client, round_: iter([train[names[client]]])
    federation.model.held_out = lambda client: iter([held[names[client]]] if names[client] in held else [])
    federation.run(rounds)
    federation.module.eval()
    return federation


def personal_models(method: str, train: Dealt, held: Dealt, seed: int, setting: tuple[float, ...], rate: float) -> Any:
    """Client's name -> its model, of every method without a posterior; ``rate``: FedAvg's."""
    if method == "fedavg":
        module = trained(Algorithm(), train, held, seed, setting[0]).module
        return lambda name: module
    if method == "fedrep":
        federation = trained(FedRep(), train, held, seed, setting[0], local=["head.*"])
        of = federation.federation.private.personal
    else:
        if method == "finetuned":
            more, lr = setting
            algorithm, rounds = Ditto(0.0, lr, ROUNDS), ROUNDS + int(more)
        else:
            algorithm, rounds = Ditto(setting[0] if method == "ditto" else 0.0, setting[-1]), ROUNDS
        federation = trained(algorithm, train, held, seed, rate, rounds)
        flat, server = federation.model.flat, federation.server.parameters

        def of(name: str) -> dict[str, Tensor]:
            state = federation.federation.private.clients[name].algorithm
            return {n: t.clone() for n, t in flat.as_dict(algorithm.personal(state, server)).items()}

    def model(name: str) -> nn.Module:
        own = copy.deepcopy(federation.module)
        own.load_state_dict(of(name), strict=False)
        return own.eval()

    return model


def plain(models: Callable[[str], nn.Module], parts: Dealt) -> Outputs:
    return {name: (models(name)(x).double(), y) for name, (x, y) in parts.items()}


def scale_of(held: Outputs) -> float:
    """The temperature that predicts held-out images best, by the sum over clients."""
    return min(SCALES, key=lambda scale: loss_of(held, scale))


def loss_of(outputs: Outputs, scale: float) -> float:
    return sum(float(nn.functional.cross_entropy(z / scale, y, reduction="sum")) for z, y in outputs.values())


def judged(probabilities: Outputs) -> dict[str, float]:
    p, labels = (torch.cat(each) for each in zip(*probabilities.values(), strict=True))
    found = {name: float(value) for name, value in scored(p, labels).items()}
    worst = min(float((each.argmax(1) == y).double().mean()) for each, y in probabilities.values())
    return found | {"worst": worst, "ece": float(multiclass_calibration_error(p, labels, 10, BINS))}


@torch.no_grad()
def others(seed: int, name: str) -> dict[str, dict[str, float]]:
    """The scores of the methods without a posterior, on one seed."""
    train, held, parts = dealt(seed, SETTINGS[name])
    found, rate = {}, BEST[name]["fedavg"][0]
    for method in TRIED:
        models = personal_models(method, train, held, seed, BEST[name][method], rate)
        scale = scale_of(plain(models, held))
        found[method] = judged({n: ((z / scale).softmax(1), y) for n, (z, y) in plain(models, parts).items()})
    return found


@torch.no_grad()
def posteriors(seed: int, name: str) -> dict[str, dict[str, float]]:
    """The scores of the federation's posterior and of the clients' own, and what the latter have chosen."""
    train, held, parts = dealt(seed, SETTINGS[name])
    algorithm = LaplacePosterior(ROUNDS, personal=True)
    federation = trained(algorithm, train, held, seed, BEST[name]["fedavg"][0], ROUNDS + 1)
    state, module = federation.server.state, federation.module
    head = {n: p.detach() for n, p in module.named_parameters() if n.startswith("head.")}
    scale, own_scale = (float(state[STATE + each]) for each in ("scale", "own_scale"))
    common, own, mean = Outputs(), Outputs(), Outputs()
    for client, (x, y) in parts.items():
        means, covariances = algorithm.posterior(state).outputs(module, head, x)
        common[client] = predict(means / scale, covariances / scale**2).probabilities, y
        posterior = algorithm.posterior(state, own=federation.federation.private.clients[client].algorithm)
        at = posterior.mean.float().split([p.numel() for p in head.values()])
        values = {n: t.view_as(p) for (n, p), t in zip(head.items(), at, strict=True)}
        means, covariances = posterior.outputs(module, values, x)
        own[client] = predict(means / own_scale, covariances / own_scale**2).probabilities, y
        mean[client] = (means.double() / own_scale).softmax(1), y
    chosen = {each: float(state[STATE + each]) for each in CHOSEN}
    return {"posterior": judged(common), "personal": judged(own), "mean": judged(mean), "chosen": chosen}


@torch.no_grad()
def tune(seeds: list[int], settings: list[str]) -> None:
    """Print, by setting and method, the loss of each setting on held-out images, and the best."""
    for name in settings:
        best: dict[str, tuple[float, ...]] = {}
        for method, tried in TRIED.items():
            losses = dict.fromkeys(tried, 0.0)
            for seed in seeds:
                train, held, _ = dealt(seed, SETTINGS[name])
                for each in tried:
                    rate = best["fedavg"][0] if best else 0.0
                    outputs = plain(personal_models(method, train, held, seed, each, rate), held)
                    records = sum(len(y) for _, y in outputs.values())
                    losses[each] += loss_of(outputs, scale_of(outputs)) / records / len(seeds)
            best[method] = min(losses, key=losses.__getitem__)
            print(
                json.dumps({"setting": name, "method": method, "best": best[method], "losses": str(losses)}), flush=True
            )


def known(path: Path | None) -> dict[tuple[str, int], Any]:
    """Of each setting and seed the scores that are finished."""
    found: dict[tuple[str, int], Any] = {}
    for line in path.read_text().splitlines() if path is not None and path.is_file() else []:
        row = json.loads(line)
        found.setdefault((row["setting"], row["seed"]), {}).update(row["found"])
    return found


def values(found: list[dict[str, Any]], method: str, score: str) -> list[float]:
    return [each[method][score] for each in found]


def tests(by_setting: dict[str, list[dict[str, Any]]], score: str) -> dict[tuple[str, str], float]:
    """p of each setting and method against the clients' own posteriors, corrected by Holm for all of them."""
    keys = [(name, method) for name in by_setting for method in METHODS if method != "personal"]
    change = math.log if score == "nll" else float
    pairs = [[list(map(change, values(by_setting[n], m, score))) for m in (method, "personal")] for n, method in keys]
    return dict(zip(keys, holm([paired(*pair) for pair in pairs]), strict=True))


def report(seeds: list[int], kept: dict[tuple[str, int], Any]) -> str:
    found = {
        name: [kept[name, seed] for seed in seeds if METHODS.keys() <= kept.get((name, seed), {}).keys()]
        for name in SETTINGS
    }
    found = {name: each for name, each in found.items() if len(each) > 1}
    by_nll, by_accuracy = tests(found, "nll"), tests(found, "accuracy")
    header = ["", "NLL", "p", "calibration error", "accuracy in %", "p", "worst client in %"]
    parts = []
    for name, each in found.items():
        rows = []
        for method, title in METHODS.items():
            cells = []
            for score, factor, digits in (("nll", 1, 3), ("ece", 1, 3), ("accuracy", 100, 1), ("worst", 100, 1)):
                own = values(each, method, score)
                cells.append(
                    f"{statistics.mean(own) * factor:.{digits}f} ± {statistics.stdev(own) * factor:.{digits}f}"
                )
            p, p_accuracy = (f"{by[name, method]:.2g}" if method != "personal" else "" for by in (by_nll, by_accuracy))
            rows.append([title, cells[0], p, *cells[1:3], p_accuracy, cells[3]])
        chosen = [", ".join(f"{run['chosen'][key]:.2g}" for run in each) for key in CHOSEN]
        told = "; ".join(f"{what}: {numbers}" for what, numbers in zip(CHOSEN.values(), chosen, strict=True))
        best = "; ".join(f"{m} {' '.join(map(str, b))}" for m, b in BEST[name].items())
        parts += [
            markdown(f"{name}, {len(each)} seeds", header, rows).replace("# ", "## ", 1),
            f"Chosen by seed: {told}. Settings: {best}.",
        ]
    text = (
        f"{ROUNDS} rounds of one local epoch, SGD, batches of {DIGITS.batch}. 20 % of each client's images are "
        "judged by its own model. Mean and standard deviation over seeds; NLL in nats an image. All methods' "
        f"logits are divided by the one of {len(SCALES)} temperatures that predicts held-out images best. p: "
        "paired t-tests of log NLL and of accuracy against clients' own posteriors, each corrected by Holm for "
        f"all {len(by_nll)}. Settings, the best of eight of each method by the NLL of held-out images of seeds 900"
        " to 902: rates; of fine-tuning epochs and rate; of Ditto lam and rate. The posteriors choose from six "
        "precisions and three factors of the covariance in each run."
    )
    return "\n\n".join(["# Models of clients' own on digits", text, *parts]) + "\n"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(300, 310)))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--kept", type=Path, help="a file of finished runs, one JSON line each")
    args = parser.parse_args()
    if args.tune:
        tune(args.seeds, args.settings)
        return
    kept = known(args.kept)
    for seed in args.seeds:
        for name in args.settings:
            done = kept.setdefault((name, seed), {})
            for judge, needs in ((others, "fedavg"), (posteriors, "personal")):
                if needs in done:
                    continue
                done |= (new := judge(seed, name))
                if args.kept is not None:
                    with args.kept.open("a") as file:
                        file.write(json.dumps({"setting": name, "seed": seed, "found": new}) + "\n")
    publish(report(args.seeds, kept), args.output)


if __name__ == "__main__":
    main()
