"""From samples to what the models see: log-mel frames, cepstra, masked chunks, and windows of an utterance."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.fft import dct
from torch import Tensor

from lit_epgan.lib.errors import UserError
from lit_epgan.speech.packages import speech_package

Frames = NDArray[np.float32]

RATE = 16000  # samples in a second
MELS = 40
FUTURE = 4  # frames after the current one that the network sees
INPUTS = MELS * (1 + FUTURE)
CHUNK = 20  # frames
CEPSTRA = 13
FULL_SCALE = 32768  # Kaldi's filter banks are of 16-bit samples
HOP = 5  # frames from one window to the next


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
    """Utterances (frames, columns) with mean zero and variance one in every column, speaker by speaker."""
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


class SpectralMasking:
    """Frequency and time masking (Park et al. 2019, section 2), without their time warping.

    Of every chunk, each mask takes f ~ U{0, ..., bins} adjoining mel bins in all frames, from f0 ~ U{0, ..., 40 - f}
    on, and t ~ U{0, ..., frames} adjoining frames of the 24 that a chunk shows, from t0 ~ U{0, ..., 24 - t} on. A frame
    stands in as many as five rows of a chunk, as the current one and as others' future, and is masked in all of them:
    a chunk is what it would have been, had its spectrogram been masked. What is masked is 0, the speaker's mean.

    Args:
        bins: largest width F of a frequency mask; 0 for none.
        frames: largest length T of a time mask; 0 for none.
        masks: of each kind.
    """

    def __init__(self, bins: int = 8, frames: int = 4, masks: int = 1) -> None:
        if not (0 <= bins <= MELS and 0 <= frames <= CHUNK + FUTURE and masks >= 1):
            raise UserError(
                f"masking's bins, frames and masks are {bins}, {frames} and {masks}; give at most {MELS} bins and "
                f"{CHUNK + FUTURE} frames, and at least one mask"
            )
        self.bins, self.frames, self.masks = bins, frames, masks

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Chunks x (b, 20, 200), each row a frame's 40 bins and those of the 4 after it, with masks; x stays as it
        is."""
        b, rows, _ = x.shape
        bins = runs((b, self.masks), MELS, self.bins, generator)
        frames = runs((b, self.masks), rows + FUTURE, self.frames, generator).unfold(1, FUTURE + 1, 1)
        masked = (bins[:, None, None] | frames[..., None]).flatten(2)
        return x.masked_fill(masked.to(x.device, non_blocking=True), 0)


def runs(shape: tuple[int, int], size: int, longest: int, generator: torch.Generator) -> Tensor:
    """Where runs of length U{0, ..., longest} lie, uniformly: bool (b, size) for ``shape`` (b, runs of each)."""
    lengths, places = torch.rand(2, *shape, 1, generator=generator, dtype=torch.float64)
    length = (lengths * (longest + 1)).floor()
    start = (places * (size - length + 1)).floor()
    position = torch.arange(size)
    return ((position >= start) & (position < start + length)).any(1)


def window_rows(frames: int) -> Tensor:
    """The rows of each window, int64 (windows, 20); those of one too long for the utterance are beyond its last."""
    return torch.tensor(chunk_starts(frames, HOP) or [0])[:, None] + torch.arange(CHUNK)


def windows(x: Tensor, rows: Tensor) -> Tensor:
    """The windows (windows, 20, inputs) of ``x`` (frames, inputs), its last frame in place of those beyond."""
    return x[rows.clamp(max=len(x) - 1)]


def mean_of_windows(values: Tensor, rows: Tensor) -> Tensor:
    """Each frame's mean (frames, states) over the windows that it is in, of ``values`` (windows, 20, states).

    Log posteriors so averaged are those of a product of experts (Hinton 2002), each of which has heard another past.
    """
    frames = int(rows[-1, 0]) + CHUNK
    total = values.new_zeros(frames, values.shape[-1]).index_add_(0, rows.flatten(), values.flatten(0, 1))
    return total / torch.bincount(rows.flatten(), minlength=frames)[:, None]
