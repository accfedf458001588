"""First tokens joined, found under a real guarantee: power of heavy hitters, and what TrieHH needs.

Users are the modules of Python's standard library. In each draw 70 of them, drawn anew, are public: the vocabulary are
the 2,000 most frequent of their words. The others are asked once, at delta 1e-5. The fault is found if a word with a
space is shown. Sound tokens hold no space, so that without the fault there is nothing to find.

python -m evidence.joined_tokens_power --output evidence/results/joined_tokens_power.md
TrieHH: --draws 0 --trie-draws 5 --output evidence/results/joined_tokens_trie.md
"""

import contextlib
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.side_by_side import markdown, options, publish
from evidence.trie_hh import TrieHH, fewest_users
from lit_epgan.datamodules.text import docstrings, with_joined
from lit_epgan.inspection.words_view import is_joined, words_outside
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.lib.symbols import most_frequent
from lit_epgan.privacy import HeavyHitters, Ledger, Queries

DELTA, PUBLIC, VOCABULARY, POWER = 1e-5, 70, 2000, 0.95
EPSILONS = (1.0, 2.0, 4.0, 8.0)
SHARES = {0: (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0), None: (0.2, 0.5, 1.0)}  # by place; None: anywhere
GIVEN = (1, 5)  # words of a user
FEW = (50, 100, 150, 200, 300, 400, 635)  # users
LETTERS, LARGEST = 10, 100_000  # of TrieHH: letters of a word, and the greatest cohort that is simulated

Users = list[list[str]]


class Simulated(Queries):
    """Queries whose noise repeats and that no ledger keeps: there are thousands of draws."""

    def __init__(self, seed: int) -> None:
        super().__init__(Ledger("never written"), noise_seed=seed)

    @contextlib.contextmanager
    def account(self, *_: Any, **__: Any) -> Iterator[Callable[[], None]]:
        yield lambda: None


class Population(Sequence[Callable[[], list[str]]]):
    """As many users as are wanted, each with the words of one of those there are."""

    def __init__(self, users: Users, size: int) -> None:
        self.users, self.size = users, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return lambda: self.users[index % len(self.users)]


class Corpus:
    """All sentences as numbers, for thousands of draws; ``drawn`` is the same by the package's functions."""

    def __init__(self, texts: dict[str, Any]) -> None:
        self.texts, self.names = texts, sorted(texts)
        sentences = [(u, list(s)) for u, name in enumerate(self.names) for s in texts[name]]
        pairs = [f"{s[0]} {s[1]}" if len(s) > 1 else s[0] for _, s in sentences]
        words = sorted({w for _, s in sentences for w in s} | set(pairs))  # ties are broken by the alphabet
        place = {word: k for k, word in enumerate(words)}
        self.joined = np.array([is_joined(word) for word in words])
        self.user = np.array([u for u, _ in sentences])
        self.pair = np.array([place[pair] for pair in pairs])
        self.long = np.array([len(s) > 1 for _, s in sentences])
        self.token = np.array([place[w] for _, s in sentences for w in s])
        self.sentence = np.repeat(np.arange(len(sentences)), [len(s) for _, s in sentences])
        self.at = np.concatenate([np.arange(len(s)) for _, s in sentences])

    def order(self, draw: int) -> np.ndarray:
        """The users, the public ones first."""
        return torch.randperm(len(self.names), generator=generator_for(draw, "public")).numpy()

    def public(self, order: np.ndarray) -> np.ndarray:
        """Which words are in the vocabulary."""
        of_public = self.token[np.isin(self.user[self.sentence], order[:PUBLIC])]
        counts = np.bincount(of_public, minlength=len(self.joined))
        known = np.zeros(len(counts), bool)
        known[np.argsort(-counts, kind="stable")[:VOCABULARY]] = True
        return known & (counts > 0)

    def chance(self, draw: int) -> np.ndarray:
        """Of each sentence what decides on its fault."""
        sizes = [len(self.texts[name]) for name in self.names]
        drawn = [torch.rand(n, generator=generator_for(draw, name)) for n, name in zip(sizes, self.names, strict=True)]
        return torch.cat(drawn).numpy()

    def words(self, hit: np.ndarray, place: int | None) -> tuple[np.ndarray, np.ndarray]:
        """Users and words, at the first place or anywhere, where the sentences that are ``hit`` are joined."""
        of_hit = (hit & self.long)[self.sentence]
        word = np.where(of_hit & (self.at == 0), self.pair[self.sentence], self.token)
        kept = self.at == 0 if place == 0 else ~(of_hit & (self.at == 1))
        return self.user[self.sentence][kept], word[kept]


def counted(users: np.ndarray, words: np.ndarray, m: int, size: int) -> np.ndarray:
    """Of each of ``size`` words its count, before noise; ``HeavyHitters.counts`` in numbers."""
    held, times = np.unique(users * size + words, return_counts=True)
    user, word = np.divmod(held, size)
    order = np.lexsort((word, -times, user))
    user, word = user[order], word[order]
    rank = np.arange(len(user)) - np.searchsorted(user, user)
    given = np.minimum(np.bincount(user, minlength=1)[user], m)
    return np.bincount(word[rank < m], weights=given[rank < m] ** -0.5, minlength=size)


def joined_counts(users: np.ndarray, words: np.ndarray, m: int, joined: np.ndarray) -> np.ndarray:
    """Counts of the joined words that occur, before noise."""
    counts = counted(users, words, m, len(joined))
    return counts[joined & (counts > 0)]


def drawn(texts: dict[str, Any], share: float, place: int | None, draw: int) -> Users:
    """The words outside the vocabulary of the users that are not public."""
    names = sorted(texts)
    order = torch.randperm(len(names), generator=generator_for(draw, "public")).tolist()
    public = set(most_frequent((s for k in order[:PUBLIC] for s in texts[names[k]]), VOCABULARY))
    private = [names[k] for k in order[PUBLIC:]]
    faulty = (with_joined(texts[name], share, generator_for(draw, name)) for name in private)
    return [words_outside(own, public, place) for own in faulty]


def check(corpus: Corpus, found: np.ndarray, share: float, place: int | None, m: int) -> None:
    """The numbers of draw 0 are those of the package's own functions."""
    counts = HeavyHitters(m, 1.0, DELTA).counts(drawn(corpus.texts, share, place, 0)) or {}
    np.testing.assert_allclose(np.sort(found), sorted(c for w, c in counts.items() if is_joined(w)))


def found_by(hitters: Mapping[Any, HeavyHitters], counts: np.ndarray, m: int, draw: int) -> Iterator[tuple[Any, bool]]:
    """Whether each would show a joined word. The noise of a word is its own, so that of the others is spared."""
    for e in EPSILONS:
        each = hitters[e, m]
        noise = each.noise_multiplier * Simulated(draw).normal(len(counts), f"epsilon {e}").numpy()
        yield (e, m), bool((counts + noise > each.threshold).any())


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--anywhere-draws", type=int, default=0, help="of words at any place, too")
    parser.add_argument("--clean-draws", type=int, default=200, help="without the fault")
    parser.add_argument("--trie-draws", type=int, default=0, help="of TrieHH, too")
    args = parser.parse_args()
    texts = docstrings(Path(sysconfig.get_paths()["stdlib"]))
    hitters = {(e, m): HeavyHitters.within(e, DELTA, m) for e in EPSILONS for m in GIVEN}
    corpus, draws = Corpus(texts), {0: args.draws, None: args.anywhere_draws}
    found: dict[Any, int] = defaultdict(int)
    fewer: dict[Any, int] = defaultdict(int)
    alarms = shown = 0
    for draw in range(max(draws.values())):
        order, chance = corpus.order(draw), corpus.chance(draw)
        public, place_of = corpus.public(order), np.argsort(order) - PUBLIC
        for place, share in ((p, s) for p, shares in SHARES.items() if draw < draws[p] for s in shares):
            users, words = corpus.words(chance < share, place)
            outside = (place_of[users] >= 0) & ~public[words]
            users, words = place_of[users][outside], words[outside]
            for m in GIVEN:
                counts = joined_counts(users, words, m, corpus.joined)
                if draw == 0 and share in (0.2, 1.0):
                    check(corpus, counts, share, place, m)
                for key, hit in found_by(hitters, counts, m, draw):
                    found[place, share, key] += hit
                for n in FEW if place == 0 and share in (0.1, 1.0) else ():
                    few = users < n
                    for key, hit in found_by(hitters, joined_counts(users[few], words[few], m, corpus.joined), m, draw):
                        fewer[share, n, key] += hit
    for draw in range(args.clean_draws if args.draws else 0):
        order, each = corpus.order(draw), hitters[2.0, 5]
        public, place_of = corpus.public(order), np.argsort(order) - PUBLIC
        users, words = corpus.words(np.zeros(len(corpus.user), bool), 0)
        outside = (place_of[users] >= 0) & ~public[words]
        counts = counted(place_of[users][outside], words[outside], 5, len(corpus.joined))
        noise = each.noise_multiplier * Simulated(draw).normal(len(counts), "clean").numpy()
        above = (counts > 0) & (counts + noise > each.threshold)
        alarms, shown = alarms + bool(above[corpus.joined].any()), shown + int(above.sum())
    table = by_share(found, draws, len(texts))
    table += f"\nWithout the fault, epsilon 2, 5 words: {alarms} of {args.clean_draws} draws "
    table += f"show a joined word (sound tokens hold no space), and {shown / max(1, args.clean_draws):.2f} others.\n\n"
    table += by_users(fewer, args.draws)
    parts = [table] if max(draws.values()) else []
    parts += [trie(texts, args.trie_draws)] if args.trie_draws else []
    publish("\n".join(parts), args.output)


def by_share(found: dict[Any, int], draws: dict[Any, int], users: int) -> str:
    rows = []
    for place, shares in ((p, s) for p, s in SHARES.items() if draws[p]):
        for m in GIVEN:
            for e in EPSILONS:
                power = [found[place, share, (e, m)] / draws[place] for share in shares]
                enough = next((s for k, s in enumerate(shares) if min(power[k:]) >= POWER), None)
                listed = ", ".join(f"{100 * s:g} %: {p:.3f}" for s, p in zip(shares, power, strict=True))
                rows.append(
                    ["anywhere" if place is None else "first place", m, f"{e:g}",
                     "none" if enough is None else f"{100 * enough:g} %", listed]
                )  # fmt: skip
    return markdown(
        "First tokens joined, found under a guarantee for users",
        ["words outside the vocabulary", "given by a user", "epsilon",
         "smallest share of sentences found with 95 % power", "power by share"],
        rows,
        f"Heavy hitters by one query, delta {DELTA:g}, one user's whole data set emptied, the Gaussian mechanism "
        f"exactly and half of delta for the selection. {users - PUBLIC} users; {draws[0]} draws of noise, public users "
        f"and fault ({draws[None]} for words anywhere).",
    )  # fmt: skip


def by_users(fewer: dict[Any, int], draws: int) -> str:
    lines = ["| share of sentences | given by a user | epsilon | fewest users with 95 % power | power by users |",
             "|---|---|---|---|---|"]  # fmt: skip
    for share in (1.0, 0.1):
        for m in GIVEN:
            for e in EPSILONS:
                power = [fewer[share, n, (e, m)] / max(1, draws) for n in FEW]
                enough = next((n for k, n in enumerate(FEW) if min(power[k:]) >= POWER), None)
                listed = ", ".join(f"{n}: {p:.3f}" for n, p in zip(FEW, power, strict=True))
                lines.append(f"| {100 * share:g} % | {m} | {e:g} | {enough or f'more than {FEW[-1]}'} | {listed} |")
    return "Words at the first place, from fewer users:\n\n" + "\n".join(lines) + "\n"


def trie(texts: dict[str, Any], draws: int) -> str:
    """What TrieHH needs: users are repeated until there are enough."""
    rows = []
    for share in (1.0, 0.1):
        bases = [drawn(texts, share, 0, draw) for draw in range(draws)]
        for epsilon in EPSILONS:
            least = fewest_users(epsilon, DELTA, LETTERS)
            n, enough, size = 4 * least, f"more than {least:,}", ""
            while True:
                with contextlib.suppress(UserError):
                    each = TrieHH(n, epsilon, DELTA, LETTERS)
                if each.cohort > LARGEST:
                    break
                size = f"{each.cohort:,}, {each.votes}"
                hits = sum(
                    any(map(is_joined, each.find(Simulated(draw), Population(base, n), "words")))
                    for draw, base in enumerate(bases)
                )
                if hits >= POWER * draws:
                    enough = f"{n:,}"
                    break
                enough, n = f"more than {n:,}", 2 * n
            rows.append([f"{100 * share:g} %", f"{epsilon:g}", f"{least:,}", enough, size])
    return markdown(
        "First tokens joined, and what TrieHH needs",
        ["share of sentences", "epsilon", "theorem 1 holds from", "users with 95 % power", "cohort, votes"],
        rows,
        f"TrieHH on words at the first place, {LETTERS} letters at most, delta {DELTA:g}; {draws} draws. There are not "
        "as many users: those there are were repeated, in steps of twice as many.",
    )


if __name__ == "__main__":
    main()
