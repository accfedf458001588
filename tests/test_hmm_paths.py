"""Kaldi's aligner against brute force over all paths of a small graph."""

import kaldi_hmm_gmm
import kaldifst
import numpy as np
import pytest

from lit_epgan.speech.gmm import aligned, training_graphs
from lit_epgan.speech.phones import PDFS, SELF_LOOP_SCALE, lexicon, phone_models


@pytest.mark.parametrize("seed", range(3))
def test_kaldis_aligner_finds_the_best_of_all_paths(seed):
    """The graph of "two" (T UW, silence before and after at will), ten frames: every path is enumerated."""
    phones = phone_models()
    (graph,) = training_graphs(lexicon(["two"]), phones, ["two"])
    rng = np.random.default_rng(seed)
    phones.learn(rng.uniform(1, 50, size=phones.transitions.num_transition_ids + 1))
    scores = rng.normal(scale=0.2, size=(10, PDFS)).astype(np.float32)  # no louder than the transitions
    weighted = graph.copy()
    kaldi_hmm_gmm.add_transition_probs(
        trans_model=phones.transitions,
        disambig_syms=[],
        transition_scale=1.0,
        self_loop_scale=SELF_LOOP_SCALE,
        fst=weighted,
    )

    def paths(state, frame, cost, taken):
        if frame == len(scores) and weighted.final(state).value < float("inf"):
            yield cost + weighted.final(state).value, taken
        for arc in kaldifst.ArcIterator(weighted, state):
            if arc.ilabel == 0:
                yield from paths(arc.nextstate, frame, cost + arc.weight.value, taken)
            elif frame < len(scores):
                acoustic = scores[frame, phones.pdfs[arc.ilabel - 1]]
                yield from paths(arc.nextstate, frame + 1, cost + arc.weight.value - acoustic, [*taken, arc.ilabel])

    every = sorted(paths(weighted.start, 0, 0.0, []))
    assert len(every) > 100
    assert every[1][0] - every[0][0] > 1e-4
    assert aligned(graph, phones.decodable(scores), phones, beam=1000.0) == every[0][1]
