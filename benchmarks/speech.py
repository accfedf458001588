"""Real-time factors of the speech chain: seconds of one core for a second of audio.

OMP_NUM_THREADS=1 python benchmarks/speech.py --output benchmarks/results/speech.md
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import markdown, options, publish

from lit_epgan.callbacks.word_error_rate import log_posteriors
from lit_epgan.datamodules.speech import SpeechDataModule
from lit_epgan.modules.acoustic_model import AcousticModel, cross_entropy
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from lit_epgan.speech.corpora import read_audio
from lit_epgan.speech.decoding import total, word_errors
from lit_epgan.speech.frames import log_mel


def seconds(run: Callable[[], object]) -> float:
    """On the clock: sessions are spoken by processes of their own, whose time is not this process'."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def trained(model: AcousticModel, data: SpeechDataModule, steps: int) -> AcousticModel:
    """The acoustic model after some steps on all sessions: how long a search takes depends on how sure scores are."""
    data.setup()
    chunks = data.data.train["all"]
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(steps):
        x, states = chunks.fetch(torch.randint(len(chunks), (64,)).tolist())
        optimizer.zero_grad()
        cross_entropy(model.scores(x), states).backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training audio")
    parser.add_argument("--words", type=int, default=200, help="that are decoded")
    parser.add_argument("--steps", type=int, default=300, help="of training, before it is decoded")
    parser.add_argument("--hidden", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        sessions = {"train_sessions": 4, "dev_sessions": 1, "eval_sessions": 2}
        data = SpeechDataModule(
            **sessions,
            partition="pooled",
            minutes=args.minutes,
            words=args.words,
            iterations=12,
            cache_dir=folder,
            workers=1,
        )
        prepare = seconds(data.prepare_data)
        every = sum(u.recording.seconds for split in ("train", "dev", "eval") for u in data.utterances(split))
        utterances = data.utterances("eval")
        audio = sum(u.recording.seconds for u in utterances)
        samples = [read_audio(u.recording) for u in utterances]
        model = trained(AcousticModel(SRUAcousticNetwork(hidden=args.hidden)), data, args.steps)
        decoder, scores = data.decoder, log_posteriors(model, utterances)
        rows = [
            ["everything before training, from synthesis to graph", every, prepare],
            ["log-mel features", audio, seconds(lambda: [log_mel(each) for each in samples])],
            ["acoustic model", audio, seconds(lambda: log_posteriors(model, utterances))],
            ["decoding, acoustic model", audio, seconds(lambda: [decoder.words(each, 0.15) for each in scores])],
            ["decoding, Gaussian mixtures", audio, seconds(lambda: data.prepared.errors_of_mixtures("eval", 0.1))],
        ]
        errors = total(
            [word_errors(u.recording.text, decoder.words(x, 0.15)) for u, x in zip(utterances, scores, strict=True)]
        )
        size = decoder.graph.num_states
    cells = [[name, f"{length:.0f}", f"{spent:.1f}", f"**{spent / length:.4f}**"] for name, length, spent in rows]
    notes = (
        f"{Path(__file__).name}: {args.minutes:g} minutes of training audio, SRU of 4 x {args.hidden}, "
        f"{args.steps} steps in batches of 64, then {errors.rate:.0f} % word errors; a graph of {size:,} states."
    )
    header = ["", "audio, s", "computing, s", "real-time factor"]
    publish(markdown("Real-time factors of the speech chain", header, cells, notes), args.output)


if __name__ == "__main__":
    main()
