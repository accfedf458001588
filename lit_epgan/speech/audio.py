"""Samples from files, every file that cannot be used named."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from lit_epgan.errors import UserError
from lit_epgan.speech.espeak import RATE
from lit_epgan.speech.manifest import Recording
from lit_epgan.speech.packages import speech_package

SHORTEST = 0.1  # seconds
OnError = Literal["refuse", "skip"]


def read_audio(recording: Recording) -> NDArray[np.float64]:
    """Samples (n,) of the recording's part of its file: first channel, 16 kHz.

    Raises:
        UserError: names the file that cannot be read, is empty or is not a number somewhere.
    """
    soundfile = speech_package("soundfile")
    try:
        with soundfile.SoundFile(recording.audio) as file:
            file.seek(min(round(recording.start * file.samplerate), file.frames))
            samples = file.read(round(recording.seconds * file.samplerate), dtype="float64", always_2d=True)[:, 0]
            rate = file.samplerate
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise _unusable(recording, f"cannot be read as audio ({error})") from error
    if len(samples) < SHORTEST * rate:
        raise _unusable(recording, f"holds {len(samples) / rate:.2f} s of sound there")
    if not np.isfinite(samples).all() or samples.std() == 0:
        raise _unusable(recording, "holds nothing but silence, or what is no number")
    common = np.gcd(RATE, rate)
    return samples if rate == RATE else np.asarray(resample_poly(samples, RATE // common, rate // common))


def readable(
    recordings: Sequence[Recording], on_error: OnError, skipped: list[str]
) -> Iterator[tuple[Recording, NDArray[np.float64]]]:
    """The recordings with their samples.

    Args:
        recordings: all of them.
        on_error: ``refuse`` raises at the first that cannot be used; ``skip`` leaves it out.
        skipped: collects what was left out, a sentence each.

    Raises:
        UserError: under ``refuse``.
    """
    for recording in recordings:
        try:
            samples = read_audio(recording)
        except UserError as error:
            if on_error == "refuse":
                raise
            skipped.append(str(error))
            continue
        yield recording, samples


def _unusable(recording: Recording, reason: str) -> UserError:
    return UserError(
        f"{recording.audio} {reason}: mend or remove it, or set --data.on_error skip to leave such audio out."
    )
