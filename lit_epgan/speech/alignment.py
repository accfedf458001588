"""Which HMM state each frame belongs to: flat start, Viterbi training, alignment. No audio leaves its client."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from lit_epgan.errors import UserError
from lit_epgan.speech.features import Frames
from lit_epgan.speech.gmm import Mixtures
from lit_epgan.speech.hmm import PDFS, SELF_LOOP_SCALE, PhoneModels
from lit_epgan.speech.lexicon import Lexicon
from lit_epgan.speech.packages import speech_package

ACOUSTIC_SCALE = 0.1  # Kaldi's recipes'
RETRY_BEAM = 4  # times the beam
SETTLING = 6  # iterations at the end in which no Gaussian is split
FEWEST = SETTLING + 2  # iterations with which any is
REALIGN = (1, 2, 3, 4, 6, 8, 10, 12)  # iterations, as in Kaldi's recipes; after them every third


@dataclass
class AlignedClient:
    """One client's cepstra and what is said, with the alignments that never leave it.

    Attributes:
        cepstra: (frames, 39) of each utterance.
        graphs: the training graph of each utterance's words.
        alignments: the transition of each frame; empty where no path was found.
    """

    cepstra: Sequence[Frames]
    graphs: Sequence[Any]
    alignments: list[list[int]] = field(default_factory=list)

    def align_equally(self) -> None:
        """Each utterance's states share its frames equally."""
        kaldifst = speech_package("kaldifst")
        self.alignments = []
        for number, (graph, x) in enumerate(zip(self.graphs, self.cepstra, strict=True)):
            found, path = kaldifst.equal_align(graph, len(x), number + 1, 10)
            self.alignments.append(list(kaldifst.get_linear_symbol_sequence(path)[1]) if found else [])

    def align(self, mixtures: Mixtures, phones: PhoneModels, beam: float = 10.0) -> None:
        """The best path of each utterance; one that fails keeps the alignment it had."""
        paths = [
            aligned(graph, mixtures.decodable(x, phones, ACOUSTIC_SCALE), phones, beam)
            for graph, x in zip(self.graphs, self.cepstra, strict=True)
        ]
        before = self.alignments or [[] for _ in paths]
        self.alignments = [path or old for path, old in zip(paths, before, strict=True)]


def aligned(graph: Any, decodable: Any, phones: PhoneModels, beam: float = 10.0) -> list[int]:
    """The transitions of the best path through a training graph; empty if none was found."""
    khg = speech_package("kaldi_hmm_gmm")
    weighted = graph.copy()  # the probabilities are added in place
    khg.add_transition_probs(
        trans_model=phones.transitions,
        disambig_syms=[],
        transition_scale=1.0,
        self_loop_scale=SELF_LOOP_SCALE,
        fst=weighted,
    )
    config = khg.AlignConfig(beam, RETRY_BEAM * beam, False)
    result = khg.align_utterance_wrapper(config, "", ACOUSTIC_SCALE, weighted, decodable, 0, 0, 0, 0.0, 0)
    return list(result[5])


def training_graphs(lexicon: Lexicon, phones: PhoneModels, texts: Sequence[str]) -> list[Any]:
    """The graph of all state sequences of each text."""
    khg = speech_package("kaldi_hmm_gmm")
    options = khg.TrainingGraphCompilerOptions(0.0, 0.0, True)
    plain = lexicon.transducer(disambiguated=False)
    compiler = khg.TrainingGraphCompiler(phones.transitions, phones.tree, plain, lexicon.disambiguation, options)
    return [compiler.compile_graph_from_text(lexicon.numbers(text)) for text in texts]


def train_mixtures(
    clients: Sequence[AlignedClient], phones: PhoneModels, iterations: int = 24, gaussians: int = 1000
) -> Mixtures:
    """Viterbi training from a flat start; what leaves a client are sums.

    In each iteration every client aligns its own audio (at first often, later seldom), takes its
    statistics and forgets nothing; the server adds them up, updates mixtures and transition probabilities, and until
    six iterations before the end splits Gaussians.

    Args:
        clients: they end with the alignments of the last iteration that made them anew.
        phones: learns its transition probabilities.
        iterations: of expectation and maximisation.
        gaussians: that all mixtures together grow towards, as far as there are iterations: of 1,000 they reach 951
            in 24 iterations.

    Raises:
        UserError: no utterance could be aligned.
    """
    mixtures = flat_start(clients)
    for client in clients:
        client.align_equally()
    growing = max(1, iterations - SETTLING)
    for iteration in range(iterations):
        if iteration in REALIGN or (iteration > max(REALIGN) and iteration % 3 == 0):
            for client in clients:
                client.align(mixtures, phones)
        reports = [mixtures.statistics(list(c.cepstra), c.alignments, phones) for c in clients]
        total = reduce(add, reports)
        if total.frames == 0:
            raise UserError("no utterance could be aligned with its text: check that texts and audio belong together.")
        phones.learn(total.transitions)
        wanted = PDFS + (gaussians - PDFS) * iteration // growing
        mixtures.learn(total, max(PDFS, wanted) if iteration < growing else None)
    return mixtures


def flat_start(clients: Sequence[AlignedClient]) -> Mixtures:
    """One Gaussian everywhere: mean and variance of all frames, from sums over clients."""
    n = sum(len(x) for client in clients for x in client.cepstra)
    first = sum(x.sum(0, dtype=np.float64) for client in clients for x in client.cepstra)
    second = sum((x.astype(np.float64) ** 2).sum(0) for client in clients for x in client.cepstra)
    mean = np.asarray(first / n)
    return Mixtures(mean, np.asarray(second / n) - mean**2)
