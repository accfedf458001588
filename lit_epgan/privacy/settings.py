"""What all noise is told in the same words, and what is wrong with it."""

import math
import warnings
from pathlib import Path

from lit_epgan.errors import UserError
from lit_epgan.privacy.accountant import Relation, spent
from lit_epgan.privacy.ledger import Ledger

FILE = "privacy.jsonl"
SLACK = 1.001  # of the noise multiplier that is found for a target


def check_settings(
    owner: str,
    bound: float,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    delta: float,
    relation: Relation,
    budget: float | None,
) -> None:
    """Refuse what no noise can be made with: a ``bound`` S, z or the epsilon that it is found for, delta, the relation
    of neighbours, and the largest epsilon that the ledger allows, if any. ``owner`` is the mechanism, for the
    message."""
    if not 0 < bound < math.inf:
        raise UserError(f"{owner}'s bound is {bound}; give a number above 0")
    if (noise_multiplier is None) == (target_epsilon is None):
        raise UserError(f"{owner} takes a noise_multiplier or a target_epsilon: give one of them")
    if noise_multiplier is not None and not 0 < noise_multiplier < math.inf:
        raise UserError(f"{owner}'s noise_multiplier is {noise_multiplier}; without noise nothing is private")
    if budget is not None and not budget > 0:
        raise UserError(f"{owner}'s budget is {budget}; give an epsilon above 0")
    spent([], delta, relation)  # refuses both


def ledger_of(owner: str, path: str | None, folder: Path | None, budget: float | None) -> Ledger | None:
    """The ledger at ``path``, or else in the run's folder; None where there is neither. UserError: there is a budget,
    and no ledger to keep it."""
    where = Path(path) if path is not None else folder and folder / FILE
    if where is None and budget is not None:
        raise UserError(f"a budget needs a ledger: give {owner} ledger=FILE")
    return Ledger(where) if where is not None else None


def warn_beyond_target(owner: str, epsilon: float, target: float | None) -> None:
    """Say that a run which goes on costs more, ``epsilon``, than was asked for: its noise was settled for fewer
    rounds."""
    if target is not None and epsilon > SLACK * target:
        warnings.warn(
            f"{owner}: all rounds together cost epsilon {epsilon:.3g}, and target_epsilon {target:g} is passed: a run "
            "that goes on keeps the noise that was settled when it began; take fewer rounds to stay below",
            stacklevel=2,
        )
