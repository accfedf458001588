"""What is different from session to session: speakers, room, noise, channel, speaking rate, topics, length."""

from dataclasses import dataclass
from itertools import cycle
from typing import Literal

import numpy as np

from lit_epgan.errors import UserError
from lit_epgan.randomness import derive_seed
from lit_epgan.speech.sentences import TOPICS

Split = Literal["train", "dev", "eval"]
SPLITS: tuple[Split, ...] = ("train", "dev", "eval")

ACCENTS = ("en-us", "en", "en-gb-scotland", "en-029", "en-gb-x-gbclan", "en-us-nyc", "en-gb-x-rp", "en-gb-x-gbcwmd")
NOISES = ("white", "pink", "hum", "babble")
FEMALE = "f1 f2 f3 f4 f5 Alicia Andrea Annie anika aunty belinda grandma linda sandro shelby steph steph2 steph3 "
MALE = (
    "m1 m2 m3 m4 m5 m6 m7 m8 Alex Andy Denis Diogo Gene Henrique Hugo Jacky Lee Marco Mario Michael Mike adam antonio "
    "benjamin boris caleb david ed edward grandpa gustave ian iven iven2 john marcelo max michel miguel norbert pablo "
    "paul pedro quincy rob robert travis victor zac"
)
FAMILIES = {"female": FEMALE.split(), "male": MALE.split()}


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
    """

    name: str
    voice: str
    pitch: int
    rate: int


@dataclass(frozen=True)
class SessionPlan:
    """A session before it is spoken.

    Attributes:
        name, split: which one.
        seconds, words: as long as it has fewer of either, one more sentence is spoken.
        topics: probabilities of the topics of ``sentences.TOPICS``.
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
    speakers: int = 4,
    seed: int = 0,
) -> list[SessionPlan]:
    """Sessions whose speakers, conditions and topics are drawn from the same distributions at any heterogeneity.

    Heterogeneity h moves variety from within sessions to between them: with probability h an utterance has its
    session's own room, noise and channel, and a speaker the session's own accent, voice family and rate; with 1 - h a
    draw of its own. Topics are h times the own mix and 1 - h times the uniform one. At h = 0 sessions are i.i.d.

    Args:
        sessions: how many of each split.
        minutes: of training audio in all sessions together, at least.
        words: of each of the other splits in all of its sessions together, at least.
        heterogeneity: h, in [0, 1].
        imbalance: how many times the longest training session is as long as the shortest; those between, geometrically.
        speakers: of each session.
        seed: of everything.

    Raises:
        UserError: an argument that cannot be; the message names it.
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
    variants = _variants_of_splits(rng)
    plans: list[SessionPlan] = []
    for split in SPLITS:
        pools = {family: cycle(names) for family, names in variants[split].items()}
        for k in range(sessions[split]):
            number = len(plans) + 1
            uniform = np.full(len(TOPICS), 1 / len(TOPICS))
            topics = heterogeneity * rng.dirichlet(0.3 * np.ones(len(TOPICS))) + (1 - heterogeneity) * uniform
            name = f"S{number:02d}"
            plans.append(
                SessionPlan(
                    name=name,
                    split=split,
                    seconds=float(shares[k]) if split == "train" else 0.0,
                    words=0 if split == "train" else -(-words // sessions[split]),
                    topics=tuple(float(p) for p in topics),
                    speakers=_speakers(name, speakers, pools, heterogeneity, rng),
                    own=draw_conditions(rng),
                    heterogeneity=heterogeneity,
                    seed=derive_seed(seed, "session", number),
                )
            )
    return plans


def draw_conditions(rng: np.random.Generator) -> Conditions:
    """A room, a noise and a channel."""
    return Conditions(
        reverberation=float(rng.uniform(0.2, 0.8)),
        noise=str(rng.choice(NOISES)),
        snr=float(rng.uniform(-2, 14)),
        low=float(rng.uniform(50, 400)),
        high=float(rng.uniform(2200, 7600)),
    )


def _variants_of_splits(rng: np.random.Generator) -> dict[Split, dict[str, list[str]]]:
    """Variants by split and family: nobody who trains is heard in development or evaluation."""
    dealt: dict[Split, dict[str, list[str]]] = {split: {} for split in SPLITS}
    for family, names in FAMILIES.items():
        shuffled = [str(name) for name in rng.permutation(names)]
        fifth = len(shuffled) // 5
        dealt["dev"][family], dealt["eval"][family] = shuffled[:fifth], shuffled[fifth : 2 * fifth]
        dealt["train"][family] = shuffled[2 * fifth :]
    return dealt


def _speakers(
    session: str, count: int, pools: dict[str, cycle], heterogeneity: float, rng: np.random.Generator
) -> tuple[Speaker, ...]:
    own = (str(rng.choice(ACCENTS)), str(rng.choice(list(FAMILIES))), float(rng.uniform(130, 220)))
    drawn = []
    for k in range(count):
        other = (str(rng.choice(ACCENTS)), str(rng.choice(list(FAMILIES))), float(rng.uniform(130, 220)))
        accent, family, rate = own if rng.random() < heterogeneity else other
        voice = f"{accent}+{next(pools[family])}"
        drawn.append(
            Speaker(f"{session}-{k + 1}", voice, int(rng.integers(30, 70)), int(rate * rng.uniform(0.95, 1.05)))
        )
    return tuple(drawn)
