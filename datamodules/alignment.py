"""Clients that each have a table agree on its columns and units, telling each other salted hashes of names alone.

A name leaves its client as HMAC-SHA256(salt, name), where the salt is a secret of the clients. The server, which does
not know the salt, learns how many columns the clients have and which of them are the same, but no name.

Private set intersection is the stronger option (Meadows 1986; Pinkas, Schneider and Zohner 2018). Names of columns and
categories are few and can be guessed. Whoever knows the salt, a client or a server with a client's help, can hash
every word of a dictionary and so learns the columns that another client has and it has not. Under private set
intersection a party learns the columns in common and nothing of the others, and a guess costs a run of the protocol.
"""

import hashlib
import hmac
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lit_epgan.errors import UserError

LEAST_SALT = 16  # bytes: 128 bits that nobody can guess
SPELLINGS = (  # of a unit; the first is what the others become
    *("kg kgs kilogram kilograms", "g gram grams", "mg", "lb lbs pound pounds", "oz ounce ounces"),
    *("m metre metres meter meters", "cm", "mm", "km", "in inch inches", "ft foot feet", "mi mile miles"),
    *("c °c degc celsius", "f °f degf fahrenheit", "k kelvin", "mmhg", "kpa", "ml", "l litre litres liter liters"),
    *("mg/dl mgdl", "g/dl gdl", "g/l", "mmol/l mmol", "umol/l umol", "s sec second seconds", "min mins minute minutes"),
    *("h hour hours", "d day days", "month months", "year years yr yrs", "% percent"),
)
CANONICAL = {spelling: unit.split()[0] for unit in SPELLINGS for spelling in unit.split()}
AMBIGUOUS = {"min", "in", "sec", "second", "day", "month", "year", "foot"}  # a minimum, born in, the second, ...


@dataclass(frozen=True)
class Offer:
    """What a client tells of its columns.

    Attributes:
        units: by the hash of a column's name that of its unit; None where the name states no unit.
        categories: by the hash of a column's name those of its categories, for columns that have categories.
    """

    units: Mapping[str, str | None]
    categories: Mapping[str, frozenset[str]]


class Difference(NamedTuple):
    """A column, by the hash of its name, in which two clients differ."""

    column: str
    client: str
    other: str


def normalised(name: str) -> str:
    """A name without what people write differently: case, width of characters, and what stands between words."""
    folded = unicodedata.normalize("NFKC", name).casefold()
    return "_".join("".join(letter if letter.isalnum() else " " for letter in folded).split())


def hashed(kind: str, text: str, salt: bytes) -> str:
    """HMAC-SHA256 under the salt, as 64 hexadecimal digits; equal texts of different kinds have different hashes.

    Raises:
        UserError: the salt is short enough to be guessed.
    """
    if len(salt) < LEAST_SALT:
        raise UserError(f"the salt has {len(salt)} bytes: draw at least {LEAST_SALT} at random (secrets.token_bytes)")
    return hmac.new(salt, f"{kind}\0{text}".encode(), hashlib.sha256).hexdigest()


def column_hash(column: str, salt: bytes) -> str:
    """The hash of a column's normalised name, without its unit."""
    return hashed("column", normalised(split_unit(column)[0]), salt)


def hashed_columns(columns: Iterable[str], client: str, salt: bytes) -> dict[str, str]:
    """A client's columns by their hashes; stays at the client.

    Args:
        columns: their names.
        client: the client's name, for the message.
        salt: the clients' secret.

    Raises:
        UserError: two names are the same but for their spelling.
    """
    found: dict[str, str] = {}
    for column in columns:
        digest = column_hash(column, salt)
        if digest in found:
            raise UserError(
                f"site {client!r} has the columns {found[digest]!r} and {column!r}, which are one: rename one"
            )
        found[digest] = column
    return found


def offer(columns: Mapping[str, str], categories: Mapping[str, Collection[str]], salt: bytes) -> Offer:
    """What a client tells the others.

    Args:
        columns: by the hashes of their names, as from ``hashed_columns``.
        categories: by the same hashes the categories of columns that have some.
        salt: the clients' secret.
    """
    units = {digest: split_unit(column)[1] for digest, column in columns.items()}
    return Offer(
        units={digest: hashed("unit", unit, salt) if unit else None for digest, unit in units.items()},
        categories={
            digest: frozenset(hashed(f"category of {digest}", value, salt) for value in values)
            for digest, values in categories.items()
        },
    )


def all_columns(offers: Mapping[str, Offer]) -> list[str]:
    """The hashes of all clients' columns, in the order in which they are first met."""
    return list(dict.fromkeys(column for each in offers.values() for column in each.units))


def different_units(offers: Mapping[str, Offer]) -> list[Difference]:
    """Columns for which a client states another unit than the first client that states one."""
    found = []
    for column in all_columns(offers):
        stated = {client: unit for client, each in offers.items() if (unit := each.units.get(column)) is not None}
        first = next(iter(stated), "")
        found += [Difference(column, client, first) for client, unit in stated.items() if unit != stated[first]]
    return found


def different_categories(offers: Mapping[str, Offer]) -> list[Difference]:
    """Columns in which two clients each have a category that the other lacks: one of them has other names for them."""
    found = []
    for column in all_columns(offers):
        having = {client: each.categories[column] for client, each in offers.items() if column in each.categories}
        clients = list(having)
        pairs = [(client, other) for k, client in enumerate(clients) for other in clients[:k]]
        differing = [(a, b) for a, b in pairs if having[a] - having[b] and having[b] - having[a]]
        found += [Difference(column, client, other) for client, other in differing]
    return found


def without_unit(offers: Mapping[str, Offer]) -> list[str]:
    """The hashes of columns for which some client states no unit."""
    return [c for c in all_columns(offers) if any(each.units.get(c, "") is None for each in offers.values())]


class Conversion(NamedTuple):
    """A number x in ``of`` is factor x + offset in ``to``."""

    of: str
    to: str
    factor: float
    offset: float = 0.0


CONVERSIONS = (
    Conversion("kg", "lb", 2.20462),
    Conversion("oz", "g", 28.3495),
    Conversion("inch", "cm", 2.54),
    Conversion("m", "ft", 3.28084),
    Conversion("ft", "cm", 30.48),
    Conversion("ft", "inch", 12),
    Conversion("m", "inch", 39.3701),
    Conversion("mile", "km", 1.60934),
    Conversion("cm", "mm or g/dL and g/L", 10),
    Conversion("m", "cm or shares and percent", 100),
    Conversion("kg", "g or another pair a thousand apart", 1000),
    Conversion("degrees Celsius", "Fahrenheit", 1.8, 32),
    Conversion("degrees Celsius", "Kelvin", 1, 273.15),
    Conversion("kPa", "mmHg", 7.50062),
    Conversion("mmol/L", "mg/dL of glucose", 18.016),
    Conversion("mmol/L", "mg/dL of cholesterol", 38.67),
    Conversion("mmol/L", "mg/dL of urea nitrogen", 2.801),
    Conversion("mg/dL", "umol/L of creatinine", 88.42),
    Conversion("mg/dL", "umol/L of bilirubin", 17.104),
    Conversion("years", "months", 12),
    Conversion("years", "days", 365.25),
    Conversion("hours", "minutes", 60),
    Conversion("days", "hours", 24),
)
WARMTH = (20, 45)  # degrees Celsius of a body or a room: another median is no temperature
MEDIANS, SPREADS = math.log(1.15), math.log(1.5)  # how far samples of one distribution may differ

Quartiles = tuple[float, float, float]


def split_unit(column: str) -> tuple[str, str]:
    """A column's name and its unit, empty where none is stated.

    A unit stands in square brackets, ``weight [kg]``. One that ``SPELLINGS`` knows and that means nothing else may
    stand in round ones, or, where it has more than one letter, after an underscore: ``weight_kg``.
    """
    name = column.strip()
    if match := re.fullmatch(r"(.+?)\s*\[([^\[\]]+)\]", name):
        return match[1], _canonical(match[2])
    match = re.fullmatch(r"(.+?)\s*\(([^()]+)\)", name) or re.fullmatch(r"(.+)_([^_]{2,})", name)
    if match and _canonical(match[2]) in CANONICAL and match[2].casefold() not in AMBIGUOUS:
        return match[1], _canonical(match[2])
    return name, ""


def _canonical(unit: str) -> str:
    folded = unit.casefold().replace(" ", "").replace("µ", "u").replace("μ", "u")
    return CANONICAL.get(folded, folded)


def conversion_between(quartiles: Quartiles, others: Quartiles) -> tuple[Conversion, bool] | None:
    """The change of units that explains why two clients' values of one column lie apart.

    Args:
        quartiles: lower quartile, median and upper quartile at one client.
        others: those at another client.

    Returns:
        The conversion, and whether it leads from the first client to the other; None where the middle halves overlap,
        or where no known conversion brings both medians and spreads together.
    """
    if quartiles[0] <= others[2] and others[0] <= quartiles[2]:
        return None
    found = [
        (distance, conversion, there)
        for conversion in CONVERSIONS
        for there, (one, two) in ((True, (quartiles, others)), (False, (others, quartiles)))
        if (not conversion.offset or WARMTH[0] < one[1] < WARMTH[1])
        and (distance := _distance(_converted(one, conversion), two)) is not None
    ]
    return min(found, key=lambda each: each[0])[1:] if found else None


def _converted(quartiles: Quartiles, conversion: Conversion) -> Quartiles:
    low, middle, high = (conversion.factor * x + conversion.offset for x in quartiles)
    return low, middle, high


def _distance(one: Quartiles, two: Quartiles) -> float | None:
    """How far the medians and the spreads differ, in logarithms; None where that is too far."""
    spreads = one[2] - one[0], two[2] - two[0]
    if min(*spreads, one[1], two[1]) <= 0:
        return None
    of_medians, of_spreads = abs(math.log(one[1] / two[1])), abs(math.log(spreads[0] / spreads[1]))
    return of_medians + of_spreads if of_medians < MEDIANS and of_spreads < SPREADS else None
