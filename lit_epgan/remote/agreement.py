"""Settings that the server and all institutions must have alike, compared without being told."""

import hashlib
from collections.abc import Mapping

from lit_epgan.listing import few

ONES_OWN = ("data", "federation.policy")  # of each institution
ONES_OWN_ENDINGS = (".ledger",)
DIGITS = 16  # of a digest


def agreed(settings: Mapping[str, str]) -> dict[str, str]:
    """Of each setting that must be alike a digest, so that nothing of a value is told.

    Args:
        settings: by the keys that a user types, the values as texts.
    """
    return {
        key: hashlib.sha256(value.encode()).hexdigest()[:DIGITS]
        for key, value in settings.items()
        if not any(key == own or key.startswith(f"{own}.") for own in ONES_OWN) and not key.endswith(ONES_OWN_ENDINGS)
    }


def disagreement(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """In which settings two ends differ; None where in none.

    Args:
        ours, theirs: as ``agreed`` gives them; an end that was not started by the command line has none to compare.
    """
    if not ours or not theirs:
        return None
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if not keys:
        return None
    return f"its settings differ from the server's: {few(keys)}. Give both the same configuration"
