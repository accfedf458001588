"""Hidden Markov models of phones, as Kaldi has them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_epgan.speech.lexicon import PHONES
from lit_epgan.speech.packages import speech_package

STATES = 3  # of a phone
PDFS = STATES * len(PHONES)
SELF_LOOP_SCALE = 0.1  # of the log probabilities of staying in a state, while aligning and decoding; Kaldi's recipes'


@dataclass
class PhoneModels:
    """Three states from left to right for each phone, each with a probability density (pdf) of its own.

    Attributes:
        tree: Kaldi's map from phone and state to pdf.
        transitions: Kaldi's transition model.
        counts: how often each transition was taken when they were learnt (number of transitions + 1,); what to keep.
    """

    tree: Any
    transitions: Any
    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @cached_property
    def pdfs(self) -> NDArray[np.int64]:
        """The pdf of transition 1, 2, ...; transitions number from 1."""
        count = self.transitions.num_transition_ids
        return np.array([self.transitions.transition_id_to_pdf(t) for t in range(1, count + 1)])

    def learn(self, counts: NDArray[np.float64]) -> None:
        """Transition probabilities from how often each transition was taken (number of transitions + 1,)."""
        self.counts = counts
        self.transitions.mle_update(counts, speech_package("kaldi_hmm_gmm").MleTransitionUpdateConfig())

    def decodable(self, scores: NDArray[np.float32]) -> Any:
        """What Kaldi's decoders read: log scores (frames, pdfs) of every frame under every pdf."""
        columns = np.ascontiguousarray(scores[:, self.pdfs], dtype=np.float32)
        return speech_package("kaldi_hmm_gmm").DecodableCtc(columns)  # reads column transition - 1


def phone_models() -> PhoneModels:
    """Phone models with the initial probabilities of a loop, 3/4."""
    khg = speech_package("kaldi_hmm_gmm")
    states = " ".join(
        f"<State> {i} <PdfClass> {i} <Transition> {i} 0.75 <Transition> {i + 1} 0.25 </State>" for i in range(STATES)
    )
    phones = " ".join(str(i) for i in range(1, len(PHONES) + 1))
    topology = khg.HmmTopology()
    topology.read(
        f"<Topology> <TopologyEntry> <ForPhones> {phones} </ForPhones> {states} "
        f"<State> {STATES} </State> </TopologyEntry> </Topology>"
    )
    tree = khg.monophone_context_dependency(topology.phones, topology.get_phone_to_num_pdf_classes())
    return PhoneModels(tree, khg.TransitionModel(tree, topology))
