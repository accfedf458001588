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
WHOLE = 0.9  # share of the seconds said that a file must hold; else it was cut, and its text is not all there
OnError = Literal["refuse", "skip"]


def read_audio(recording: Recording) -> NDArray[np.float64]:
    """Samples (n,) of the recording's part of its file: first channel, 16 kHz.

    Raises:
        UserError: names the file that is not there, cannot be read, was cut, is too short or silent, or is not a number
            somewhere.
    """
    soundfile = speech_package("soundfile")
    if not recording.audio.is_file():
        raise UserError(f"{recording.audio} is not there")
    try:
        with soundfile.SoundFile(recording.audio) as file:
            file.seek(min(round(recording.start * file.samplerate), file.frames))
            samples = file.read(round(recording.seconds * file.samplerate), dtype="float64", always_2d=True)[:, 0]
            rate = file.samplerate
    except (soundfile.LibsndfileError, RuntimeError, OSError) as error:
        raise UserError(f"{recording.audio} cannot be read as audio ({error})") from error
    held = len(samples) / rate
    if held < WHOLE * recording.seconds:
        where = f"{recording.seconds:.2f} s of sound from {recording.start:.2f} s on"
        raise UserError(f"{recording.audio} holds {held:.2f} of {where}")
    if held < SHORTEST:
        raise UserError(f"{recording.audio} from {recording.start:.2f} s on is shorter than {SHORTEST} s")
    if not np.isfinite(samples).all():
        raise UserError(f"{recording.audio} holds samples that are no numbers")
    if samples.std() == 0:
        raise UserError(f"{recording.audio} holds nothing but silence in its first channel")
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
                hint = "mend or remove it, or set --data.on_error skip to leave such audio out."
                raise UserError(f"{error}: {hint}") from error
            skipped.append(str(error))
            continue
        yield recording, samples
