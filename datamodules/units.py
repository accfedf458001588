"""Units of measurement: as a column's name states them, or as they show when one site's values are a multiple."""

import math
import re
from typing import NamedTuple

SPELLINGS = {
    "kg": ("kg", "kgs", "kilogram", "kilograms"),
    "g": ("g", "gram", "grams"),
    "mg": ("mg",),
    "lb": ("lb", "lbs", "pound", "pounds"),
    "oz": ("oz", "ounce", "ounces"),
    "m": ("m", "metre", "metres", "meter", "meters"),
    "cm": ("cm",),
    "mm": ("mm",),
    "km": ("km",),
    "in": ("in", "inch", "inches"),
    "ft": ("ft", "foot", "feet"),
    "mi": ("mi", "mile", "miles"),
    "c": ("c", "°c", "degc", "celsius"),
    "f": ("f", "°f", "degf", "fahrenheit"),
    "k": ("k", "kelvin"),
    "mmhg": ("mmhg",),
    "kpa": ("kpa",),
    "ml": ("ml",),
    "l": ("l", "litre", "litres", "liter", "liters"),
    "mg/dl": ("mg/dl", "mgdl"),
    "g/dl": ("g/dl", "gdl"),
    "g/l": ("g/l",),
    "mmol/l": ("mmol/l", "mmol"),
    "umol/l": ("umol/l", "umol"),
    "s": ("s", "sec", "second", "seconds"),
    "min": ("min", "mins", "minute", "minutes"),
    "h": ("h", "hour", "hours"),
    "d": ("d", "day", "days"),
    "month": ("month", "months"),
    "year": ("year", "years", "yr", "yrs"),
    "%": ("%", "percent"),
}
CANONICAL = {spelling: unit for unit, spellings in SPELLINGS.items() for spelling in spellings}

AMBIGUOUS = {"min", "in", "sec", "second", "day", "month", "year", "foot"}  # a minimum, born in, the second, ...


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
    if match and _canonical(match[2]) in SPELLINGS and match[2].casefold() not in AMBIGUOUS:
        return match[1], _canonical(match[2])
    return name, ""


def _canonical(unit: str) -> str:
    folded = unit.casefold().replace(" ", "").replace("µ", "u").replace("μ", "u")
    return CANONICAL.get(folded, folded)


def conversion_between(quartiles: Quartiles, others: Quartiles) -> tuple[Conversion, bool] | None:
    """The change of units that explains why two sites' values of one column lie apart.

    Args:
        quartiles: lower quartile, median and upper quartile at one site.
        others: those at another site.

    Returns:
        The conversion, and whether it leads from the first site to the other; None where the middle halves overlap,
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
