"""Speech from text: libespeak-ng, called through ctypes."""

import ctypes
import math
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.signal import resample_poly

from lit_epgan.errors import UserError
from lit_epgan.speech.packages import speech_package
from lit_epgan.speech.sessions import Speaker

RATE = 16000  # samples in a second
RETRIEVAL, UTF8, RATE_PARAMETER, PITCH_PARAMETER = 1, 1, 1, 3  # espeak's speak_lib.h
Callback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)


@lru_cache(maxsize=1)
def espeak() -> "Espeak":
    """The process's synthesiser: the library hangs if it is initialised twice."""
    return Espeak()


class Espeak:
    """The synthesiser; see ``espeak``.

    Raises:
        MissingFileError: the package espeakng-loader is not installed.
    """

    def __init__(self) -> None:
        loader = speech_package("espeakng_loader")
        self._library = ctypes.CDLL(loader.get_library_path())
        folder = str(Path(loader.get_data_path()).parent).encode()
        self._rate: int = self._library.espeak_Initialize(RETRIEVAL, 0, folder, 0)
        self._library.espeak_ng_SetRandSeed(ctypes.c_long(0))  # by default the second of the day
        self._parts: list[NDArray[np.int16]] = []
        self._callback = Callback(self._collect)  # kept: the library holds only a pointer
        self._library.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, speaker: Speaker) -> NDArray[np.float64]:
        """The sentence as samples (n,) at 16 kHz.

        Raises:
            UserError: espeak has no such voice, or gives no sound.
        """
        if self._library.espeak_SetVoiceByName(speaker.voice.encode()):
            raise UserError(f"espeak has no voice {speaker.voice}.")
        # a longer tract makes what is said slower, too
        self._library.espeak_SetParameter(RATE_PARAMETER, speaker.rate * speaker.tract // 100, 0)
        self._library.espeak_SetParameter(PITCH_PARAMETER, speaker.pitch, 0)
        self._parts.clear()
        words = text.encode()
        self._library.espeak_Synth(words, ctypes.c_size_t(len(words) + 1), 0, 0, 0, UTF8, None, None)
        self._library.espeak_Synchronize()
        if not self._parts:
            raise UserError(f"espeak gives no sound for {text!r} in the voice {speaker.voice}.")
        up, down = RATE * speaker.tract, self._rate * 100
        common = math.gcd(up, down)
        samples = np.concatenate(self._parts) / 32768
        return np.asarray(resample_poly(samples, up // common, down // common))

    def _collect(self, samples: "ctypes._Pointer[ctypes.c_short]", count: int, _: object) -> int:
        if samples and count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0
