"""Speech from a table of recordings: three clinics train one recogniser.  python examples/speech.py"""

from itertools import islice
from pathlib import Path

import pandas as pd
import soundfile
from lightning.pytorch import Trainer, seed_everything

from lit_epgan.callbacks import FederationCallback, WordErrorRate
from lit_epgan.datamodules import SpeechDataModule
from lit_epgan.modules import AcousticModel
from lit_epgan.networks import SRUAcousticNetwork
from lit_epgan.speech.frames import RATE
from lit_epgan.speech.sessions import TOPICS, Speaker, sentences
from lit_epgan.speech.synthesis import espeak

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
FOLDER = Path("runs/speech")
CLINICS = {  # what its recordings are for, how many there are, and two voices
    "north": ("train", 150, "en-us+f2", "en-us+m1"),
    "south": ("train", 150, "en+f3", "en+m3"),
    "islands": ("train", 75, "en-gb-scotland+f4", "en-gb-scotland+m4"),
    "pilot": ("dev", 30, "en-us+f5", "en+m5"),
    "new": ("eval", 100, "en-us+f1", "en-gb-scotland+m2"),
}


def record() -> pd.DataFrame:
    """A file for each sentence, spoken by the computer; a row for each file: who says what in it."""
    rows = []
    for clinic, (split, count, *voices) in CLINICS.items():
        (FOLDER / clinic).mkdir(parents=True, exist_ok=True)
        for number, text in enumerate(islice(sentences(split, [1 / len(TOPICS)] * len(TOPICS), clinic), count)):
            voice, audio = voices[number % 2], f"{clinic}/{number}.flac"
            samples = espeak().say(text, Speaker(voice, voice, pitch=50, rate=170, tract=100))
            soundfile.write(FOLDER / audio, samples, RATE)
            rows.append((clinic, voice, text, audio, len(samples) / RATE, split))
    return pd.DataFrame(rows, columns=["session", "speaker", "text", "audio", "seconds", "split"])


def word_errors(table: pd.DataFrame, name: str) -> float:
    """Train on the recordings of a table, and recognise those of the new clinic: the words that are wrong, in %."""
    seed_everything(0, verbose=False)
    table.to_csv(manifest := FOLDER / f"{name}.csv", index=False)
    data = SpeechDataModule(str(manifest), batch_size=32, local_epochs=1, cache_dir=str(FOLDER / "cache"))
    model = AcousticModel(SRUAcousticNetwork(data.inputs, 96, layers=2, projection=128, pdfs=data.pdfs), lr=5e-3)
    callbacks = [FederationCallback(), WordErrorRate(every_n_epochs=8)]
    trainer = Trainer(max_epochs=8, callbacks=callbacks, default_root_dir=FOLDER / name, accelerator="cpu", **QUIET)
    trainer.fit(model, data)
    return trainer.test(model, data, verbose=False)[0]["wer"]


if __name__ == "__main__":  # the data module starts processes, which import this file
    spoken = record()
    alone = word_errors(spoken.query("session == 'islands' or split != 'train'"), "alone")
    print(f"alone: {alone:.1f} % of the words are wrong, together: {word_errors(spoken, 'together'):.1f} %")
    wrong = pd.read_csv(FOLDER / "together/test/hypotheses.csv").query("errors > 0")
    print(wrong[["reference", "hypothesis"]].head(5).to_string(index=False))
