"""What a study's YAML says: methods, seeds and the metrics they are judged by; one study for each of its variants."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, TypeAdapter, ValidationError, WrapValidator
from pydantic.dataclasses import dataclass
from pydantic_core import ErrorDetails, PydanticCustomError

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import meant, printable
from lit_epgan.runs.config_files import find_config
from lit_epgan.runs.yaml_files import load_yaml

LONGEST_NAME = 200  # bytes; file systems take 255, and something is put before and after
OWN_KEY = "(its key)"  # under which the name of an entry is added to it
OWN_VARIANT = "(its variant)"
RUN_COLUMNS = ("variant", "method", "seed", "exit_code", "seconds", "rounds", "settings")  # of runs.csv, beside metrics
ARROWS = {"lower": "↓", "higher": "↑", "neither": ""}
OWN_TYPES = ("value", "name", "mapping")  # of errors whose message goes on from the place


def _is(what: str) -> WrapValidator:
    """The message about a value says what it is to be, whatever is wrong with it."""

    def validated(value: Any, validate: Callable[[Any], Any]) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise PydanticCustomError(
                "value", " is {value}; it is {what}.", {"value": repr(value), "what": what}
            ) from None

    return WrapValidator(validated)


def _file_name(name: Any) -> str:
    """A name that a file can have in any folder, and nowhere else: folders and pictures bear it."""
    if not isinstance(name, str):
        fault = "is no text (put it in quotes)"
    elif not name.strip():
        fault = "is empty"
    elif "/" in name or "\\" in name:
        fault = "has a slash in it"
    elif name.startswith("."):
        fault = "begins with a dot"
    elif printable(name) != name:
        fault = "has control characters in it"
    elif len(name.encode()) > LONGEST_NAME:
        fault = f"is longer than {LONGEST_NAME} bytes"
    else:
        return name
    text = repr(name)
    shown = text if len(text) < 80 else f"{text[:60]}...{text[-10:]}"
    told = {"name": shown, "fault": fault}
    raise PydanticCustomError("name", ": {name} {fault}; it names a file or folder, so choose another one.", told)


def _said(entry: Any) -> Any:
    """An entry without what is null, which is as good as left out."""
    return {key: value for key, value in entry.items() if value is not None} if isinstance(entry, dict) else entry


def _named(*keys: str) -> BeforeValidator:
    """A mapping of names to entries; each entry has its name under ``keys``, where it says nothing else there."""

    def named(value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError("mapping", " is no mapping of names to what is said of them.")
        entries = {_file_name(name): _said({} if entry is None else entry) for name, entry in value.items()}
        return {
            name: {**dict.fromkeys(keys, name), **entry} if isinstance(entry, dict) else entry
            for name, entry in entries.items()
        }

    return BeforeValidator(named)


def _different(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError
    return seeds


Better = Annotated[Literal["lower", "higher", "neither"], _is("one of lower, higher, neither")]
TestName = Annotated[Literal["welch", "paired"], _is("one of welch, paired")]
OverRounds = Annotated[Literal["last", "mean", "sum"], _is("one of last, mean, sum")]
Number = Annotated[float, Field(strict=True), _is("a number")]
Rounds = Annotated[int, Field(strict=True, ge=1), _is("a number of rounds, at least 1")]
Seeds = Annotated[
    list[Annotated[int, Field(strict=True)]],
    Field(min_length=1),
    AfterValidator(_different),
    _is("a list of different whole numbers, e.g. [0, 1, 2]"),
]
Text = Annotated[str, PlainValidator(str)]
Own = Annotated[Text, Field(alias=OWN_KEY)]
FileName = Annotated[str, PlainValidator(_file_name)]
Configs = Annotated[list[Path], BeforeValidator(lambda value: value if isinstance(value, list) else [value])]
Settings = dict[str, Any]
changed: Any = dataclasses.replace  # mypy takes none of pydantic's for a dataclass
checked = dataclass(frozen=True, config={"extra": "forbid", "validate_by_name": True, "validate_by_alias": True})


@checked
class Metric:
    """A column of the table.

    Attributes:
        source: the metric's name in ``metrics.csv``.
        better: ``lower`` or ``higher``: what to print in bold; ``neither``: a price, not compared.
        over_rounds: what of a run's rounds counts: ``last``, ``mean`` or ``sum``.
        after: the value after this many rounds counts instead, so that a table shows a curve.
        scale: factor of the values, for another unit.
        relative: whether to print the mean's change against the baseline's.
    """

    name: Own
    source: Annotated[Text, Field(alias="metric")]
    title: Text
    better: Better = "lower"
    over_rounds: OverRounds = "last"
    scale: Number = 1.0
    relative: bool = False
    after: Rounds | None = None

    @property
    def heading(self) -> str:
        """The title with an arrow to where the better values are."""
        return f"{self.title} {ARROWS[self.better]}".strip()


@checked
class Method:
    """A row of the table.

    Attributes:
        configs: the configurations it starts from, on top of each other; by default the study's.
        settings: dotted keys and their values, given to the command line in this order.
        source: another method whose runs this row is read from; it has none of its own then.
        metrics: column to metric name, where it is not the study's; None where the method has none.
        grid: name of the sample grid's picture in a run's folder.
        published: column to the value that the study's ``published`` source prints, as text.
    """

    name: Own
    title: Text
    configs: Configs = Field(default_factory=list, alias="config")
    settings: Settings = Field(default_factory=dict, alias="set")
    source: Text | None = Field(default=None, alias="from")
    metrics: dict[str, Text | None] = Field(default_factory=dict)
    grid: FileName = "samples"
    note: Text = ""
    published: dict[str, Text] = Field(default_factory=dict)

    @property
    def runs_of(self) -> str:
        """The method whose runs hold this row's numbers."""
        return self.source or self.name

    def metric(self, metric: Metric) -> str:
        """Name of ``metric`` in this method's ``metrics.csv``; empty where it has none."""
        return self.metrics.get(metric.name, metric.source) or ""


@checked
class Ratio:
    """A claim about the ratio of two methods in a column: ``at_most`` a bar, or ``equal_within`` a factor."""

    metric: Text
    of: Text
    to: Text
    at_most: Annotated[float, Field(strict=True, gt=0), _is("a number above 0")] | None = None
    equal_within: Annotated[float, Field(strict=True, gt=1), _is("a number above 1")] | None = None


@checked
class Variant:
    """A setting in which the study's methods are compared: settings before the methods' own, seeds and methods, with
    further settings for each, by default the study's, and method to the values that stand in place of its published
    ones."""

    title: Text
    settings: Settings = Field(default_factory=dict, alias="set")
    seeds: Seeds | None = None
    methods: Annotated[
        dict[str, Settings | None] | None,
        BeforeValidator(lambda value: dict.fromkeys(value) if isinstance(value, list) else value),
    ] = None
    published: dict[str, dict[str, Text]] = Field(default_factory=dict)


@checked
class Study:
    """A study as its YAML says it.

    Attributes:
        columns: the metrics by name.
        published: where the methods' published values stand, as "EP-GAN paper, table 1"; empty without any.
        ratios: claims about pairs of methods, tested together.
        pairwise: methods to be compared with each other, beside the comparison with the baseline.
        test: the t-test of these comparisons.
        variant: the setting that it is about, where the YAML has several.
    """

    name: Own
    title: Text
    configs: Annotated[Configs, Field(alias="config")]
    seeds: Seeds
    baseline: Text
    columns: Annotated[dict[str, Metric], _named(OWN_KEY, "metric", "title"), Field(alias="metrics", min_length=1)]
    methods: Annotated[dict[str, Method], _named(OWN_KEY, "title"), Field(min_length=1)]
    description: Text = ""
    partition: FileName = "partition"
    published: Text = ""
    ratios: list[Ratio] = Field(default_factory=list)
    pairwise: list[str] = Field(default_factory=list)
    test: TestName = "welch"
    variants: Annotated[dict[str, Variant], _named("title")] = Field(default_factory=dict)
    variant: Annotated[str, Field(alias=OWN_VARIANT)] = ""

    @property
    def metrics(self) -> list[Metric]:
        return list(self.columns.values())

    @property
    def judged(self) -> list[Metric]:
        """The metrics that methods are judged by; the others are prices."""
        return [metric for metric in self.metrics if metric.better != "neither"]

    @property
    def trained(self) -> list[Method]:
        """The methods that have runs of their own."""
        return [method for method in self.methods.values() if method.source is None]


def read_studies(path: Path) -> list[Study]:
    """Read and check a study's YAML: one study, or one for each of its variants. UserError: A key is missing or
    misspelt, or a name leads nowhere; the message says which."""
    content = _said(load_yaml(path))
    if isinstance(content, dict):
        content = {OWN_KEY: path.stem, "title": path.stem, **content}
    try:
        study = TypeAdapter(Study).validate_python(content, by_alias=True, by_name=False)
    except ValidationError as error:
        errors = sorted(error.errors(), key=lambda each: each["type"] != "unexpected_keyword_argument")
        raise UserError(_sentence(errors[0], str(path))) from error
    configs = {name: method.configs or study.configs for name, method in study.methods.items()}
    found = {name: [find_config(str(each)) for each in some] for name, some in configs.items()}
    study = changed(study, methods={name: changed(study.methods[name], configs=some) for name, some in found.items()})
    in_settings = [_in_setting(study, name, each, path) for name, each in study.variants.items()]
    for one in in_settings or [study]:
        _check_names(one, path)
    return in_settings or [study]


def _in_setting(study: Study, name: str, variant: Variant, path: Path) -> Study:
    """The study of a variant: a claim about a method that does not take part is left out."""
    further = dict.fromkeys(study.methods) if variant.methods is None else variant.methods
    for method in (*further, *variant.published):
        if method not in study.methods:
            there = ", ".join(study.methods)
            raise UserError(f"{path}: variants.{name} names {method!r}, which is none of the methods {there}.")
    methods = {
        key: changed(
            method,
            settings=variant.settings | method.settings | (further[key] or {}),
            published=variant.published.get(key, method.published),
        )
        for key, method in study.methods.items()
        if key in further
    }
    absent = study.methods.keys() - methods.keys()
    return changed(
        study,
        variant=name,
        title=f"{study.title}: {variant.title}",
        seeds=variant.seeds or study.seeds,
        methods=methods,
        pairwise=[method for method in study.pairwise if method not in absent],
        ratios=[ratio for ratio in study.ratios if not {ratio.of, ratio.to} & absent],
    )


def _check_names(study: Study, path: Path) -> None:
    columns, methods = list(study.columns), list(study.methods)
    for column in columns:
        if column in RUN_COLUMNS:
            where = f"{path}: metrics.{column}"
            raise UserError(f"{where}: this name is a column that every runs.csv has; choose another.")
    if study.baseline not in methods:
        raise UserError(f"{path}: the baseline {study.baseline!r} is none of the methods {', '.join(methods)}.")
    named = [("pairwise", name, "the methods ", methods) for name in study.pairwise]
    for i, ratio in enumerate(study.ratios):
        named += [(f"ratios[{i}]", name, "", methods) for name in (ratio.of, ratio.to)]
        named.append((f"ratios[{i}]", ratio.metric, "", columns))
    for where, name, kind, known in named:
        if name not in known:
            raise UserError(f"{path}: {where} names {name!r}, which is none of {kind}{', '.join(known)}.")
    for method in study.methods.values():
        where, source = f"{path}: methods.{method.name}", method.source
        if source is not None and source not in [other.name for other in study.trained]:
            raise UserError(f"{where}.from is {source!r}, which is no method with runs of its own.")
        for key, given in (("metrics", method.metrics), ("published", method.published)):
            for column in given:
                if column not in columns:
                    raise UserError(f"{where}.{key} names {column!r}; the columns are {', '.join(columns)}.")


ENTRIES: dict[str, type] = {"metrics": Metric, "methods": Method, "ratios": Ratio, "variants": Variant}


def _sentence(error: ErrorDetails, path: str) -> str:
    """What is wrong, and where: of a key the one that may have been meant."""
    *above, last = error["loc"] or ("",)
    known = _keys(ENTRIES[str(above[0])] if above else Study)
    if error["type"] == "missing":
        return f"{_place(path, above)}: {last} is missing."
    if error["type"] == "unexpected_keyword_argument":
        hint = meant(str(last), known, f"the keys are {', '.join(known)}.")
        return f"{_place(path, above)}: there is no key {last}; {hint}"
    where = _place(path, error["loc"])
    if error["type"] == "dataclass_type":
        return f"{where}: expected the keys {', '.join(known)}."
    return f"{where}{error['msg']}" if error["type"] in OWN_TYPES else f"{where}: {error['msg']}."


def _place(path: str, loc: Sequence[int | str]) -> str:
    keys = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in loc)
    return f"{path}: {keys[1:]}" if keys else path


def _keys(entry: type) -> list[str]:
    """What the YAML calls the fields of an entry."""
    found = [each.alias or name for name, each in entry.__pydantic_fields__.items()]  # type: ignore[attr-defined]
    return [key for key in found if key not in (OWN_KEY, OWN_VARIANT)]
