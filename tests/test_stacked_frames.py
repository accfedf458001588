"""Herded chunks of stacked frames are chunks that a spectrogram could have given."""

import pytest
import torch
from torch import nn

from lit_epgan.bayes import StackedFrames, herd
from lit_epgan.errors import UserError
from lit_epgan.randomness import generator_for
from lit_epgan.speech.frames import CHUNK, FUTURE, INPUTS, MELS, with_future


def test_a_frame_is_the_same_in_every_row_that_shows_it():
    code = StackedFrames((CHUNK, INPUTS), FUTURE + 1)
    codes = code.start(7, generator_for(0))
    chunks = code(codes)
    assert chunks.shape == (7, CHUNK, INPUTS)
    assert codes.shape == (7, len(code.spread)) == (7, 540)  # 9 / 16 of 24 x 40
    spectrogram = torch.cat([chunks[..., :MELS], chunks[:, -1, MELS:].unflatten(-1, (FUTURE, MELS))], 1)
    assert torch.equal(with_future(spectrogram), chunks)
    assert 1 < float(chunks.std()) < 2  # 0.6 x 3
    assert float(chunks.abs().max()) <= 3


def test_chunks_are_herded_to_a_mean_spectrogram():
    target = torch.linspace(-1, 1, 4, dtype=torch.float64).repeat(6, 1)  # (frames, columns): a slope over columns
    code = StackedFrames((4, 12), 3, dimensions=24)
    start = code.start(50, generator_for(1))
    phi = nn.Flatten()
    wanted = with_frames(target, 3).flatten()
    codes = herd(phi, wanted, code, start, 200, 1.0, 0.0, generator_for(2))
    torch.testing.assert_close(phi(code(codes)).mean(0), wanted, atol=0.05, rtol=0)


def with_frames(spectrogram, stacked):
    """Row t is the frames t, t + 1, ... side by side."""
    rows = len(spectrogram) - stacked + 1
    return torch.stack([spectrogram[t : t + stacked].flatten() for t in range(rows)])


@pytest.mark.parametrize(("shape", "stacked"), [((20, 200), 3), ((1, 8, 8), 2), ((20, 200), 0)])
def test_other_records_are_refused(shape, stacked):
    with pytest.raises(UserError, match="stacked is"):
        StackedFrames(shape, stacked)
