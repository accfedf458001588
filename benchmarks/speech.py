"""Real-time factors of the speech chain: seconds of one core for a second of audio.

OMP_NUM_THREADS=1 python benchmarks/speech.py --output benchmarks/results/speech.md
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from side_by_side import markdown, options, publish

from callbacks.word_error_rate import log_posteriors
from datamodules.speech import SpeechDataModule
from lit_epgan.acoustic import AcousticModel
from lit_epgan.networks.acoustic import SRUAcousticNetwork
from lit_epgan.speech.audio import read_audio
from lit_epgan.speech.features import log_mel
from lit_epgan.speech.hmm import PDFS


def seconds(run: Callable[[], object]) -> float:
    """Of this process, so that other load on the machine does not count."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training audio")
    parser.add_argument("--words", type=int, default=200, help="that are decoded")
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        sessions = {"train_sessions": 4, "dev_sessions": 1, "eval_sessions": 2}
        data = SpeechDataModule(
            **sessions, minutes=args.minutes, words=args.words, iterations=12, cache_dir=folder, workers=1
        )
        prepare = seconds(data.prepare_data)
        every = sum(u.recording.seconds for split in ("train", "dev", "eval") for u in data.utterances(split))
        utterances = data.utterances("eval")
        audio = sum(u.recording.seconds for u in utterances)
        samples = [read_audio(u.recording) for u in utterances]
        model = AcousticModel(SRUAcousticNetwork(hidden=args.hidden))
        decoder = data.decoder
        # as a trained network's: nine tenths on the aligned state, the rest on all others
        sure = [np.full((len(u.mel), PDFS), np.log(0.1 / PDFS), np.float32) for u in utterances]
        for scores, utterance in zip(sure, utterances, strict=True):
            scores[np.arange(len(scores)), utterance.pdfs.clamp_min(0).numpy()] = np.log(0.9)
        rows = [
            ["everything before training, from synthesis to graph", every, prepare],
            ["log-mel features", audio, seconds(lambda: [log_mel(each) for each in samples])],
            ["acoustic model", audio, seconds(lambda: log_posteriors(model, utterances))],
            ["decoding, sure posteriors", audio, seconds(lambda: [decoder.words(each, 0.2) for each in sure])],
            ["decoding, Gaussian mixtures", audio, seconds(lambda: data.prepared.errors_of_mixtures("eval", 0.1))],
        ]
        size = decoder.graph.num_states
    cells = [[name, f"{length:.0f}", f"{spent:.1f}", f"**{spent / length:.4f}**"] for name, length, spent in rows]
    notes = (
        f"{Path(__file__).name}: {args.minutes:g} minutes of training audio, SRU of 4 x {args.hidden}, "
        f"a graph of {size:,} states; the process's own time."
    )
    header = ["", "audio, s", "computing, s", "real-time factor"]
    publish(markdown("Real-time factors of the speech chain", header, cells, notes), args.output)


if __name__ == "__main__":
    main()
