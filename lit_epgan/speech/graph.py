"""The decoding graph: HMM states, phones, words and a tri-gram grammar composed into one transducer."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_epgan.speech.hmm import SELF_LOOP_SCALE, PhoneModels
from lit_epgan.speech.lexicon import Lexicon
from lit_epgan.speech.packages import silenced, speech_package

ORDER = 3


def grammar(lexicon: Lexicon, texts: Sequence[str]) -> Any:
    """G: an acceptor of words, weighted by a tri-gram model of ``texts`` with Kneser-Ney smoothing."""
    kaldifst, kaldilm = speech_package("kaldifst"), speech_package("kaldilm")
    with tempfile.TemporaryDirectory() as name, silenced():
        folder = Path(name)
        (folder / "text").write_text("\n".join(" ".join(lexicon.known(text)) for text in texts) + "\n")
        (folder / "words").write_text("".join(f"{word} {i}\n" for word, i in lexicon.words.items()))
        speech_package("kaldingram.train").main(
            ["--ngram-order", str(ORDER), "--text", str(folder / "text"), "--lm", str(folder / "arpa")]
        )
        text = kaldilm.arpa2fst(
            str(folder / "arpa"), disambig_symbol="#0", read_symbol_table=str(folder / "words"), max_order=ORDER
        )
    fst = kaldifst.compile(text, acceptor=False)
    kaldifst.arcsort(fst, "ilabel")
    return fst


def decoding_graph(lexicon: Lexicon, phones: PhoneModels, texts: Sequence[str]) -> Any:
    """HCLG of a tri-gram model of ``texts`` (Mohri, Pereira and Riley 2008), every operation Kaldi's own."""
    kaldifst, khg = speech_package("kaldifst"), speech_package("kaldi_hmm_gmm")
    words = kaldifst.compose(lexicon.transducer(disambiguated=True), grammar(lexicon, texts))
    kaldifst.determinize_star(words, use_log=True)
    kaldifst.minimize_encoded(words)
    in_context, labels = kaldifst.compose_context(lexicon.disambiguation, 1, 0, words)
    kaldifst.arcsort(in_context, "ilabel")
    states, hashes = khg.get_h_transducer(labels, phones.tree, phones.transitions, khg.HTransducerConfig(1.0))
    graph = kaldifst.compose(states, in_context)
    kaldifst.determinize_star(graph, use_log=True)
    _to_epsilon(graph, set(hashes))
    kaldifst.minimize_encoded(graph)
    return khg.add_self_loops(
        self_loop_scale=SELF_LOOP_SCALE, disambig_syms=[], reorder=True, trans_model=phones.transitions, ifst=graph
    )


def _to_epsilon(graph: Any, symbols: set[int]) -> None:
    """Let input ``symbols`` be epsilon, in place."""
    kaldifst = speech_package("kaldifst")
    for state in kaldifst.StateIterator(graph):
        arcs = [(arc.ilabel, arc.olabel, arc.weight.value, arc.nextstate) for arc in kaldifst.ArcIterator(graph, state)]
        if not any(arc[0] in symbols for arc in arcs):
            continue
        graph.delete_arcs(state, len(arcs))
        for phone, word, cost, target in arcs:
            graph.add_arc(state, kaldifst.StdArc(0 if phone in symbols else phone, word, cost, target))
