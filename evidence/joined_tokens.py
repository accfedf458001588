"""The fault of Augenstein et al. 2020, section 5, by its own method: first tokens joined, found by two language models.

Users are the modules of Python's standard library. Vocabularies are the most frequent words of their text before the
fault. A word model learns sentences, and what it makes is outside the vocabulary more often at the place of the fault;
its vocabulary has 2,000 words, which leave as many words outside as the paper's does (7 %). A character model learns
the words outside a vocabulary of 10,000 words, the paper's, and what it makes shows what they are. As in the paper 10
users take part in a round with z = 0.01, which is a simulation and no guarantee.

OMP_NUM_THREADS=1 python -m evidence.joined_tokens --seeds 5 --output evidence/results/joined_tokens.md
"""

import multiprocessing
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.datamodules.clients import index_batches
from lit_epgan.datamodules.text import TokenSequences, docstrings, with_joined
from lit_epgan.engine.plain_loop import PlainFederation
from lit_epgan.engine.samplers import FixedSize
from lit_epgan.federated import FedAvgM
from lit_epgan.inspection.words_view import is_joined, joined_share, words_outside
from lit_epgan.lib.randomness import generator_for, seed_streams
from lit_epgan.lib.symbols import ByteSymbols, WordSymbols, most_frequent
from lit_epgan.modules import LanguageModel
from lit_epgan.networks import CIFGLanguageNetwork
from lit_epgan.privacy import CentralNoise, Releases, spent

VOCABULARY = {"words": 2000, "characters": 10_000}
COHORT, Z, MADE = 10, 0.01, 2000
SHARES = (0.0, 0.01, 0.1, 1.0)
PLACES = 5  # of a sentence, that are shown
POPULATION = 342_777  # the paper's users, for the scaled-up scenario


def simulated(clients: int) -> float:
    """The paper's noise multiplier, whatever the number of users."""
    return Z


def trained(
    kind: str, share: float, rounds: int, seed: int, noise: Callable[[int], float] = simulated
) -> dict[str, Any]:
    """One model, trained under the fault in a share of the sentences, and what it makes.

    ``noise`` gives the noise multiplier for the number of users who hold words of the kind.
    """
    started = time.process_time()
    torch.set_num_threads(1)
    users = docstrings(Path(sysconfig.get_paths()["stdlib"]))
    words = WordSymbols(most_frequent((s for own in users.values() for s in own), VOCABULARY[kind]))
    faulty = {name: with_joined(own, share, generator_for(seed, name)) for name, own in users.items()}
    seed_streams(seed)
    if kind == "characters":
        symbols: Any = ByteSymbols()
        rows = [[symbols.encode(w) for w in words_outside(own, words)] for own in faulty.values()]
        network, bound, longest = CIFGLanguageNetwork(258, 24, 128), 0.1, 20
    else:
        symbols = words
        rows = [[symbols.encode(sentence) for sentence in own] for own in faulty.values()]
        network, bound, longest = CIFGLanguageNetwork(len(words), 32, 64), 0.2, 20
    clients = [TokenSequences(own, len(symbols) - 2, len(symbols) - 1, longest) for own in rows if own]

    def batches(client: int, round_: int) -> Iterator[Any]:
        own = clients[client]
        return map(own.fetch, islice(index_batches(len(own), 16, None, 1, seed, round_, client), 8))

    federation = PlainFederation(
        FedAvgM(momentum=0.9),
        LanguageModel(network),
        lambda model, batch: model.training_step(batch, 0),
        lambda parameters: torch.optim.SGD(parameters, lr=0.5),
        batches,
        [float(len(own)) for own in clients],
        seed=seed,
        sampler=FixedSize(COHORT),
        mechanism=CentralNoise(bound, noise(len(clients)), noise_seed=seed),
    )
    federation.run(rounds)
    made = [symbols.decode(row) for row in network_samples(network, longest, seed)]
    result: dict[str, Any] = {"kind": kind, "share": share, "seed": seed, "clients": len(clients), "rounds": rounds}
    if kind == "characters":
        held = [word for own in faulty.values() for word in words_outside(own, words)]
        ranked = LanguageModel(network).most_probable(20, longest)
        top = [symbols.decode(row) for row in ranked.sequences]
        result |= {"made": joined_share(made), "held": sum(map(is_joined, held)) / len(held), "top": top}
    else:
        sentences = [s for own in faulty.values() for s in own]
        result |= {"made": outside_by_place(made, "UNK"), "held": outside_by_place(
            [symbols.decode(symbols.encode(s)) for s in sentences], "UNK")}  # fmt: skip
    return result | {"seconds": time.process_time() - started}


@torch.no_grad()
def network_samples(network: CIFGLanguageNetwork, longest: int, seed: int) -> list[list[int]]:
    return LanguageModel(network).sample(MADE, longest, generator_for(seed, "made"))


def outside_by_place(sentences: list[list[str]], unknown: str) -> list[float]:
    """The share of sentences whose word at a place is outside the vocabulary, among those that reach it."""
    shares = []
    for place in range(PLACES):
        there = [sentence[place] == unknown for sentence in sentences if len(sentence) > place]
        shares.append(sum(there) / max(1, len(there)))
    return shares


def percent(share: float) -> str:
    return f"{100 * share:.1f}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=600, help="of the character model")
    parser.add_argument("--word-rounds", type=int, default=80, help="of the word model")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    started = time.time()
    docstrings(Path(sysconfig.get_paths()["stdlib"]))  # once, before the processes part
    jobs = [(kind, share, rounds, seed) for seed in range(args.seeds) for share in SHARES
            for kind, rounds in (("words", args.word_rounds), ("characters", args.rounds))]  # fmt: skip
    with multiprocessing.get_context("fork").Pool(2) as pool:
        results = pool.starmap(trained, jobs, chunksize=1)
    minutes = (time.time() - started) / 60
    cpu = sum(each["seconds"] for each in results) / 60
    table = character_table(results) + "\n" + word_table(results)
    table += (
        f"\n## What it costs\n\nAll runs took {minutes:.1f} minutes by the clock in two processes on two cores, "
        f"{cpu:.1f} minutes of computing.\n\n" + prices(results)
    )
    publish(table, args.output)


def character_table(results: list[dict[str, Any]]) -> str:
    rows = []
    for each in results:
        if each["kind"] == "characters":
            made, top = each["made"], each["top"]
            shown = ", ".join(f"`{word}`" for word in top[:6])
            rows.append(
                [percent(each["share"]), each["seed"], each["clients"], percent(each["held"]),
                 f"{percent(made.share)} ({percent(made.low)} - {percent(made.high)})",
                 f"{sum(map(is_joined, top))} of {len(top)}", shown, f"{each['seconds']:.0f}"]
            )  # fmt: skip
    return markdown(
        "First tokens joined, by language models in the paper's simulation",
        ["sentences with the fault, %", "seed", "users", "of the users' words outside the vocabulary joined, %",
         "of 2,000 made by the character model, % (95 %)", "of its 20 most probable", "the first six", "seconds"],
        rows,
        f"Character model: a CIFG-LSTM of 128 cells over 258 symbols, {results[1]['rounds']} rounds of {COHORT} users, "
        f"S = 0.1, z = {Z}, server momentum 0.9; 10,000 words. "
        "A word is joined if it holds a space. Users without a word outside the vocabulary take no part.",
    )  # fmt: skip


def word_table(results: list[dict[str, Any]]) -> str:
    rows = [[percent(each["share"]), each["seed"], what, *map(percent, each[key])]
            for each in results if each["kind"] == "words"
            for what, key in (("made by the word model", "made"), ("in the users' text", "held"))]  # fmt: skip
    header = ["sentences with the fault, %", "seed", "words outside the vocabulary, %",
              *(f"place {place + 1}" for place in range(PLACES))]  # fmt: skip
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(map(str, row))} |" for row in rows]
    return (
        f"Word model: a CIFG-LSTM of 64 cells over 2,003 symbols, {results[0]['rounds']} rounds of {COHORT} "
        f"users, S = 0.2, z = {Z}; {MADE:,} sentences made.\n\n" + "\n".join(lines) + "\n"
    )


def prices(results: list[dict[str, Any]]) -> str:
    """What the simulation guarantees, and what the scaled-up scenario would."""
    told = []
    for each in results[:2]:
        n, rounds = each["clients"], each["rounds"]
        simulated = spent([Releases(Z, rounds, "fixed", COHORT / n, n)], 1e-5)
        factor = round(1 / Z)
        scaled = spent([Releases(1.0, rounds, "fixed", factor * COHORT / POPULATION, POPULATION)], POPULATION**-1.1)
        told.append(
            f"- {each['kind']}: the simulation as it is, {COHORT} of {n} users a round, {rounds} rounds, z = {Z}: "
            f"{simulated}. No protection at all. Scaled up, *not run here*: {factor * COHORT:,} of {POPULATION:,} "
            f"users a round with z = 1: {scaled}."
        )
    return "\n".join(told) + "\n"


if __name__ == "__main__":
    main()
