"""From frames' scores to words: beam search over a lattice through the decoding graph."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lit_epgan.errors import UserError
from lit_epgan.speech.features import Frames
from lit_epgan.speech.gmm import Mixtures
from lit_epgan.speech.hmm import PhoneModels
from lit_epgan.speech.lexicon import Lexicon
from lit_epgan.speech.packages import speech_package


@dataclass
class Decoder:
    """What stands between scores of HMM states and words.

    Attributes:
        graph: HCLG.
        phones, lexicon: what it is made of.
        log_prior: log p(pdf), (pdfs,), from how often each was aligned.
        beam, max_active: of the search; a poor model's scores are flat, and without a bound it would take minutes.
    """

    graph: Any
    phones: PhoneModels
    lexicon: Lexicon
    log_prior: NDArray[np.float64]
    beam: float = 9.0
    max_active: int = 600
    _names: dict[int, str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = {number: word for word, number in self.lexicon.words.items()}
        khg = speech_package("kaldi_hmm_gmm")
        config = khg.LatticeFasterDecoderConfig(
            beam=self.beam, max_active=self.max_active, lattice_beam=2.0, determinize_lattice=False
        )
        self._decoder = khg.LatticeFasterDecoder(self.graph, config)

    def words(self, log_posteriors: NDArray, scale: float) -> str:
        """The best words of one utterance under a hybrid model.

        A network's posterior becomes a likelihood, up to a factor, by Bayes' rule (Bourlard and Morgan 1994):
        log p(x | pdf) = log p(pdf | x) - log p(pdf) + constant.

        Args:
            log_posteriors: log p(pdf | x), float (frames, pdfs).
            scale: factor of the log likelihoods, which the grammar's are weighed against.

        Raises:
            UserError: a posterior is no number.
        """
        if np.isnan(log_posteriors).any():
            raise UserError("the network's posteriors are no numbers: its training has diverged; lower model.lr.")
        return self._best(self.phones.decodable((scale * (log_posteriors - self.log_prior)).astype(np.float32)))

    def words_of_mixtures(self, mixtures: Mixtures, cepstra: Frames, scale: float) -> str:
        """The best words of one utterance under Gaussian mixtures; its cepstra are (frames, 39)."""
        return self._best(mixtures.decodable(cepstra, self.phones, scale))

    def _best(self, decodable: Any) -> str:
        khg = speech_package("kaldi_hmm_gmm")
        found, _, words, _ = khg.decode_utterance_lattice_faster(
            self._decoder, decodable, self.phones.transitions, "", True
        )
        return " ".join(self._names[word] for word in words) if found else ""


def log_prior(alignments: Iterable[NDArray[np.int64]], pdfs: int) -> NDArray[np.float64]:
    """log p(pdf) (pdfs,) of all clients' alignments, each pdf seen once more than it was."""
    counts = np.ones(pdfs)
    for alignment in alignments:
        counts += np.bincount(alignment, minlength=pdfs)
    return np.log(counts / counts.sum())
