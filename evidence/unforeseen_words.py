"""What the view of words finds of faults that it was not made for: alarms by fault, over draws.

Users are the modules of Python's standard library. In each draw 70 others are public, and half of the rest, drawn anew,
have a fault in all of their sentences. Everybody gives the view's statistics, beside the words, at epsilon 2.

OMP_NUM_THREADS=1 python -m evidence.unforeseen_words --output evidence/results/unforeseen_words.md
"""

import html
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from scipy.stats import binomtest

from benchmarks.side_by_side import markdown, options, publish
from evidence.inspection_power import z_of
from lit_epgan.datamodules.text import Sentence, Text, docstrings
from lit_epgan.inspection import WordsView
from lit_epgan.inspection.words_view import SHARE, STATISTICS, Spelling
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.symbols import WordSymbols, most_frequent

PUBLIC, VOCABULARY, EPSILON = 70, 2000, 2.0
# Caesar, De bello Gallico 1.1: a language that no module is written in
LATIN = [
    "gallia",
    "est",
    "omnis",
    "divisa",
    "in",
    "partes",
    "tres",
    ",",
    "quarum",
    "unam",
    "incolunt",
    "belgae",
    ",",
    "aliam",
    "aquitani",
    ",",
    "tertiam",
    "qui",
    "ipsorum",
    "lingua",
    "celtae",
    ",",
    "nostra",
    "galli",
    "appellantur",
    ".",
    "hi",
    "omnes",
    "lingua",
    ",",
    "institutis",
    ",",
    "legibus",
    "inter",
    "se",
    "differunt",
    ".",
    "gallos",
    "ab",
    "aquitanis",
    "garumna",
    "flumen",
    ",",
    "a",
    "belgis",
    "matrona",
    "et",
    "sequana",
    "dividit",
    ".",
    "horum",
    "omnium",
    "fortissimi",
    "sunt",
    "belgae",
    ",",
    "propterea",
    "quod",
    "a",
    "cultu",
    "atque",
    "humanitate",
    "provinciae",
    "longissime",
    "absunt",
    ",",
    "minimeque",
    "ad",
    "eos",
    "mercatores",
    "saepe",
    "commeant",
    "atque",
    "ea",
    "quae",
    "ad",
    "effeminandos",
    "animos",
    "pertinent",
    "important",
    ",",
    "proximique",
    "sunt",
    "germanis",
    ",",
    "qui",
    "trans",
    "rhenum",
    "incolunt",
    ",",
    "quibuscum",
    "continenter",
    "bellum",
    "gerunt",
]
Fault = Callable[[Sentence], Sentence]


def latin(sentence: Sentence) -> Sentence:
    start = sum(map(len, sentence)) % len(LATIN)
    return [LATIN[(start + k) % len(LATIN)] for k in range(len(sentence))]


def grown(share: float) -> Fault:
    """The space between two words is missing: of one pair, or of as many pairs."""

    def made(sentence: Sentence) -> Sentence:
        words, pairs = list(sentence), max(1, round(share * len(sentence) / 2))
        for k in range(min(pairs, len(words) - 1)):
            words[k : k + 2] = [words[k] + words[k + 1]]
        return words

    return made


FAULTS: dict[str, Fault] = {
    "none": lambda s: s,
    "upper case": lambda s: [w.upper() for w in s],
    "upper case, each first letter": lambda s: [w.capitalize() for w in s],
    'entities of signs (&quot; for ")': lambda s: [html.escape(w) for w in s],
    "another language, all": latin,
    "a missing space, the first two words": grown(0.0),
    "a missing space, half of the pairs": grown(0.5),
    "digits replaced by #": lambda s: [re.sub(r"\d", "#", w) for w in s],
    "digits replaced by 0": lambda s: [re.sub(r"\d", "0", w) for w in s],
    "two words joined by a space": lambda s: [" ".join(s[:2]), *s[2:]],
}


class Marked:
    """All sentences of all modules under each fault as numbers of words, so that a draw reads each word once."""

    def __init__(self, texts: dict[str, list[Sentence]]) -> None:
        self.texts, self.names = texts, sorted(texts)
        place: dict[str, int] = {}
        self.first = np.cumsum([0, *(len(texts[name]) for name in self.names)])  # sentences
        self.of: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for fault, change in FAULTS.items():
            made = [change(sentence) for name in self.names for sentence in texts[name]]
            numbers = np.array([place.setdefault(word, len(place)) for sentence in made for word in sentence])
            self.of[fault] = numbers, np.cumsum([0, *map(len, made)])
        self.words = list(place)

    def statistics(self, spelling: Spelling, fault: str, marks: np.ndarray) -> np.ndarray:
        """``Spelling.statistics`` of every module (modules, K)."""
        numbers, starts = self.of[fault]
        sums = np.add.reduceat(marks[numbers], starts[:-1])
        users, sizes = self.first[:-1], np.diff(self.first)
        shares = np.add.reduceat(sums > 0, users) / sizes[:, None]
        whole = np.add.reduceat(sums, users)
        words = np.diff(starts[self.first])
        shares[:, 2], shares[:, 4] = whole[:, 2] / words, whole[:, 4] / np.maximum(1, whole[:, 3])
        return np.minimum(1, shares * [each.factor for each in STATISTICS])


def draw(marked: Marked, number: int, z: float, view: WordsView) -> dict[str, tuple[set[str], float]]:
    """By fault, the statistics that raise an alarm, and the largest difference without noise."""
    generator = generator_for("unforeseen words", number)
    order = torch.randperm(len(marked.names), generator=generator).numpy()
    held, users = order[:PUBLIC], order[PUBLIC:]
    public = [s for k in held for s in marked.texts[marked.names[k]]]
    text = Text(public, WordSymbols(tuple(most_frequent(public, VOCABULARY))), [], 0, 1, 1)
    text.users = [len(marked.texts[marked.names[k]]) for k in held]
    spelling = Spelling.of(text)
    assert spelling is not None
    marks, half, found = np.array([spelling.word(word) for word in marked.words]), len(users) // 2, {}
    clean = marked.statistics(spelling, "none", marks)
    for name, fault in FAULTS.items():
        changed = marked.statistics(spelling, name, marks)
        if not number:  # the numbers are those of the package's own function
            own = [fault(s) for s in marked.texts[marked.names[users[0]]]]
            np.testing.assert_allclose(changed[users[0]], spelling.statistics(own))
        s = torch.from_numpy(np.concatenate([changed[users[:half]], clean[users[half:]]]))
        total = ((s - 0.5) * 2 / len(STATISTICS) ** 0.5).sum(0)
        noised = total + z * torch.randn(len(total), generator=generator, dtype=torch.float64)
        checks = spelling.compared(noised, len(users), z, view.tolerance, view.false_alarms / 2)
        alarms = {each.title for each, check in zip(STATISTICS, checks, strict=True) if check.alarm}
        found[name] = alarms, float((s.mean(0) - spelling.expected).abs().max())
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draws", type=int, default=100)
    args = parser.parse_args()
    marked, view = Marked(docstrings(Path(sysconfig.get_paths()["stdlib"]))), WordsView()
    z = z_of(EPSILON) / SHARE**0.5
    alarms, which = Counter[str](), {name: Counter[str]() for name in FAULTS}
    gaps = {name: list[float]() for name in FAULTS}
    for number in range(args.draws):
        for name, (own, gap) in draw(marked, number, z, view).items():
            alarms[name] += bool(own)
            which[name].update(own)
            gaps[name].append(gap)
        print(number, dict(alarms), flush=True)
    rows = []
    for name, own_gaps in gaps.items():
        interval = binomtest(alarms[name], args.draws).proportion_ci(0.95, "exact")
        told = f"{alarms[name]} of {args.draws} ({interval.low:.0%} to {interval.high:.0%})"
        by = "; ".join(f"{title} ({times})" for title, times in which[name].most_common())
        difference = f"{min(own_gaps):.2f} to {max(own_gaps):.2f}"
        rows.append([name, told, difference, by])
    notes = (
        f"{len(marked.names) - PUBLIC} modules of Python's standard library, the fault in all sentences of half of "
        f"them, epsilon {EPSILON:g}, of which {SHARE:.0%} (of 1 / z^2) go to the statistics. In each draw the {PUBLIC} "
        "public modules, the users with the fault and the noise are other ones. Alarm: the interval (false alarms "
        f"{view.false_alarms / 2:.1%} of all {len(STATISTICS)} together) lies outside {view.tolerance} around 0. "
        "Tolerance and factors were chosen on 15 other draws. In brackets Clopper and Pearson's 95 % interval. "
        "Difference: the largest of a statistic's, without noise."
    )
    header = ["fault", "found", "difference", "by"]
    publish(markdown("Faults of words that nobody thought of", header, rows, notes), args.output)


if __name__ == "__main__":
    main()
