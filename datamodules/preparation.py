"""How the columns of a table become a network's input: kinds, means, levels and classes, from clients' sums alone."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few, in_order, same_name

if TYPE_CHECKING:
    import pandas as pd

Kind = Literal["number", "boolean", "date", "category", "ignore"]
KINDS = ("number", "boolean", "date", "category", "ignore")
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "-nan", "null", "?", "-", "--", ".", "missing"}
TRUE, FALSE = {"true", "yes", "y", "t"}, {"false", "no", "n", "f"}
POINT, COMMA = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", r"[+-]?\d+,\d+"
DATES = {  # a pattern, and how pandas reads it
    r"\d{4}-\d{2}-\d{2}(?:[ T]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[+-]\d{2}:?\d{2})?)?": "ISO8601",
    r"(?:19|20)\d{2}[01]\d[0-3]\d": "%Y%m%d",
    r"\d{4}/\d{1,2}/\d{1,2}": "%Y/%m/%d",
    r"\d{1,2}\.\d{1,2}\.\d{4}": "%d.%m.%Y",
}
SLASHES = r"\d{1,2}/\d{1,2}/\d{4}"
MOST_LEVELS = 30  # of a category that have an input of their own
MOST_TEXTS = 500  # of a column of which a client tells the counts
FEW = 20  # rows up to which all different values say nothing
ROUNDING = 1e-12  # a spread so small beside the mean is that of a constant
UNITS = 2.0  # times the others' mean and spread, from which a client's units are doubted
FAR = 5.0  # standard deviations from the others' mean, as well
HALVINGS = 60  # of the interval that a quantile lies in
NORMAL = 1.349  # standard deviations between the quartiles of a normal distribution


@dataclass(frozen=True)
class Moments:
    """Of n numbers their mean m and the sum of squares about it, sum_i (x_i - m)^2."""

    n: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @staticmethod
    def of(numbers: np.ndarray) -> "Moments":
        """Of float64 numbers (n,), those that are NaN left out."""
        there = numbers[~np.isnan(numbers)]
        if not len(there):
            return Moments()
        mean = math.fsum(there) / len(there)
        return Moments(len(there), mean, math.fsum((there - mean) ** 2))

    @staticmethod
    def pooled(parts: Sequence["Moments"]) -> "Moments":
        """Of all parts' numbers together: m = sum_k n_k m_k / n, and sum_k (q_k + n_k (m_k - m)^2) about it, with q_k a
        part's squares (Chan, Golub and LeVeque 1983). Free of the cancellation in sum x^2 - n m^2."""
        n = sum(part.n for part in parts)
        mean = math.fsum(part.n * part.mean for part in parts) / max(n, 1)
        return Moments(n, mean, math.fsum(part.squares + part.n * (part.mean - mean) ** 2 for part in parts))

    @property
    def sd(self) -> float:
        """The standard deviation, divided by n."""
        return math.sqrt(self.squares / self.n) if self.n else 0.0

    @property
    def constant(self) -> bool:
        """Whether all numbers are the same, up to rounding."""
        return self.sd <= ROUNDING * abs(self.mean)


@dataclass(frozen=True)
class ColumnSums:
    """What a client tells of one of its columns.

    Attributes:
        present: values that are not missing; ``missing``: those that are.
        different: how many different ones there are.
        numbers, whole, dates, truths: how many can be read as numbers, as whole ones, as dates, as yes or no.
        words: how many of the latter are words, not 0 or 1.
        number, date: moments of the training rows' values, read so.
        texts: how often each text stands in the training rows; empty of a column of more than ``MOST_TEXTS``.
        low, high: the least and the greatest whole number, where all are whole and different; else 0.
    """

    present: int = 0
    missing: int = 0
    different: int = 0
    numbers: int = 0
    whole: int = 0
    dates: int = 0
    truths: int = 0
    words: int = 0
    number: Moments = Moments()
    date: Moments = Moments()
    texts: dict[str, int] = field(default_factory=dict)
    low: float = 0.0
    high: float = 0.0


Sums = Mapping[str, ColumnSums]  # a client's, by column


class Column:
    """One column of one client's table as it is written, and as numbers, dates (days since 1970) or words.

    Args:
        text: its texts, without blanks around them.
        where: names the place of a row, for messages.
    """

    def __init__(self, text: "pd.Series", where: Callable[[int], str]) -> None:
        import pandas as pd

        self.text, self.where, self.name = text.to_numpy(object), where, str(text.name)
        self.codes, texts = pd.factorize(self.text)
        self.texts = [str(each) for each in texts]
        self.keys = [level(each) for each in self.texts]
        self.missing = np.isin(self.codes, [k for k, each in enumerate(self.texts) if is_missing(each)])

    def _of_texts(self, values: Iterable[float]) -> np.ndarray:
        return np.array([*values], dtype=float)[self.codes] if self.texts else np.zeros(0)

    @cached_property
    def number(self) -> np.ndarray:
        """The numbers, float64 (n,), NaN where there are none. UserError: points and commas stand for the same."""
        import pandas as pd

        texts = pd.Series(self.texts, dtype=object).str.replace("\N{MINUS SIGN}", "-")
        point, comma = (texts.str.fullmatch(pattern).fillna(False).to_numpy(bool) for pattern in (POINT, COMMA))
        if comma.any() and self._all(point | comma):
            decimal = texts.str.contains(".", regex=False).to_numpy(bool) & point
            if decimal.any():
                raise self._refusal(comma, "has a decimal comma, and other rows a decimal point: take one of them")
            if texts[comma].str.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}").all():
                raise self._refusal(comma, "may be a decimal number, or thousands: write it with a point, or without")
            texts, point = texts.where(~comma, texts.str.replace(",", ".")), point | comma
        found = pd.to_numeric(texts.where(point), errors="coerce").to_numpy(float)
        return self._of_texts(np.where(np.isfinite(found), found, np.nan))

    @cached_property
    def date(self) -> np.ndarray:
        """Days since 1970, float64 (n,), NaN where there is no date. UserError: nobody knows which is the day."""
        import pandas as pd

        texts = pd.Series(self.texts, dtype=object)
        days = np.full(len(texts), np.nan)
        formats = dict(DATES)
        slashes = texts.str.fullmatch(SLASHES).fillna(False).to_numpy(bool)
        if slashes.any() and self._all(slashes):
            first, second = (texts[slashes].str.split("/").str[k].astype(int).max() for k in (0, 1))
            if max(first, second) <= 12:
                raise self._refusal(slashes, "may begin with the day or with the month: write 2024-01-31")
            formats[SLASHES] = "%d/%m/%Y" if first > 12 else "%m/%d/%Y"
        for pattern, written in formats.items():
            fits = texts.str.fullmatch(pattern).fillna(False).to_numpy(bool)
            if fits.any():
                read = pd.to_datetime(texts[fits], format=written, errors="coerce", utc=True)
                days[fits] = (read - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
        return self._of_texts(days)

    @cached_property
    def truth(self) -> np.ndarray:
        """1 where the text says yes, 0 where it says no, else NaN: float64 (n,)."""
        value = {**dict.fromkeys(TRUE, 1.0), **dict.fromkeys(FALSE, 0.0), "1": 1.0, "0": 0.0}
        return self._of_texts(value.get(key, math.nan) for key in self.keys)

    def read(self, kind: str) -> np.ndarray:
        """The values as numbers of this kind (n,), NaN where there are none."""
        read: np.ndarray = {"number": self.number, "date": self.date, "boolean": self.truth}[kind]
        return np.where(self.missing, np.nan, read)

    def place(self, levels: Sequence[str]) -> np.ndarray:
        """The position of each value among levels, int64 (n,), as a person reads them; -1 of one that is none."""
        known = {level(each): k for k, each in enumerate(levels)}
        return self._of_texts(known.get(key, -1) for key in self.keys).astype(np.int64)

    def odd(self, kind: str) -> str:
        """Where the first value stands that is not of this kind, and what it is; empty where there is none."""
        wrong = np.flatnonzero(np.isnan(self.read(kind)) & ~self.missing)
        return f"{self.where(wrong[0])}: {self.text[wrong[0]]!r}" if len(wrong) else ""

    def sums(self, train: np.ndarray) -> ColumnSums:
        """What the client tells of it: kinds of all rows; moments and counts of the training rows, int64 (m,)."""
        there = ~self.missing
        number, date, truth = (np.where(there, each, np.nan) for each in (self.number, self.date, self.truth))
        read = [int((~np.isnan(each)).sum()) for each in (number, date, truth)]
        words = sum(self.keys[code] not in ("0", "1") for code in self.codes[~np.isnan(truth)])
        different = len({self.keys[code] for code in np.unique(self.codes[there])})
        texts = Counter(self.texts[code] for code in self.codes[train] if self.texts and not self._is_missing(code))
        whole = int((number % 1 == 0).sum())
        unique = whole == there.sum() == different > 0
        return ColumnSums(
            *(int(there.sum()), int(self.missing.sum()), different, read[0], whole, read[1], read[2], words),
            *(Moments.of(number[train]), Moments.of(date[train])),
            dict(texts) if len(texts) <= MOST_TEXTS else {},
            *((float(np.nanmin(number)), float(np.nanmax(number))) if unique else ()),
        )

    def _is_missing(self, code: int) -> bool:
        return is_missing(self.texts[code])

    def _all(self, fits: np.ndarray) -> bool:
        return all(fit or is_missing(text) for fit, text in zip(fits, self.texts, strict=True))

    def _refusal(self, fits: np.ndarray, why: str) -> UserError:
        row = int(np.flatnonzero(fits[self.codes])[0])
        return UserError(f"{self.where(row)}: {self.text[row]!r} in the column {self.name!r} {why}")


def is_missing(text: str) -> bool:
    """Whether a cell says that there is no value; Python's ``None`` does, ``none`` may be a level."""
    return text == "None" or text.lower() in MISSING


def level(text: str) -> str:
    """What two texts have in common that a person reads as one level or class: 1, 1.0 and 01, ``Yes`` and ``yes``."""
    try:
        number = Decimal(text)
        return f"{number.normalize() + 0:f}" if number.is_finite() else same_name(text)
    except ArithmeticError:
        return same_name(text)


@dataclass(frozen=True)
class Feature:
    """A column that a network sees.

    Attributes:
        mean, sd: of a number, or of a date in days since 1970: x becomes (x - mean) / sd; a missing one becomes 0. By
            quantiles, the median and what the quartiles' distance gives.
        range: the least and the greatest that it can be, in place of both: those of a uniform distribution are taken.
        levels: of a category: an input for each, which is 1 where the value is it.
        missing: whether one more input is 1 where the value is missing.
    """

    name: str
    kind: Literal["number", "boolean", "date", "category"]
    mean: float = 0.0
    sd: float = 1.0
    levels: list[str] = field(default_factory=list)
    missing: bool = False
    range: tuple[float, float] | None = None

    @property
    def inputs(self) -> list[str]:
        """The names of its inputs."""
        own = [f"{self.name} = {each}" for each in self.levels] if self.kind == "category" else [self.name]
        return [*own, f"{self.name} is missing"] if self.missing else own

    def moments(self) -> tuple[float, float]:
        if self.range is None:
            return self.mean, self.sd
        low, high = self.range
        return (low + high) / 2, (high - low) / math.sqrt(12)


@dataclass(frozen=True)
class Label:
    """What is predicted: one of the classes in the order of their numbers, of which ``counts`` stand in the training
    rows; or, without classes, a number, which becomes (y - mean) / sd."""

    name: str
    classes: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    mean: float = 0.0
    sd: float = 1.0


class MixedColumnError(Exception):
    """Most values of a column are of a kind, and some are not."""

    def __init__(self, column: str, kind: str) -> None:
        super().__init__(column)
        self.column, self.kind = column, kind


@dataclass(frozen=True)
class Preparation:
    """How a table's columns become inputs, and its label a target; plain data, which YAML and JSON hold.

    Attributes:
        left_out: columns that no network sees, and why.
    """

    features: list[Feature]
    target: Label
    left_out: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def fit(
        clients: Sequence[Sums], columns: Sequence[str], target: Label, kinds: Mapping[str, Kind] | None = None
    ) -> "Preparation":
        """The preparation of all clients' rows together, of what each tells of its own; the clients' order does not
        matter. MixedColumnError: a column is of no one kind. UserError: no column is left.

        Args:
            clients: a client's sums by column; a column that it lacks is left out, or has ``missing`` values only.
            columns: which to use, in this order.
            target: what is predicted.
            kinds: what a column is, where it is not to be found.
        """
        features, left_out = list[Feature](), dict[str, str]()
        for name in columns:
            sums = [client[name] for client in clients if name in client]
            found = _feature(name, sums, len(clients), (kinds or {}).get(name))
            if isinstance(found, str):
                left_out[name] = found
            else:
                features.append(found)
        if not features:
            raise UserError(f"no column is left to learn from: {few([f'{n}: {w}' for n, w in left_out.items()])}")
        return Preparation(features, target, left_out)

    def by_quantiles(self, at_most: Callable[[Feature, float], int]) -> "Preparation":
        """The same with each number's and date's median for its mean, and the distance of its quartiles over 1.349 for
        its standard deviation, as far as they differ: few values far away move neither. A quantile is the least value
        at which so large a share lies; it is found by halving an interval that holds all values, as none is further
        than sd sqrt(n - 1) from the mean (Samuelson 1968).

        Args:
            at_most: how many training values of all clients together are at most a number; a sum, asked again and
                again.
        """

        def quantile(feature: Feature, share: float) -> float:
            n = at_most(feature, math.inf)
            low, high = (feature.mean + side * feature.sd * math.sqrt(n) for side in (-1, 1))
            for _ in range(HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if at_most(feature, middle) >= share * n else (middle, high)
            return high

        def scaled(feature: Feature) -> Feature:
            if feature.kind not in ("number", "date"):
                return feature
            first, median, third = (quantile(feature, share) for share in (0.25, 0.5, 0.75))
            apart = (third - first) / NORMAL
            return replace(feature, mean=median, sd=apart if apart > ROUNDING * abs(median) else feature.sd)

        return replace(self, features=[scaled(feature) for feature in self.features])

    @staticmethod
    def read(content: Any, where: str) -> "Preparation":
        """Of plain data. UserError: they are no preparation; ``where`` they stand."""
        try:
            return TypeAdapter(Preparation).validate_python(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            raise UserError(f"{where} is no preparation of a table: {place}: {first['msg']}") from error

    def plain(self) -> dict[str, Any]:
        """The same as plain data."""
        content: dict[str, Any] = TypeAdapter(Preparation).dump_python(self, mode="json")
        return content

    @property
    def inputs(self) -> list[str]:
        """The names of a network's inputs."""
        return [name for feature in self.features for name in feature.inputs]

    @property
    def outputs(self) -> int:
        """How many outputs a network has: one for each class, or one number."""
        return len(self.target.classes) or 1

    def encode(self, columns: Mapping[str, Column], rows: int) -> np.ndarray:
        """The inputs of a client's rows, float64 (rows, inputs); a column that it lacks is missing everywhere."""
        from sklearn.preprocessing import OneHotEncoder, StandardScaler

        blocks = []
        for feature in self.features:
            column = columns.get(feature.name)
            gone = np.ones(rows, dtype=bool) if column is None else column.missing
            if feature.kind == "category":
                encoder = OneHotEncoder(categories=[np.arange(len(feature.levels))], handle_unknown="ignore")
                encoder.fit(np.arange(len(feature.levels))[:, None])
                place = np.full(rows, -1) if column is None else np.where(gone, -1, column.place(feature.levels))
                blocks.append(encoder.transform(place[:, None]).toarray())
            else:
                scaler = StandardScaler()
                mean, sd = feature.moments()
                scaler.mean_, scaler.scale_, scaler.n_features_in_ = np.array([mean]), np.array([sd]), 1
                read = np.full(rows, np.nan) if column is None else column.read(feature.kind)
                blocks.append(np.nan_to_num(scaler.transform(read[:, None])))
            if feature.missing:
                blocks.append(gone[:, None].astype(float))
        return np.concatenate(blocks, 1)

    def lines(self) -> Iterator[tuple[str, str, str]]:
        """What becomes of each column: its name, its kind, and how it is encoded."""
        for feature in self.features:
            if feature.kind == "category":
                how = f"{len(feature.levels)} levels: {few(feature.levels, 4)}"
            else:
                mean, sd = feature.moments()
                how = f"minus {_shown(mean, feature.kind)}, over {sd:.4g}{' days' if feature.kind == 'date' else ''}"
            yield feature.name, feature.kind, how + (", and whether it is missing" if feature.missing else "")
        for name, why in self.left_out.items():
            yield name, "left out", why
        classes = self.target.classes
        if classes:
            counts = self.target.counts or [0] * len(classes)
            told = ", ".join(f"{name} ({n:,})" for name, n in zip(classes[:6], counts, strict=False))
            told += f"; {classes[1]} is the positive one" if len(classes) == 2 else ""
            if any(counts):
                rate = max(counts) / sum(counts)
                told += f"; who always answers {classes[int(np.argmax(counts))]} has accuracy {rate:.3f}"
            yield self.target.name, "classes", told
        else:
            yield self.target.name, "target", f"a number, minus {self.target.mean:.4g}, over {self.target.sd:.4g}"


def _shown(mean: float, kind: str) -> str:
    import pandas as pd

    return str(pd.Timestamp(mean, unit="D").date()) if kind == "date" else f"{mean:.4g}"


def _feature(name: str, sums: Sequence[ColumnSums], clients: int, kind: Kind | None) -> Feature | str:
    """What becomes of a column; or why it is left out."""
    present = sum(each.present for each in sums)
    missing = len(sums) < clients or any(each.missing for each in sums)
    if kind == "ignore":
        return "as data.kinds says"
    if not present:
        return "no client has a value"
    asked, kind = kind, kind or _kind(name, sums, present)
    if kind in ("number", "date"):
        moments = Moments.pooled([each.number if kind == "number" else each.date for each in sums])
        if moments.constant and not missing:
            return "the same value everywhere"
        if asked is None and kind == "number" and _name_rows(sums, present):
            return "whole numbers that name rows or people; to use them: data.kinds"
        return Feature(name, kind, moments.mean, 1.0 if moments.constant else moments.sd, missing=missing)
    texts = Counter[str]()
    for each in sums:
        texts.update(each.texts)
    if kind == "boolean":
        yes = sum(n for text, n in texts.items() if level(text) in (*TRUE, "1"))
        share = yes / max(texts.total(), 1)
        if share in (0, 1) and not missing:
            return "the same value everywhere"
        return Feature(name, kind, share, math.sqrt(share * (1 - share)) or 1.0, missing=missing)
    if asked is None and present > FEW and sum(each.different for each in sums) > present / 2:
        return "names, or free text: nearly every value is another one"
    if any(each.different > MOST_TEXTS for each in sums):
        return f"more than {MOST_TEXTS} different texts"
    levels = spelled(texts)
    if len(levels) == 1 and not missing:
        return "the same value everywhere"
    often = sorted(levels, key=lambda each: (-levels[each], in_order(each)))[:MOST_LEVELS]
    return Feature(name, "category", levels=sorted(often, key=in_order), missing=missing)


def _kind(name: str, sums: Sequence[ColumnSums], present: int) -> Kind:
    numbers, dates, truths, words = (
        sum(getattr(each, what) for each in sums) for what in ("numbers", "dates", "truths", "words")
    )
    if truths == present and words:
        return "boolean"
    if dates == present:
        return "date"
    if numbers == present:
        return "number"
    if _name_rows(sums, present):
        return "category"  # numbers at some clients, texts at others
    for found, kind in ((dates, "date"), (numbers, "number")):
        if found >= present / 2:
            raise MixedColumnError(name, kind)
    return "category"


def _name_rows(sums: Sequence[ColumnSums], present: int) -> bool:
    """Whether values are names: all different, and texts, or whole numbers one after another or of seven digits."""
    return present > FEW and all(
        each.different == each.present
        and (
            each.numbers + each.dates == 0
            or (each.whole == each.present and (each.high - each.low + 1 == each.present or each.low >= 1e6))
        )
        for each in sums
    )


def spelled(texts: Mapping[str, int]) -> dict[str, int]:
    """Levels and how often they occur, of texts: those that a person reads as one are one, as it is mostly written."""
    groups: dict[str, list[str]] = {}
    for text in sorted(texts, key=lambda each: (-texts[each], each)):
        groups.setdefault(level(text), []).append(text)
    return {group[0]: sum(texts[each] for each in group) for group in groups.values()}


def findings(clients: Mapping[str, Sums], preparation: Preparation) -> list[str]:
    """What a person should know of the clients' columns before they train, a sentence each."""
    found = []
    for feature in preparation.features:
        sums = {client: own.get(feature.name, ColumnSums()) for client, own in clients.items()}
        if lacking := [client for client, own in sums.items() if not own.present]:
            found.append(f"{few(lacking)} has no value in the column {feature.name!r}, which is filled in there")
        if feature.kind == "category":
            found += _levels_apart(feature.name, sums)
        elif feature.kind == "number":
            found += _units_apart(feature.name, {client: own.number for client, own in sums.items() if own.number.n})
    if constant := [name for name, why in preparation.left_out.items() if why.startswith("the same value")]:
        found.append(f"columns with the same value everywhere are left out: {few(constant)}")
    if not preparation.target.classes:
        return found
    label = preparation.target.name
    return [*found, *_levels_apart(label, {client: own[label] for client, own in clients.items()})]


def _levels_apart(name: str, sums: Mapping[str, ColumnSums]) -> Iterator[str]:
    """Levels that are written in several ways, and those that one client alone has."""
    texts = Counter[str]()
    owners: dict[str, set[str]] = {}
    for client, own in sums.items():
        texts.update(own.texts)
        for text in own.texts:
            owners.setdefault(level(text), set()).add(client)
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(level(text), []).append(text)
    if several := [
        " and ".join(map(repr, group)) for group in groups.values() if len(group) > 1 and in_order(group[0])[0]
    ]:
        yield f"in the column {name!r} one is meant by {few(several)}"
    alone = [f"{groups[key][0]!r} ({next(iter(who))})" for key, who in owners.items() if len(who) == 1]
    if alone and len(sums) > 2:
        yield f"in the column {name!r} one client alone has {few(alone)}"


def _units_apart(name: str, moments: Mapping[str, Moments]) -> Iterator[str]:
    """Clients whose mean and spread are both ``UNITS`` times the others' or less than their part, or whose mean lies
    ``FAR`` standard deviations away."""
    for client, own in moments.items():
        others = [each for other, each in moments.items() if other != client]
        if not others or own.n < 2:
            continue
        mean, sd = (float(np.median([getattr(each, what) for each in others])) for what in ("mean", "sd"))
        apart = abs(own.mean - mean)
        times = [own.mean / mean if mean else 0.0, own.sd / sd if sd else 0.0]
        scaled = apart > max(own.sd, sd) and (min(times) >= UNITS or 0 < max(times) <= 1 / UNITS)
        if scaled or (sd and apart > FAR * max(own.sd, sd)):
            yield (
                f"the column {name!r} may have other units at {client}: its mean is {own.mean:.4g} (standard deviation "
                f"{own.sd:.4g}), the others' {mean:.4g} ({sd:.4g})"
            )
