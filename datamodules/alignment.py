"""Sites that each have a table agree on its columns, telling each other salted hashes of names alone.

A name leaves its site as HMAC-SHA256(salt, name), where the salt is a secret of the sites. The server, which does not
know the salt, learns how many columns the sites have and which of them are the same, but no name.

Private set intersection is the stronger option (Meadows 1986; Pinkas, Schneider and Zohner 2018). Names of columns and
categories are few and can be guessed. Whoever knows the salt, a site or a server with a site's help, can hash every
word of a dictionary and so learns the columns that another site has and it has not. Under private set intersection a
party learns the columns in common and nothing of the others, and a guess costs a run of the protocol.
"""

import hashlib
import hmac
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from lit_epgan.datamodules.units import split_unit
from lit_epgan.errors import UserError

LEAST_SALT = 16  # bytes: 128 bits that nobody can guess


@dataclass(frozen=True)
class Offer:
    """What a site tells of its columns.

    Attributes:
        units: by the hash of a column's name that of its unit; None where the name states no unit.
        categories: by the hash of a column's name those of its categories, for columns that have categories.
    """

    units: Mapping[str, str | None]
    categories: Mapping[str, frozenset[str]]


class Difference(NamedTuple):
    """A column, by the hash of its name, in which two sites differ."""

    column: str
    site: str
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


def hashed_columns(columns: Iterable[str], site: str, salt: bytes) -> dict[str, str]:
    """A site's columns by their hashes; stays at the site.

    Args:
        columns: their names.
        site: the site's name, for the message.
        salt: the sites' secret.

    Raises:
        UserError: two names are the same but for their spelling.
    """
    found: dict[str, str] = {}
    for column in columns:
        digest = column_hash(column, salt)
        if digest in found:
            raise UserError(
                f"site {site!r} has the columns {found[digest]!r} and {column!r}, which are one: rename one"
            )
        found[digest] = column
    return found


def offer(columns: Mapping[str, str], categories: Mapping[str, Collection[str]], salt: bytes) -> Offer:
    """What a site tells the others.

    Args:
        columns: by the hashes of their names, as from ``hashed_columns``.
        categories: by the same hashes the categories of columns that have some.
        salt: the sites' secret.
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
    """The hashes of all sites' columns, in the order in which they are first met."""
    return list(dict.fromkeys(column for each in offers.values() for column in each.units))


def different_units(offers: Mapping[str, Offer]) -> list[Difference]:
    """Columns for which a site states another unit than the first site that states one."""
    found = []
    for column in all_columns(offers):
        stated = {site: unit for site, each in offers.items() if (unit := each.units.get(column)) is not None}
        first = next(iter(stated), "")
        found += [Difference(column, site, first) for site, unit in stated.items() if unit != stated[first]]
    return found


def different_categories(offers: Mapping[str, Offer]) -> list[Difference]:
    """Columns in which two sites each have a category that the other lacks: one of them has other names for them."""
    found = []
    for column in all_columns(offers):
        having = {site: each.categories[column] for site, each in offers.items() if column in each.categories}
        sites = list(having)
        pairs = [(site, other) for k, site in enumerate(sites) for other in sites[:k]]
        differing = [(a, b) for a, b in pairs if having[a] - having[b] and having[b] - having[a]]
        found += [Difference(column, site, other) for site, other in differing]
    return found


def without_unit(offers: Mapping[str, Offer]) -> list[str]:
    """The hashes of columns for which some site states no unit."""
    return [c for c in all_columns(offers) if any(each.units.get(c, "") is None for each in offers.values())]
