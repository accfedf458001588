"""What a study's YAML says: methods, seeds and the metrics they are judged by."""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from lit_epgan.errors import UserError
from lit_epgan.runs.config_files import find_config
from lit_epgan.runs.yaml_files import load_yaml
from lit_epgan.study.names import check_file_name
from lit_epgan.study.variants import variants

Better = Literal["lower", "higher", "neither"]
TestName = Literal["welch", "paired"]
ARROWS: dict[Better, str] = {"lower": "↓", "higher": "↑", "neither": ""}
OverRounds = Literal["last", "mean", "sum"]


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Attributes:
        name: the column's short name.
        source: the metric's name in ``metrics.csv``.
        better: ``lower`` or ``higher``: what to print in bold; ``neither``: a price, not compared.
        title: the column's heading.
        over_rounds: what of a run's rounds counts: ``last``, ``mean`` or ``sum``.
        after: the value after this many rounds counts instead, so that a table shows a curve.
        scale: factor of the values, for another unit.
        relative: whether to print the mean's change against the baseline's.
    """

    name: str
    source: str
    better: Better
    title: str
    over_rounds: OverRounds = "last"
    scale: float = 1.0
    relative: bool = False
    after: int | None = None

    @property
    def heading(self) -> str:
        """The title with an arrow to where the better values are."""
        return f"{self.title} {ARROWS[self.better]}".strip()


@dataclass(frozen=True)
class Method:
    """A row of the table.

    Attributes:
        name: the name of its folder.
        title: what people call it.
        configs: the configurations it starts from, on top of each other.
        settings: dotted keys and their values, given to the command line in this order.
        source: another method whose runs this row is read from; it has none of its own then.
        metrics: column to metric name, where it is not the study's; "" (null) where the method has none.
        grid: name of the sample grid's picture in a run's folder.
        note: a sentence for the page.
        published: column to the value that the study's ``published`` source prints, as text.
    """

    name: str
    title: str
    configs: list[Path]
    settings: dict[str, Any] = field(default_factory=dict)
    source: str | None = None
    metrics: dict[str, str] = field(default_factory=dict)
    grid: str = "samples"
    note: str = ""
    published: dict[str, str] = field(default_factory=dict)

    @property
    def runs_of(self) -> str:
        """The method whose runs hold this row's numbers."""
        return self.source or self.name

    def metric(self, metric: Metric) -> str:
        """Name of ``metric`` in this method's ``metrics.csv``."""
        return self.metrics.get(metric.name, metric.source)


@dataclass(frozen=True)
class Ratio:
    """A claim about two methods.

    Attributes:
        metric: the column.
        of, to: the methods whose ratio it is.
        at_most: a bar for the ratio.
        equal_within: a factor, within which the two are to be equal.
    """

    metric: str
    of: str
    to: str
    at_most: float | None = None
    equal_within: float | None = None


@dataclass(frozen=True)
class Study:
    """A study as its YAML says it.

    Attributes:
        published: where the methods' published values stand, as "EP-GAN paper, table 1"; empty without any.
        ratios: claims about pairs of methods, tested together.
        pairwise: methods to be compared with each other, beside the comparison with the baseline.
        test: the t-test of these comparisons.
        variant: the setting that it is about, where the YAML has several.
    """

    name: str
    title: str
    description: str
    seeds: list[int]
    baseline: str
    metrics: list[Metric]
    methods: dict[str, Method]
    partition: str = "partition"
    published: str = ""
    ratios: list[Ratio] = field(default_factory=list)
    pairwise: list[str] = field(default_factory=list)
    variant: str = ""
    test: TestName = "welch"

    @property
    def judged(self) -> list[Metric]:
        """The metrics that methods are judged by; the others are prices."""
        return [metric for metric in self.metrics if metric.better != "neither"]

    @property
    def trained(self) -> list[Method]:
        """The methods that have runs of their own."""
        return [method for method in self.methods.values() if method.source is None]


STUDY_KEYS = (
    *("title", "description", "config", "seeds", "baseline", "metrics", "methods"),
    *("partition", "published", "pairwise", "ratios", "test", "variants"),
)
RUN_COLUMNS = ("variant", "method", "seed", "exit_code", "seconds", "rounds", "settings")  # of runs.csv, beside metrics
METHOD_KEYS = ("title", "config", "set", "from", "metrics", "grid", "note", "published")
RATIO_KEYS = ("metric", "of", "to", "at_most", "equal_within")
METRIC_KEYS = ("metric", "better", "title", "over_rounds", "scale", "relative", "after")


def read_studies(path: Path) -> list[Study]:
    """Read and check a study's YAML: one study, or one for each of its variants.

    Raises:
        UserError: A key is missing or misspelt, or a name leads nowhere; the message says which.
    """
    content = load_yaml(path)
    _check_keys(content, STUDY_KEYS, str(path))
    for key in ("config", "seeds", "baseline", "metrics", "methods"):
        if not content.get(key):
            raise UserError(f"{path}: {key} is missing.")
    for key in ("metrics", "methods", "variants"):
        named = content.get(key) or {}
        if not isinstance(named, dict):
            raise UserError(f"{path}: {key} is no mapping of names to what is said of them.")
        for name in named:
            check_file_name(name, f"{path}: {key}")
    return [_study(variant, one, path) for variant, one in variants(content, path)]


def read_study(path: Path) -> Study:
    """As ``read_studies``, of a YAML without variants."""
    (study,) = read_studies(path)
    return study


def _study(variant: str, content: dict[str, Any], path: Path) -> Study:
    metrics = [_metric(name, entry, path) for name, entry in content["metrics"].items()]
    methods = {name: _method(name, entry or {}, content["config"], path) for name, entry in content["methods"].items()}
    study = Study(
        name=path.stem,
        title=str(content.get("title", path.stem)),
        description=str(content.get("description") or ""),
        seeds=_seeds(content["seeds"], path),
        baseline=content["baseline"],
        metrics=metrics,
        methods=methods,
        partition=content.get("partition", "partition"),
        published=str(content.get("published") or ""),
        ratios=[_ratio(entry, f"{path}: ratios[{i}]") for i, entry in enumerate(content.get("ratios") or [])],
        pairwise=content.get("pairwise") or [],
        variant=variant,
        test=_test(content.get("test", "welch"), path),
    )
    check_file_name(study.partition, f"{path}: partition")
    _check_names(study, path)
    return study


def _metric(name: str, entry: Any, path: Path) -> Metric:
    where = f"{path}: metrics.{name}"
    if name in RUN_COLUMNS:
        raise UserError(f"{where}: this name is a column that every runs.csv has; choose another.")
    _check_keys(entry, METRIC_KEYS, where)
    better, over_rounds = entry.get("better", "lower"), entry.get("over_rounds", "last")
    for key, value, choices in (("better", better, Better), ("over_rounds", over_rounds, OverRounds)):
        if value not in get_args(choices):
            raise UserError(f"{where}.{key} is {value!r}; it is one of {', '.join(get_args(choices))}.")
    scale = entry.get("scale", 1.0)
    if not isinstance(scale, int | float):
        raise UserError(f"{where}.scale is {scale!r}; it is a number.")
    after = entry.get("after")
    if after is not None and (not isinstance(after, int) or after < 1):
        raise UserError(f"{where}.after is {after!r}; it is a number of rounds, at least 1.")
    relative = bool(entry.get("relative", False))
    title = str(entry.get("title", name))
    return Metric(name, entry.get("metric", name), better, title, over_rounds, scale, relative, after)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _method(name: str, entry: Any, config: str | list[str], path: Path) -> Method:
    where = f"{path}: methods.{name}"
    _check_keys(entry, METHOD_KEYS, where)
    check_file_name(entry.get("grid", "samples"), f"{where}.grid")
    return Method(
        name=name,
        title=str(entry.get("title", name)),
        configs=[find_config(str(each)) for each in _listed(entry.get("config", config))],
        settings=entry.get("set") or {},
        source=entry.get("from"),
        metrics={column: source or "" for column, source in (entry.get("metrics") or {}).items()},
        grid=entry.get("grid", "samples"),
        note=entry.get("note", ""),
        published={column: str(value) for column, value in (entry.get("published") or {}).items()},
    )


def _ratio(entry: Any, where: str) -> Ratio:
    _check_keys(entry, RATIO_KEYS, where)
    for key in ("metric", "of", "to"):
        if not isinstance(entry.get(key), str):
            raise UserError(f"{where}: {key} is missing.")
    bars = {key: entry[key] for key in ("at_most", "equal_within") if key in entry}
    for key, least in (("at_most", 0), ("equal_within", 1)):
        if key in bars and not (isinstance(bars[key], int | float) and bars[key] > least):
            raise UserError(f"{where}.{key} is {bars[key]!r}; it is a number above {least}.")
    return Ratio(entry["metric"], entry["of"], entry["to"], **bars)


def _test(value: Any, path: Path) -> TestName:
    for name in get_args(TestName):
        if value == name:
            return name
    raise UserError(f"{path}: test is {value!r}; it is one of {', '.join(get_args(TestName))}.")


def _seeds(value: Any, path: Path) -> list[int]:
    if not isinstance(value, list) or not all(isinstance(seed, int) for seed in value) or len(set(value)) < len(value):
        raise UserError(f"{path}: seeds is {value!r}; it is a list of different whole numbers, e.g. [0, 1, 2].")
    return value


def _check_names(study: Study, path: Path) -> None:
    if study.baseline not in study.methods:
        raise UserError(f"{path}: the baseline {study.baseline!r} is none of the methods {', '.join(study.methods)}.")
    for name in study.pairwise:
        if name not in study.methods:
            raise UserError(
                f"{path}: pairwise names {name!r}, which is none of the methods {', '.join(study.methods)}."
            )
    columns = [metric.name for metric in study.metrics]
    for i, ratio in enumerate(study.ratios):
        for name, known in ((ratio.of, study.methods), (ratio.to, study.methods), (ratio.metric, columns)):
            if name not in known:
                raise UserError(f"{path}: ratios[{i}] names {name!r}, which is none of {', '.join(known)}.")
    for method in study.methods.values():
        if method.source is not None and method.source not in [other.name for other in study.trained]:
            raise UserError(
                f"{path}: methods.{method.name}.from is {method.source!r}, which is no method with runs of its own."
            )
        for key, named in (("metrics", method.metrics), ("published", method.published)):
            for column in named:
                if column not in columns:
                    raise UserError(
                        f"{path}: methods.{method.name}.{key} names {column!r}; the columns are {', '.join(columns)}."
                    )


def _check_keys(entry: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(entry, dict):
        raise UserError(f"{where}: expected the keys {', '.join(known)}.")
    for key in entry:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(known)}."
            raise UserError(f"{where}: there is no key {key}; {hint}")
