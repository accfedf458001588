"""Any number of ranks gives the same server model: real gloo processes."""

import subprocess
from pathlib import Path

import pytest
import torch

from tests.processes import ROOT, command, environment, model, run

pytestmark = pytest.mark.slow


RUNS = [
    ("--module", "regression", "--algorithm", "ep"),
    ("--module", "gan"),
    ("--module", "gan", "--algorithm", "tilted"),
]


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_ranks_agree(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Float64, five rounds, cohorts of 3 of 4 clients, dropout, and a GAN with its own noise.

    On 4 ranks one always stands idle, on 3 ranks clients are shared 2-1-1, so a cohort may leave one idle as well.
    """
    run(tmp_path / "1", *options)
    expected = model(tmp_path / "1")
    for ranks in (2, 3, 4):
        run(tmp_path / str(ranks), "--devices", str(ranks), *options)
        for name, value in model(tmp_path / str(ranks)).items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-6, atol=1e-6 * float(expected[name].abs().max()), msg=f"{ranks}: {name}"
            )


def test_a_chain_of_clients_does_not_run_over_ranks(tmp_path: Path) -> None:
    words = command(tmp_path, "--devices", "2", "--algorithm", "fedseq")
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "FedSeq hands a model from client to client, which must share a rank: give trainer.devices 1" in done.stderr
