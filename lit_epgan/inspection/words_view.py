"""Words: those that many users of a group hold, by one selection for all groups, and whether they are joined."""

from collections import Counter

from lit_epgan.datamodules.text import Text
from lit_epgan.errors import UserError
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.detectors import PUBLIC
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.shown_words import Shown, look_next, told, visible
from lit_epgan.inspection.text import as_text, by_weight, given, weighed, word_records
from lit_epgan.inspection.view import Findings, Panel, Users, View
from lit_epgan.inspection.words import is_joined, joined_share


class WordsView(View):
    """Every user gives a few words of all groups together; those with a noised count above a threshold are shown.

    ``HeavyHitters`` has the equations. Half of the inspection's delta is that of the selection.

    Args:
        words: that a user gives, at most.
        listed: words of a group on the page; the file has all that are shown.
        false_alarms: the rate of false alarms of the shares of joined words, of all groups together.
        tolerance: the share of joined words that is nobody's fault.

    Raises:
        UserError: a number is out of its range.
    """

    delta_share = 0.5

    def __init__(self, words: int = 5, listed: int = 25, false_alarms: float = 0.01, tolerance: float = 0.1) -> None:
        if min(words, listed) < 1:
            raise UserError("view.words and view.listed are at least 1")
        if not 0 < false_alarms < 1 or not 0 <= tolerance < 1:
            raise UserError("view.false_alarms lies between 0 and 1, and view.tolerance from 0 to below 1")
        self.words, self.listed, self.false_alarms, self.tolerance = words, listed, false_alarms, tolerance

    def look(self, users: Users, ask: Ask) -> Findings:
        """One selection, and what it tells."""
        rule = users.selection
        if rule.asks_primary:
            raise UserError(
                f"{rule.task} asks what a model gets right, and the view of words asks no model: choose "
                "lit_epgan.inspection.OutsideVocabulary, Slice, Where or Everyone as selection"
            )
        texts = [as_text(each) for each in users.private.values()]
        public = None if users.public is None else as_text(users.public)
        rule.settle(lambda: map(word_records, texts), None if public is None else word_records(public), ask)
        hitters = ask.hitters(self.words)
        found = ask.shown((given(text, rule) for text in texts), self.words)
        groups = [
            Shown(name, {word: count for (group, word), count in found.items() if group == k}, hitters)
            for k, name in enumerate(rule.groups)
        ]
        panels = [self._panel(group) for group in groups]
        checks = [group.any_joined() for group in groups]
        checks += [
            group.share_joined(self.tolerance, self.false_alarms / len(groups)) for group in groups if group.words
        ]
        return Findings(
            panels=panels if public is None else [*panels, self._public(public, rule)],
            checks=checks,
            released=told(hitters, str(rule)),
            look_next=look_next(groups),
            rates=f"Of words that one user alone holds any is shown at a rate of at most {hitters.delta:.2g}, and a "
            "word that nobody holds is never shown. Where each word shown held a space with a probability of "
            f"{self.tolerance:g}, the shares would raise an alarm at a rate of at most {self.false_alarms:.2g}.",
            reading="A word's count is the noised sum of its users' weights. A user who gives k words has the weight "
            "1/√k in each, so that no fewer users hold the word than its count says, but for the noise. ␣ is a space "
            "within a word. The public data's words are counted as they are.",
            kept={
                "shown": [(group.name, word, count) for group in groups for word, count in group.words.items()],
                "threshold": hitters.threshold,
                "noise_multiplier": hitters.noise_multiplier,
            },
        )

    def _panel(self, group: Shown) -> Panel:
        if not group.words:
            refused = f"no word has a count above {group.hitters.threshold:.1f}: nothing is shown"
            return Panel(group.name, refused=refused)
        noise = f"noise of a standard deviation of {group.hitters.noise_multiplier:.1f} on each count"
        rows = [(visible(word), f"{count:.1f}") for word, count in group.words.items()]
        return self._listed(group.name, rows, [str(joined_share(group.words)), noise])

    def _public(self, public: Text, rule: Selection) -> Panel:
        """Words that occur once are not listed: they would tell little, and there are many."""
        counts: Counter[str] = sum(weighed(public, rule), Counter())
        rows = [(visible(word), f"{counts[word]:g}") for word in by_weight(counts) if counts[word] > 1]
        lines = [
            f"{len(public.sentences)} sentences that anybody may see",
            f"{len(counts)} different words as selected, {sum(map(is_joined, counts))} of them with a space",
        ]
        return self._listed(PUBLIC, rows, lines if rows else [*lines, "none of them occurs twice"])

    def _listed(self, title: str, rows: list[tuple[str, str]], lines: list[str]) -> Panel:
        more = [f"and {len(rows) - self.listed} more"] if len(rows) > self.listed else []
        return Panel(title, [*more, *lines], words=rows[: self.listed])
