"""From samples to what the models see: log-mel filter banks for the network, cepstra for the Gaussian mixtures."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from torch import Tensor

from lit_epgan.speech.espeak import RATE
from lit_epgan.speech.packages import speech_package

Frames = NDArray[np.float32]

MELS = 40
FUTURE = 4  # frames after the current one that the network sees
INPUTS = MELS * (1 + FUTURE)
CHUNK = 20  # frames
SHIFT = 0.01  # seconds from one frame to the next
CEPSTRA = 13
FULL_SCALE = 32768  # Kaldi's filter banks are of 16-bit samples


def log_mel(samples: NDArray[np.float64]) -> Frames:
    """Logarithms of 40 mel filters' energies every 10 ms: float32 (frames, 40) of samples (n,) at 16 kHz."""
    fbank = speech_package("kaldi_native_fbank")
    options = fbank.FbankOptions()
    options.frame_opts.dither = 0
    options.frame_opts.samp_freq = RATE
    options.mel_opts.num_bins = MELS
    computer = fbank.OnlineFbank(options)
    computer.accept_waveform(RATE, (samples * FULL_SCALE).tolist())
    computer.input_finished()
    return np.stack([computer.get_frame(i) for i in range(computer.num_frames_ready)]).astype(np.float32)


def cepstra(mel: Frames) -> Frames:
    """13 cepstral coefficients with their first and second differences: (frames, 39) of ``mel`` (frames, 40)."""
    static = dct(mel, norm="ortho")[:, :CEPSTRA]
    first = _differences(static)
    return np.hstack([static, first, _differences(first)]).astype(np.float32)


def normalise(utterances: Sequence[Frames], speakers: Sequence[str]) -> list[Frames]:
    """Each speaker's frames with mean zero and variance one in every column.

    Args:
        utterances: float arrays (frames, columns).
        speakers: of each utterance.
    """
    moments = {}
    for speaker in set(speakers):
        own = np.concatenate([x for x, s in zip(utterances, speakers, strict=True) if s == speaker])
        moments[speaker] = own.mean(0), own.std(0) + 1e-5
    return [((x - moments[s][0]) / moments[s][1]).astype(np.float32) for x, s in zip(utterances, speakers, strict=True)]


def padded(mel: Tensor) -> Tensor:
    """``mel`` (frames, 40) with its last frame repeated, so that every frame has its future: (frames + 4, 40)."""
    return torch.cat([mel, mel[-1:].expand(FUTURE, -1)])


def with_future(mel: Tensor) -> Tensor:
    """Each frame and the 4 after it, side by side: (..., frames, 200) of padded ``mel`` (..., frames + 4, 40)."""
    return mel.unfold(-2, FUTURE + 1, 1).transpose(-1, -2).flatten(-2)


def chunk_starts(frames: int, hop: int = CHUNK) -> list[int]:
    """Where chunks of 20 frames begin, one every ``hop``; the last ends with the utterance, shorter ones have none."""
    starts = list(range(0, frames - CHUNK + 1, hop))
    return [*starts, frames - CHUNK] if starts and starts[-1] != frames - CHUNK else starts


def _differences(x: NDArray) -> NDArray:
    """Regression over two frames on either side (Young et al., HTK book, eq. 5.16): (frames, columns)."""
    edge = np.pad(x, ((2, 2), (0, 0)), "edge")
    return (2 * (edge[4:] - edge[:-4]) + edge[3:-1] - edge[1:-3]) / 10
