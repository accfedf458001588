"""Words: those that many users of a group hold, by one selection for all groups, and whether they are joined."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, zip_longest
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import binomtest
from torch import Tensor
from torch.utils.data import Dataset

from lit_epgan.datamodules.text import Sentence, Text
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.release import FEWEST_PUBLIC, TYPICAL, critical
from lit_epgan.inspection.selections import OUTSIDE, Selection
from lit_epgan.inspection.user_records import Records
from lit_epgan.inspection.view import POWER, PUBLIC, Check, Findings, Panel, Users, View
from lit_epgan.lib.bounds import at_least, not_empty, within
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.symbols import most_frequent
from lit_epgan.privacy.heavy_hitters import HeavyHitters

SHARE = 0.15  # of the price that goes to the statistics of all sentences
ALONE = 1.0  # the most that one user adds to a word's count


@dataclass(frozen=True)
class Shown:
    """A group's words that are shown, with their noised counts, the greatest first, and how they were selected."""

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
        title, scale = f"a word with a space is shown: {self.name}", 1.1 * max(high, self.detectable)
        note = (
            f"false alarms at most {self.hitters.delta:.2g} where one user has such words, none where nobody has; "
            f"found with 95 % from a count of {self.detectable:.1f} on"
        )
        return Check(title, sides, count, low, high, ALONE, scale, bool(self.joined), note)

    def share_joined(self, tolerance: float, false_alarms: float) -> Check:
        """The share of the shown words that hold a space; its interval is Clopper and Pearson's."""
        share = joined_share(self.words, 1 - false_alarms)
        title = f"share of the shown words that hold a space: {self.name}"
        note = f"false alarms at most {false_alarms:.2%}; words are taken as drawn one by one"
        interval, alarm = (share.share, share.low, share.high), share.low > tolerance
        return Check(title, f"{share.joined} of {share.shown}", *interval, tolerance, 1.0, alarm, note)


class WordsView(View):
    """Every user gives a few words of all groups together; those with a noised count above a threshold are shown.

    ``HeavyHitters`` has the equations. Half of the inspection's delta is the selection's. Where there is enough public
    text every user gives five statistics of all of its sentences, too (``Spelling``), for ``SHARE`` of the price.

    Args:
        words: that a user gives, at most.
        listed: words of a group on the page; the file has all that are shown.
        false_alarms: the rate of false alarms of the shares of joined words and of the statistics together.
        tolerance: the share of joined words, and the difference of a statistic, that is nobody's fault.
    """

    delta_share = 0.5

    def __init__(self, words: int = 5, listed: int = 25, false_alarms: float = 0.01, tolerance: float = 0.1) -> None:
        not_empty("view", words=words, listed=listed, false_alarms=false_alarms, tolerance=tolerance)
        at_least(1, "view", words=words, listed=listed)
        within("(0, 1)", "view", false_alarms=false_alarms)
        within("[0, 1)", "view", tolerance=tolerance)
        self.words, self.listed, self.false_alarms, self.tolerance = words, listed, false_alarms, tolerance

    def look(self, users: Users, ask: Ask) -> Findings:
        rule = users.selection
        if rule.asks_primary:
            raise UserError(
                f"{rule.task} asks what a model gets right, and the view of words asks no model: choose "
                "lit_epgan.inspection.OutsideVocabulary, Slice, Where or AllExamples as selection"
            )
        texts = [as_text(each) for each in users.private.values()]
        public = None if users.public is None else as_text(users.public)
        rule.settle(lambda: map(word_records, texts), None if public is None else word_records(public), ask)
        spelling = None if public is None else Spelling.of(public)
        whole, rate = ask, self.false_alarms
        if spelling is not None:
            ask, rate = ask.part(1 - SHARE, "words"), rate / 2
        hitters = ask.hitters(self.words)
        found = ask.shown((given(text, rule) for text in texts), self.words)
        groups = [
            Shown(name, {word: count for (group, word), count in found.items() if group == k}, hitters)
            for k, name in enumerate(rule.groups)
        ]
        panels = [self._panel(group) for group in groups]
        checks = [group.any_joined() for group in groups]
        checks += [group.share_joined(self.tolerance, rate / len(groups)) for group in groups if group.words]
        sentences = look_next(groups)
        released = [
            f"Of each user at most {hitters.words} different words, of all groups together, each with a weight of 1/√k "
            "where the user gives k; they were summed by group and word.",
            f"Noise of standard deviation {hitters.noise_multiplier:.3g} on every count, where one user moves all "
            f"counts by at most 1 together. Words with a count above {hitters.threshold:.1f} are shown with it.",
            "That a word is shown tells that somebody holds it. Of words that one user alone holds any is shown with a "
            f"probability of at most {hitters.delta:.2g}: that is part of the delta below which epsilon is stated.",
            f"Selected on the users' side: {rule}.",
            "Nothing else: no sentence, and no word or count below the threshold.",
        ]
        if spelling is not None:
            compared, differ, told = self._compare(spelling, texts, whole.part(SHARE, "spelling"), rate)
            checks, sentences = checks + compared, differ + sentences
            released.insert(-1, told)
        return Findings(
            panels=panels if public is None else [*panels, self._public(public, rule)],
            checks=checks,
            released=released,
            look_next=sentences,
            rates=f"Of words that one user alone holds any is shown at a rate of at most {hitters.delta:.2g}, and a "
            "word that nobody holds is never shown. Where each word shown held a space with a probability of "
            f"{self.tolerance:g}, the shares would raise an alarm at a rate of at most {rate:.2g}"
            + ("" if spelling is None else f", and statistics that differ by no more than that at {rate:.2g}")
            + ".",
            reading="A word's count is the noised sum of its users' weights. A user who gives k words has the weight "
            "1/√k in each, so that no fewer users hold the word than its count says, but for the noise. ␣ is a space "
            "within a word. The public data's words are counted as they are.",
            kept={
                "shown": [(group.name, word, count) for group in groups for word, count in group.words.items()],
                "threshold": hitters.threshold,
                "noise_multiplier": hitters.noise_multiplier,
            },
        )

    def _compare(
        self, spelling: "Spelling", texts: list[Text], part: Ask, rate: float
    ) -> tuple[list[Check], list[str], str]:
        """Users' spelling beside the public text's: checks, sentences on what differs, and what is released."""
        total = part(spelling.given(text.sentences) for text in texts)
        compared = spelling.compared(total, len(texts), part.noise_multiplier, self.tolerance, rate)
        hints = zip(compared, STATISTICS, strict=True)
        differ = [f"Users and public text differ in {x.title}: {x.hint}." for check, x in hints if check.alarm]
        told = (
            f"Of each user {len(total)} statistics of all of its sentences, each from 0 to 1. They were summed with "
            f"noise of standard deviation {part.noise_multiplier:.3g}, where one user moves the sum by 1."
        )
        return compared, differ, told

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


class SpellingStatistic(NamedTuple):
    """A share of a user's sentences, words or digits, which is multiplied by ``factor`` and then 1 at most; ``hint``:
    where to look if users and public text differ in it."""

    title: str
    factor: float
    hint: str


DIGITS = "look at what replaces, masks or makes digits"
STATISTICS = (
    SpellingStatistic(
        "sentences with a word of a shape that public text lacks",
        3.0,
        "look at upper and lower case, at entities and escapes such as &quot;, and at signs that should be gone",
    ),
    SpellingStatistic(
        "sentences with two words that have grown together",
        2.0,
        "look at what joins lines and parts of a text, and at what takes spaces out",
    ),
    SpellingStatistic(
        "words outside the vocabulary",
        1.5,
        "look at the language and its spelling, and at what a preparation leaves of a word",
    ),
    SpellingStatistic("sentences with a digit", 2.5, DIGITS),
    SpellingStatistic("zeros among the digits", 1.0, DIGITS),
)


@dataclass(frozen=True)
class Spelling:
    """What sentences are made of, and how users' differ in it from public ones.

    User u gives (2 / sqrt(K)) (s_u - 1/2), s_u its K statistics, each from 0 to 1: a norm of at most 1. Noise N(0, z^2)
    on the sum over n users is one of standard deviation z sqrt(K) / (2 n) on each mean.

    A word's shape is the word with A for capitals, a for small letters (of ASCII), 0 for digits, and repetitions left
    out. Two words have grown together where their word is outside the vocabulary and each of them, of three letters or
    more, is in it.

    Attributes:
        shapes: of public words.
        vocabulary: of public words.
        expected: the statistics' means over public users (K,). Each half of these is read by what the other half has.
    """

    shapes: frozenset[str]
    vocabulary: frozenset[str]
    expected: Tensor

    @classmethod
    def of(cls, public: Text) -> "Spelling | None":
        """From public text; None where it has too few sentences."""
        if len(public.sentences) < FEWEST_PUBLIC:
            return None
        users, start = [], 0
        for size in public.users or [TYPICAL] * (len(public.sentences) // TYPICAL):
            users.append(public.sentences[start : start + size])
            start += size
        most, found = len(public.vocabulary.words), []
        for own, others in ((users[::2], users[1::2]), (users[1::2], users[::2])):
            read = cls._by([sentence for user in others for sentence in user], most)
            found += [read.statistics(sentences) for sentences in own]
        whole = cls._by(public.sentences, most)
        return replace(whole, vocabulary=frozenset(public.vocabulary.words), expected=torch.stack(found).mean(0))

    @classmethod
    def _by(cls, sentences: Sequence[Sentence], most: int) -> "Spelling":
        shapes = frozenset(shape(word) for sentence in sentences for word in sentence)
        return cls(shapes, frozenset(most_frequent(sentences, most)), torch.full((len(STATISTICS),), 0.5).double())

    def given(self, sentences: Sequence[Sentence]) -> Tensor:
        """What a user gives (K,), float64."""
        return (self.statistics(sentences) - 0.5) * 2 / math.sqrt(len(STATISTICS))

    def statistics(self, sentences: Sequence[Sentence]) -> Tensor:
        """A user's (K,), float64; those that are expected where it has no word."""
        read = [[self.word(word) for word in sentence] for sentence in sentences if sentence]
        if not read:
            return self.expected
        sums = np.array([np.sum(words, 0) for words in read])
        new, grown, _, digits, _ = (sums > 0).mean(0)
        outside, zeros = sums[:, 2].sum() / sum(map(len, read)), sums[:, 4].sum() / max(1, sums[:, 3].sum())
        factors = torch.tensor([each.factor for each in STATISTICS], dtype=torch.float64)
        return (factors * torch.tensor([new, grown, outside, digits, zeros], dtype=torch.float64)).clamp(max=1)

    def word(self, word: str) -> tuple[int, int, int, int, int]:
        """Whether its shape is new, whether it is two words, whether it is outside; its digits and its zeros."""
        outside = word not in self.vocabulary
        cuts = range(3, len(word) - 2) if outside else ()
        grown = any(word[:k] in self.vocabulary and word[k:] in self.vocabulary for k in cuts)
        return shape(word) not in self.shapes, grown, outside, sum(map(str.isdigit, word)), word.count("0")

    def compared(
        self, total: Tensor, users: int, noise_multiplier: float, tolerance: float, rate: float
    ) -> list[Check]:
        """The users' means against the public ones, from the noised sum (K,) of what so many users give; ``rate``: of
        false alarms, of all together."""
        k = len(STATISTICS)
        q, sd = critical(rate / k), noise_multiplier * math.sqrt(k) / 2 / users
        checks = []
        for each, sum_, known in zip(STATISTICS, total.tolist(), self.expected.tolist(), strict=True):
            mean = 0.5 + sum_ * math.sqrt(k) / 2 / users
            gap, scale = mean - known, max(2 * tolerance, 1.1 * abs(mean - known) + q * sd)
            sides = f"{mean:.2f} ({mean - q * sd:.2f} to {mean + q * sd:.2f}) against {known:.2f}"
            note = f"false alarms at most {rate / k:.2%}; found with 95 % from {tolerance + (q + POWER) * sd:.2f} on"
            title = f"{each.title}, times {each.factor:g}, 1 at most: all users - {PUBLIC}"
            alarm = abs(gap) - q * sd > tolerance
            checks.append(Check(title, sides, gap, gap - q * sd, gap + q * sd, tolerance, scale, alarm, note))
        return checks


@lru_cache(maxsize=100_000)
def shape(word: str) -> str:
    """A word's shape."""
    kinds = (
        "0" if c.isdigit() else c if not (c.isascii() and c.isalpha()) else "A" if c.isupper() else "a" for c in word
    )
    return "".join(c for c, _ in groupby(kinds))


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


def as_text(dataset: Dataset) -> Text:
    """The data set, if it is text. UserError: it is something else."""
    if not isinstance(dataset, Text):
        raise UserError(
            f"the view shows words, and a user's data are a {type(dataset).__name__}: give a data module of text, as "
            "lit_epgan.datamodules.DocstringsDataModule"
        )
    return dataset


def word_records(text: Text) -> Records:
    """A record for each word: its number in the vocabulary, -1 outside, twice, as x and as label; its place from 0."""
    numbers = [number for sentence in text.sentences for number in text.vocabulary.encode(sentence)]
    places = [place for sentence in text.sentences for place in range(len(sentence))]
    number, place = (torch.tensor(each, dtype=torch.int64) for each in (numbers, places))
    number = number.masked_fill(number == text.vocabulary.unknown, OUTSIDE)
    return Records((number, number, place), torch.zeros_like(number), 1)


def weighed(text: Text, selection: Selection) -> list[Counter[str]]:
    """Of each group the user's words with the sums of their weights; none of a group that the user is not in."""
    words = [word for sentence in text.sentences for word in sentence]
    found = []
    for column in selection.weights(word_records(text)).double().nan_to_num(0.0).clamp(0, 1).unbind(1):
        counts: Counter[str] = Counter()
        if float(column.sum()) >= selection.at_least:
            for k in column.nonzero().flatten().tolist():
                counts[words[k]] += float(column[k])  # type: ignore[assignment]  # of weights, not of integers
        found.append(counts)
    return found


def given(text: Text, selection: Selection) -> list[tuple[int, str]]:
    """What the user would give, (group, word): every group's first word, then every group's second, and so on."""
    ranked = [by_weight(counts) for counts in weighed(text, selection)]
    return [(k, word) for row in zip_longest(*ranked) for k, word in enumerate(row) if word is not None]


def by_weight(counts: Counter[str]) -> list[str]:
    """The words, those of the greatest weight first, in alphabetical order where it is the same."""
    return sorted(counts, key=lambda word: (-counts[word], word))


def words_outside(
    sentences: Iterable[Sequence[str]], vocabulary: Collection[str], position: int | None = None
) -> list[str]:
    """One user's words that are not in the public vocabulary, each as often as it occurs, the most frequent first; only
    those at one position of a sentence, from 0, where it is given."""
    found = (word for sentence in sentences for k, word in enumerate(sentence) if position in (None, k))
    counts = Counter(word for word in found if word not in vocabulary)
    return [word for word in by_weight(counts) for _ in range(counts[word])]


def is_joined(word: str) -> bool:
    """Whether a token holds a space, which the tokens of a sound preparation never do."""
    return " " in word.strip()


@dataclass(frozen=True)
class JoinedShare:
    """How many of the words that were shown are joined, and Clopper and Pearson's interval of the share, in [0, 1]."""

    joined: int
    shown: int
    low: float
    high: float
    level: float

    @property
    def share(self) -> float:
        """In [0, 1]; 0 where nothing was shown."""
        return self.joined / self.shown if self.shown else 0.0

    @property
    def percent(self) -> str:
        share, low, high = (f"{100 * value:.0f}" for value in (self.share, self.low, self.high))
        return f"{share} % ({100 * self.level:.4g} %: {low} to {high} %)"

    def __str__(self) -> str:
        if not self.shown:
            return "no word was shown"
        return f"{self.joined} of {self.shown} words shown are joined: {self.percent}"


def joined_share(shown: Collection[str], level: float = 0.95) -> JoinedShare:
    """Of words that were shown, by heavy hitters or by a model: how many are joined, with an interval of ``level``."""
    joined = sum(map(is_joined, shown))
    if not shown:
        return JoinedShare(0, 0, 0.0, 1.0, level)
    interval = binomtest(joined, len(shown)).proportion_ci(level, "exact")
    return JoinedShare(joined, len(shown), float(interval.low), float(interval.high), level)
