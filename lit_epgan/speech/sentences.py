"""Sentences of everyday topics, and pools that never share one."""

import re
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from lit_epgan.randomness import derive_seed

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


def sentences(pool: Pool, mix: Sequence[float], *stream: int | str) -> Iterator[str]:
    """Different sentences of a pool, without end as long as its topics last.

    Args:
        pool: whose sentences; no other pool has any of them.
        mix: probabilities of the topics.
        stream: names the randomness.
    """
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
