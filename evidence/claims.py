"""What the pages say of pairs of methods, against the committed runs: ratios with intervals, p corrected, equality.

python -m evidence.claims --output docs/results/claims.md

``docs/results/claims.yaml`` names the pairs. As in a study's own tables, Holm's correction is over a
table's comparisons with its baseline, and over its pairs, each family by itself.
"""

import csv
from pathlib import Path
from typing import NamedTuple

from benchmarks.side_by_side import options, publish
from lit_epgan.cli.significance import TITLES, holm, p_value, ratio_of_means
from lit_epgan.cli.study_plan import Study, TestName, read_studies
from lit_epgan.cli.table import number_text, p_text
from lit_epgan.lib.text import markdown as literal
from lit_epgan.runs.config_files import find_config
from lit_epgan.runs.yaml_files import load_yaml

RESULTS = Path(__file__).parent.parent / "docs" / "results"
HEADS = ("of", "to", "runs", "ratio", "95 % interval", "p", "p, corrected", "equal within")
HEAD = """# Comparisons, corrected for their number

`python -m evidence.claims` makes this page of the committed runs (`docs/results/*.csv`) and of
`docs/results/claims.yaml`, which names the pairs that the pages speak of. In each table every method stands against the
study's baseline, and then the named pairs. *Ratio* is of geometric means over seeds, with its 95 % interval. *p* is
that of the study's t-test (paired, for two columns of the same runs). *Corrected* is Holm's, for the comparisons with
the baseline in a column and for the pairs, each family by itself. *Equal within* is the smallest factor within which
two one-sided tests at 5 % show the two to be equal (Schuirmann 1987), not corrected; a margin that was not chosen
beforehand claims nothing. A ratio is missing where a value is 0.
"""
Values = dict[int, float]


class Side(NamedTuple):
    """One side of a comparison: a method's values of a column in one setting of a study."""

    variant: str
    method: str
    column: str

    def words(self, home: "Side") -> str:
        """What differs from where the comparison stands."""
        parts = [self.method, *([self.column] if self.column != home.column else [])]
        return ", ".join(parts + ([self.variant] if self.variant != home.variant else []))


Pair = tuple[Side, Side]


def side(text: str, home: Side) -> Side:
    """``method``, ``variant/method`` or ``variant/method/column``; an empty part is that of ``home``. A variant of
    another study is ``study:variant``."""
    parts = text.split("/")
    variant, method, column = {1: ["", *parts, ""], 2: [*parts, ""]}.get(len(parts), parts)
    return Side(variant or home.variant, method, column or home.column)


def committed(name: str) -> dict[Side, Values]:
    """The runs of a study that ended well, by seed."""
    found: dict[Side, Values] = {}
    with (RESULTS / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            for column in line.keys() - {"variant", "method", "seed", "settings"}:
                if line["exit_code"] == "0" and line[column]:
                    at = Side(line.get("variant", ""), line["method"], column)
                    found.setdefault(at, {})[int(line["seed"])] = float(line[column])
    return found


def with_baseline(study: Study, runs: dict[Side, Values], home: Side) -> list[Pair]:
    """Every method that has several runs, and the baseline."""
    sides = [home._replace(method=method) for method in study.methods if method != study.baseline]
    return [(each, home) for each in sides if len(runs.get(each, {})) > 1]


def pair(words: str, home: Side) -> Pair:
    """``X to Y``."""
    of, to = words.split(" to ")
    return side(of, home), side(to, home)


def lines(test: TestName, runs: dict[Side, Values], compared: list[Pair], home: Side) -> list[list[str]]:
    """A line of cells for each comparison of a family, under ``HEADS``."""
    tests: list[TestName] = ["paired" if of[:2] == to[:2] else test for of, to in compared]
    ps = [p_value(each, runs[of], runs[to]) for each, (of, to) in zip(tests, compared, strict=True)]
    found = []
    for each, (of, to), p, corrected in zip(tests, compared, ps, holm(ps), strict=True):
        ratio = ratio_of_means(each, runs[of], runs[to])
        numbers = ["-", "-"]
        equal = "-"
        if ratio is not None:
            numbers = [number_text(ratio.ratio), f"{number_text(ratio.low)} - {number_text(ratio.high)}"]
            equal = f"{max(ratio.inner_high, 1 / ratio.inner_low):.3f}"
        counts = f"{len(runs[of])}, {len(runs[to])}"
        texts = ["-" if x is None else p_text(x).removeprefix("p = ").removeprefix("p ") for x in (p, corrected)]
        found.append([of.words(home), to.words(home), counts, *numbers, *texts, equal])
    return found


def table(study: Study, named: list[str]) -> str:
    """A study's comparisons in one of its settings."""
    runs = committed(study.name)
    for other in {text.split(":")[0] for text in " to ".join(named).split(" to ") if ":" in text}:
        runs |= {at._replace(variant=f"{other}:{at.variant}"): values for at, values in committed(other).items()}
    home = Side(study.variant, study.baseline, study.judged[0].name)
    columns = [home, *(home._replace(column=each) for each in named if " to " not in each)]
    families = [with_baseline(study, runs, column) for column in columns]
    families.append([pair(each, home) for each in named if " to " in each])
    rows = [line for family in families for line in lines(study.test, runs, family, home)]
    title = " ".join(filter(None, (study.name, study.variant)))
    text = [f"## {title}", "", f"{study.judged[0].title}, by {TITLES[study.test]}:", ""]
    text += [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
    return "\n".join([*text, *(f"| {' | '.join(map(literal, row))} |" for row in rows), ""])


def main() -> None:
    """Write the page."""
    claims = load_yaml(RESULTS / "claims.yaml")
    parser = options(__doc__)
    parser.add_argument("--studies", nargs="+", default=list(claims), help="only these")
    args = parser.parse_args()
    text = [HEAD]
    for name in args.studies:
        for study in read_studies(find_config(f"studies/{name}.yaml", studies=True)):
            if study.variant in claims[name]:
                text.append(table(study, claims[name][study.variant] or []))
    publish("\n".join(text), args.output)


if __name__ == "__main__":
    main()
