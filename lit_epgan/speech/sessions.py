"""The embedded corpus before it is spoken: sentences of everyday topics, and what differs from session to session."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import derive_seed

Pool = Literal["train", "language model", "dev", "eval"]
# a sentence belongs to one pool, by its own digest: whatever is drawn in whichever order, none is in two
POOLS: tuple[Pool, ...] = ("train", "train", "train", "language model", "language model", "dev", "eval")

SLOTS = {
    "food": "tomatoes onions chicken rice soup bread potatoes cheese butter apples pepper fish beans pasta salad cake",
    "dish": "oven fridge bowl pan pot dish cupboard basket drawer",
    "cook": "cut wash cook bring heat boil fry clean taste serve",
    "number": "two three four five six seven eight nine ten twelve fifteen twenty thirty forty",
    "quality": "fresh red green cold hot small big old heavy cheap strange lovely broken dirty empty",
    "city": "london paris boston chicago dublin rome sydney toronto berlin madrid vienna denver",
    "day": "monday tuesday wednesday thursday friday saturday sunday",
    "time": "morning afternoon evening night weekend",
    "when": "today tomorrow now later again tonight soon",
    "family": "sister brother mother father cousin uncle daughter son neighbour",
    "vehicle": "train bus plane boat taxi car bicycle",
    "spot": "station river airport beach bridge harbor market museum hotel castle",
    "thing": "report letter money paper book phone contract ticket camera key wallet",
    "job": "manager teacher doctor lawyer driver nurse farmer engineer painter",
    "got": "lost found bought sold wrote signed copied wanted forgot",
    "animal": "dog cat horse bird rabbit sheep duck mouse lion cow",
    "act": "sleeping running eating hiding jumping waiting barking drinking",
    "ground": "garden field forest yard barn valley street",
    "weather": "cold warm windy rainy sunny dry foggy cloudy stormy",
    "device": "television radio light heating computer printer kettle fan",
    "way": "up down off on",
    "show": "movie game music concert play story program match",
    "saw": "watch see like hate miss record enjoy",
    "body": "head back knee shoulder stomach foot elbow throat",
    "care": "rest sleep water medicine exercise help",
    "sport": "football tennis golf hockey cricket chess",
    "wear": "shirt coat dress hat jacket sweater skirt",
    "color": "red green blue yellow purple orange brown white black",
}
TOPICS = {
    "kitchen": [
        "please <cook> the <quality> <food> and the <food>",
        "put the <food> in the <quality> <dish> with the <food>",
        "the <food> in the <dish> needs <number> more minutes",
        "do you want <food> or <food> with the <food> <when>",
    ],
    "home": [
        "could you turn the <device> in the <time> <way>",
        "did you <saw> the <show> with my <family> on <day> <time>",
        "who turned the <device> <way> before the <show> on <day>",
        "we <saw> the <quality> <show> more than the <show>",
    ],
    "travel": [
        "we are going to <city> and <city> on <day>",
        "the <vehicle> to <city> leaves at <number> on <day>",
        "my <family> lives near the <spot> in <city>",
        "is there a <vehicle> from the <spot> to <city> <when>",
    ],
    "work": [
        "can you send the <thing> to the <job> <when>",
        "she <got> <number> <quality> <thing> for the <job>",
        "the <job> will call my <family> at <number> <when>",
        "he <got> the <thing> near the <spot> on <day>",
    ],
    "outside": [
        "it will be <weather> in <city> in the <time>",
        "the <quality> <animal> is <act> in the <ground>",
        "why is the <animal> <act> near the <spot> <when>",
        "it was <weather> and <weather> on <day> <time>",
    ],
    "health": [
        "my <body> and my <body> hurt since <day> <time>",
        "the <job> says that your <body> needs <care>",
        "take some <care> and call the <job> on <day>",
        "his <family> had a <quality> <body> for <number> days",
    ],
    "sport": [
        "my <family> won <number> games of <sport> in <city>",
        "shall we play <sport> or <sport> on <day> <time>",
        "they lost at <sport> because it was too <weather>",
        "the <sport> team from <city> trains at the <spot>",
    ],
    "shopping": [
        "how much is the <color> <wear> with the <color> <wear>",
        "i bought a <quality> <wear> for my <family> in <city>",
        "they sell <number> <color> hats and a <quality> <wear>",
        "take the <color> <wear> back to the <spot> <when>",
    ],
}
Split = Literal["train", "dev", "eval"]
Voice = tuple[str, int, int]  # as espeak names it, with pitch and vocal tract: who is heard
SPLITS: tuple[Split, ...] = ("train", "dev", "eval")

ACCENTS = ("en-us", "en", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-us-nyc", "en-gb-x-rp", "en-gb-x-gbcwmd")
NOISES = ("white", "pink", "hum", "babble")
SNR = (8.0, 23.0)  # dB; babble at 2 dB nobody can follow, and its errors bury all differences
MAIN_TOPIC = 0.95  # share of a session's sentences that are drawn from its own topic; the rest from all alike
FEMALE = "f1 f2 f3 f4 f5 Alicia Andrea Annie anika aunty belinda grandma linda sandro shelby steph steph2 steph3 "
MALE = (
    "m1 m2 m3 m4 m5 m6 m7 m8 Alex Andy Denis Diogo Gene Henrique Hugo Jacky Lee Marco Mario Michael Mike adam antonio "
    "benjamin boris caleb david ed edward grandpa gustave ian iven iven2 john marcelo max michel miguel norbert pablo "
    "paul pedro quincy rob robert travis victor zac"
)
FAMILIES = {"female": FEMALE.split(), "male": MALE.split()}


def sentences(pool: Pool, mix: Sequence[float], *stream: int | str) -> Iterator[str]:
    """Different sentences of a pool, without end as long as its topics, drawn by the probabilities ``mix``, last."""
    rng = np.random.default_rng(derive_seed(*stream))
    topics = list(TOPICS.values())
    seen: set[str] = set()
    misses = 0
    while misses < 1000:
        templates = topics[rng.choice(len(topics), p=np.asarray(mix))]
        sentence = _filled(templates[rng.integers(len(templates))], rng)
        if sentence in seen or pool_of(sentence) != pool:
            misses += 1
            continue
        misses = 0
        seen.add(sentence)
        yield sentence


def pool_of(sentence: str) -> Pool:
    """The only pool that has the sentence."""
    return POOLS[derive_seed(sentence) % len(POOLS)]


def vocabulary() -> list[str]:
    """Every word of every sentence, sorted."""
    plain = " ".join(re.sub(r"<\w+>", " ", text) for templates in TOPICS.values() for text in templates)
    return sorted(set(plain.split()) | set(" ".join(SLOTS.values()).split()))


def _filled(template: str, rng: np.random.Generator) -> str:
    return re.sub(r"<(\w+)>", lambda slot: str(rng.choice(SLOTS[slot[1]].split())), template)


@dataclass(frozen=True)
class Conditions:
    """How an utterance is recorded.

    Attributes:
        reverberation: seconds until the room's echo has fallen by 60 dB.
        noise: its kind, one of ``NOISES``.
        snr: of speech to noise, in dB.
        low, high: edges of the channel's pass band, in Hz.
    """

    reverberation: float
    noise: str
    snr: float
    low: float
    high: float


@dataclass(frozen=True)
class Speaker:
    """A voice of espeak's.

    Attributes:
        name: of the speaker, unique in the corpus.
        voice: accent and variant as espeak names them, ``en-us+f1``.
        pitch: 0 to 99.
        rate: words in a minute.
        tract: length of the vocal tract, in percent of the voice's own: formants and pitch are as much lower.
    """

    name: str
    voice: str
    pitch: int
    rate: int
    tract: int


@dataclass(frozen=True)
class SessionPlan:
    """A session before it is spoken.

    Attributes:
        name, split: which one.
        seconds, words: as long as it has fewer of either, one more sentence is spoken.
        topics: probabilities of the topics of ``TOPICS``.
        speakers: who speak, in turn.
        own: the session's own conditions.
        heterogeneity: probability that an utterance is recorded under them, and not under others drawn for it alone.
        seed: of all that is still to be drawn.
    """

    name: str
    split: Split
    seconds: float
    words: int
    topics: tuple[float, ...]
    speakers: tuple[Speaker, ...]
    own: Conditions
    heterogeneity: float
    seed: int


def plan_sessions(
    sessions: dict[Split, int],
    minutes: float,
    words: int,
    heterogeneity: float = 1.0,
    imbalance: float = 4.0,
    speakers: int = 8,
    seed: int = 0,
) -> list[SessionPlan]:
    """Sessions whose speakers, conditions and topics are drawn from the same distributions at any heterogeneity.

    Heterogeneity h moves variety from within sessions to between them: with probability h an utterance has its
    session's own room, noise and channel, and a speaker the session's own accent, voice family and rate; with 1 - h a
    draw of its own. A session's own topic has .95 h of its sentences, the rest are of all topics alike. At h = 0
    sessions are i.i.d. Within a split the sessions' own conditions, topics, accents, families and rates cover their
    ranges evenly.

    Args:
        sessions: how many of each split.
        minutes: of training audio in all sessions together, at least.
        words: of each of the other splits in all of its sessions together, at least.
        heterogeneity: h, in [0, 1].
        imbalance: how many times the longest training session is as long as the shortest; those between, geometrically.
        speakers: of each session.
        seed: of everything.
    """
    for name, value, good in (
        ("heterogeneity", heterogeneity, 0 <= heterogeneity <= 1),
        ("imbalance", imbalance, imbalance >= 1),
        ("speakers", speakers, speakers >= 1),
        ("minutes", minutes, minutes > 0),
        ("words", words, words >= 1),
        *((f"{split}_sessions", sessions[split], sessions[split] >= 1) for split in SPLITS),
    ):
        if not good:
            raise UserError(f"the corpus' {name} is {value}: heterogeneity lies in [0, 1], all others are at least 1.")
    rng = np.random.default_rng(derive_seed(seed, "sessions"))
    shares = np.geomspace(imbalance, 1, sessions["train"])
    shares *= 60 * minutes / shares.sum()
    timbres = {family: _in_turn(rng, names) for family, names in FAMILIES.items()}
    known: set[Voice] = set()
    plans: list[SessionPlan] = []
    for split in SPLITS:
        conditions, styles = draw_conditions(rng, sessions[split]), _draw_styles(rng, sessions[split])
        own_topics = _each_as_often(rng, list(TOPICS), sessions[split])
        for k in range(sessions[split]):
            number = len(plans) + 1
            share = heterogeneity * MAIN_TOPIC
            name = f"S{number:02d}"
            plans.append(
                SessionPlan(
                    name=name,
                    split=split,
                    seconds=float(shares[k]) if split == "train" else 0.0,
                    words=0 if split == "train" else -(-words // sessions[split]),
                    topics=tuple(share * (topic == own_topics[k]) + (1 - share) / len(TOPICS) for topic in TOPICS),
                    speakers=_speakers(name, speakers, timbres, styles[k], heterogeneity, known, rng),
                    own=conditions[k],
                    heterogeneity=heterogeneity,
                    seed=derive_seed(seed, "session", number),
                )
            )
    return plans


def draw_conditions(rng: np.random.Generator, count: int = 1) -> list[Conditions]:
    """Rooms, noises and channels; together they cover each range evenly, so that few sessions stand for many."""
    seconds, snr = _spread(rng, 0.2, 0.7, count), _spread(rng, *SNR, count)
    low, high = _spread(rng, 50, 400, count), _spread(rng, 2500, 7600, count)
    return [Conditions(*each) for each in zip(seconds, _each_as_often(rng, NOISES, count), snr, low, high, strict=True)]


def _spread(rng: np.random.Generator, low: float, high: float, count: int) -> list[float]:
    """One uniform draw from each of ``count`` equal parts of the range, in random order."""
    return [float(low + (high - low) * share) for share in (rng.permutation(count) + rng.random(count)) / count]


def _each_as_often(rng: np.random.Generator, names: Sequence[str], count: int) -> list[str]:
    """``count`` names, each as often as any other as far as that goes, in random order."""
    return [str(name) for name in rng.permutation(np.resize(rng.permutation(names), count))]


def _draw_styles(rng: np.random.Generator, count: int) -> list[tuple[str, str, float]]:
    """Accents, voice families and rates in words a minute, evenly."""
    accents, families = _each_as_often(rng, ACCENTS, count), _each_as_often(rng, list(FAMILIES), count)
    return list(zip(accents, families, _spread(rng, 130, 220, count), strict=True))


def _in_turn(rng: np.random.Generator, names: Sequence[str]) -> Iterator[str]:
    """All names in random order, and whenever all have come, in another."""
    while True:
        yield from (str(name) for name in rng.permutation(names))


def _speakers(session: str, count: int, timbres: dict[str, Iterator[str]], own: tuple[str, str, float],
              heterogeneity: float, known: set[Voice], rng: np.random.Generator) -> tuple[Speaker, ...]:  # fmt: skip
    """Speakers of whom none is among those ``known``, to whom they are added."""
    drawn = []
    for k, other in enumerate(_draw_styles(rng, count)):
        accent, family, rate = own if rng.random() < heterogeneity else other
        name, voice = f"{accent}+{next(timbres[family])}", None
        while voice is None or voice in known:
            voice = name, int(rng.uniform(30, 70)), int(rng.uniform(88, 114))
        known.add(voice)
        rate *= rng.uniform(0.95, 1.05)
        drawn.append(Speaker(f"{session}-{k + 1}", name, voice[1], int(rate), voice[2]))
    return tuple(drawn)
