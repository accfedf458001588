"""What the words that were shown of a group say: detectors of joined words, and what to look at next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lit_epgan.inspection.detectors import POWER
from lit_epgan.inspection.view import Check
from lit_epgan.inspection.words import is_joined, joined_share
from lit_epgan.privacy.heavy_hitters import HeavyHitters

ALONE = 1.0  # the most that one user adds to a word's count


@dataclass(frozen=True)
class Shown:
    """A group's words.

    Attributes:
        name: of the group.
        words: those shown, with their noised counts, the greatest first.
        hitters: how they were selected.
    """

    name: str
    words: Mapping[str, float]
    hitters: HeavyHitters

    @property
    def joined(self) -> list[str]:
        """Those that hold a space."""
        return [word for word in self.words if is_joined(word)]

    @property
    def detectable(self) -> float:
        """The count that would have been shown with a probability of 95 %."""
        return self.hitters.threshold + POWER * self.hitters.noise_multiplier

    def any_joined(self) -> Check:
        """Whether a word with a space is shown at all: then more than one user holds it, but at the selection's delta.

        The interval is as wide as the threshold is above what one user can add. So it lies outside the band, from 0
        to that, where the word is shown.
        """
        margin = self.hitters.threshold - ALONE
        if self.joined:
            first = self.joined[0]
            count = self.words[first]
            sides = f"“{visible(first)}” has a count of {count:.1f}, and is shown above {self.hitters.threshold:.1f}"
            low, high = count - margin, count + margin
        else:
            sides, count, low, high = "none is shown", 0.0, 0.0, self.detectable
        return Check(
            title=f"a word with a space is shown: {self.name}",
            sides=sides,
            estimate=count,
            low=low,
            high=high,
            tolerance=ALONE,
            scale=1.1 * max(high, self.detectable),
            alarm=bool(self.joined),
            note=f"false alarms at most {self.hitters.delta:.2g} where one user has such words, none where nobody has; "
            f"found with 95 % from a count of {self.detectable:.1f} on",
        )

    def share_joined(self, tolerance: float, false_alarms: float) -> Check:
        """The share of the shown words that hold a space; its interval is Clopper and Pearson's."""
        share = joined_share(self.words, 1 - false_alarms)
        return Check(
            title=f"share of the shown words that hold a space: {self.name}",
            sides=f"{share.joined} of {share.shown}",
            estimate=share.share,
            low=share.low,
            high=share.high,
            tolerance=tolerance,
            scale=1.0,
            alarm=share.low > tolerance,
            note=f"false alarms at most {false_alarms:.2%}; words are taken as drawn one by one",
        )


def look_next(groups: Sequence[Shown]) -> list[str]:
    """Sentences, the most pressing one first."""
    found = [_joined(group) for group in groups if group.joined]
    for group in groups:
        if sound := [word for word in group.words if word not in group.joined]:
            found.append(
                f"Many users hold {_few(sound)} ({group.name}). Look whether the vocabulary should have what it lacks "
                "of them, and whether these are words of your users or something that is made on the way."
            )
    if not any(group.joined for group in groups):
        found.append(
            "No joined word is shown. One with a count of "
            f"{max(group.detectable for group in groups):.1f} would have been, with a probability of 95 %. A fault of "
            "fewer sentences, or one that makes ever other words, may be there: ask more users, or spend more epsilon."
        )
    else:
        found.append(
            "Once the fault is mended, run the inspection again: the joined words must be gone. It costs the same "
            "again, in the same ledger."
        )
    return found


def told(hitters: HeavyHitters, selection: str) -> list[str]:
    """What has left the users, in sentences."""
    return [
        f"Of each user at most {hitters.words} different words, of all groups together, each with a weight of 1/√k "
        "where the user gives k; they were summed by group and word.",
        f"Noise of standard deviation {hitters.noise_multiplier:.3g} on every count, where one user moves all counts "
        f"by at most 1 together. Words with a count above {hitters.threshold:.1f} are shown with it.",
        "That a word is shown tells that somebody holds it. Of words that one user alone holds any is shown with a "
        f"probability of at most {hitters.delta:.2g}: that is part of the delta below which epsilon is stated.",
        f"Selected on the users' side: {selection}.",
        "Nothing else: no sentence, and no word or count below the threshold.",
    ]


def visible(word: str) -> str:
    """The word with its spaces to be seen."""
    return word.replace(" ", "␣")


def _joined(group: Shown) -> str:
    return (
        f"Words with a space are shown: {_few(group.joined)} ({group.name}). What splits a sentence into words "
        "never leaves one: two words have been joined before they reach the model. Look at how text is split on those "
        "users' devices or versions, and at what treats the words of this place otherwise than the rest."
    )


def _few(words: Sequence[str]) -> str:
    named = ", ".join(f"“{visible(word)}”" for word in words[:3])
    return f"{named} and {len(words) - 3} more" if len(words) > 3 else named
