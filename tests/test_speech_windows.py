"""Utterances from windows: means worked frame by frame, and a network that heeds no past."""

import pytest
import torch

from lit_epgan.speech.frames import CHUNK, HOP, mean_of_windows, window_rows, windows


@pytest.mark.parametrize("frames", [CHUNK, CHUNK + 1, 43, 100])
def test_every_frame_has_the_mean_of_the_windows_that_it_is_in(frames):
    rows = window_rows(frames)
    values = torch.randn(len(rows), CHUNK, 3, generator=torch.Generator().manual_seed(0))
    mean = mean_of_windows(values, rows)
    assert mean.shape == (frames, 3)
    for frame in range(frames):
        starts = [*range(0, frames - CHUNK, HOP), frames - CHUNK]
        own = [values[k, frame - start] for k, start in enumerate(starts) if 0 <= frame - start < CHUNK]
        assert torch.allclose(mean[frame], torch.stack(own).mean(0), atol=1e-6)


@pytest.mark.parametrize("frames", [1, 7, CHUNK, 61])
def test_where_a_frame_stands_does_not_matter_nothing_changes(frames):
    x = torch.randn(frames, 5, generator=torch.Generator().manual_seed(0))
    rows = window_rows(frames)
    assert torch.allclose(mean_of_windows(windows(x, rows).tanh(), rows)[:frames], x.tanh(), atol=1e-6)
