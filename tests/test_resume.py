"""A run that is killed and resumed ends as if it had never been killed: the same bytes."""

from pathlib import Path

import pytest
import torch

from lit_epgan.privacy import Ledger
from tests.processes import model, run, run_until

pytestmark = pytest.mark.slow

KILLS = {
    "in the middle of the first round": "rank 0 round 0 batch 3",
    "in the middle of a later round": "rank 0 round 2 batch 5",
    "after validation, before the round is over": "rank 0 round 2 validated",
    "between a round's end and its checkpoint": "rank 0 round 3 ended",
    "in the middle of a save": "rank 0 round 3 saving",
    "right after a save": "rank 0 round 3 saved",
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("untouched")
    run(folder, *OPTIONS)
    return folder


OPTIONS = ("--module", "regression", "--algorithm", "ep", "--optimizer-state", "keep")


def assert_same_run(folder: Path, expected: Path) -> None:
    for name, value in model(folder).items():
        assert torch.equal(value, model(expected)[name]), name
    assert (folder / "metrics.csv").read_bytes() == (expected / "metrics.csv").read_bytes()


@pytest.mark.parametrize("line", KILLS.values(), ids=KILLS.keys())
def test_killed_and_resumed(tmp_path: Path, untouched: Path, line: str) -> None:
    run_until(tmp_path, line, *OPTIONS)
    run(tmp_path, *OPTIONS, *(["--resume"] if "round 0" not in line else []))
    assert_same_run(tmp_path, untouched)


@pytest.mark.parametrize("line", KILLS.values(), ids=KILLS.keys())
def test_killed_and_resumed_with_the_clients_states_on_disk(tmp_path: Path, untouched: Path, line: str) -> None:
    """The run that was never killed holds them in memory: where they are makes no difference either."""
    options = (*OPTIONS, "--private-states", "disk")
    run_until(tmp_path, line, *options)
    run(tmp_path, *options, *(["--resume"] if "round 0" not in line else []))
    assert_same_run(tmp_path, untouched)


def test_killed_twice(tmp_path: Path, untouched: Path) -> None:
    run_until(tmp_path, "rank 0 round 2 batch 1", *OPTIONS)
    run_until(tmp_path, "rank 0 round 3 batch 4", *OPTIONS, "--resume")
    run(tmp_path, *OPTIONS, "--resume")
    assert_same_run(tmp_path, untouched)


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, untouched: Path) -> None:
    run_until(tmp_path, "rank 0 round 3 batch 1", *OPTIONS)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    printed = run(tmp_path, *OPTIONS, "--resume")
    assert "last.ckpt is torn" in printed
    assert "previous.ckpt" in printed
    assert_same_run(tmp_path, untouched)


def test_a_private_run_pays_for_the_round_that_it_repeats(tmp_path: Path) -> None:
    """Killed after round 3's noise was drawn, before its checkpoint: the round is released again, and counts twice."""
    options = ("--noise-seed", "1")
    run_until(tmp_path, "rank 0 round 3 ended", *options)
    ledger = Ledger(tmp_path / "privacy.jsonl")
    (account,) = ledger.read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (4, 5, False)
    run(tmp_path, *options, "--resume")
    (account,) = ledger.read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (6, 6, True)


def test_two_ranks(tmp_path: Path) -> None:
    run(tmp_path / "whole", *OPTIONS, devices=2)
    run_until(tmp_path / "killed", "rank 1 round 2 batch 0", *OPTIONS, "--devices", "2")
    run(tmp_path / "killed", *OPTIONS, "--resume", devices=2)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_two_ranks_with_the_clients_states_on_disk(tmp_path: Path) -> None:
    options = (*OPTIONS, "--private-states", "disk")
    run(tmp_path / "whole", *OPTIONS, devices=2)
    run_until(tmp_path / "killed", "rank 1 round 2 batch 0", *options, "--devices", "2")
    run(tmp_path / "killed", *options, "--resume", devices=2)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_a_torn_checkpoint_is_passed_over_where_states_are_on_disk(tmp_path: Path, untouched: Path) -> None:
    """The files that the checkpoint before refers to are still there."""
    options = (*OPTIONS, "--private-states", "disk")
    run_until(tmp_path, "rank 0 round 4 batch 1", *options)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.write_bytes(last.read_bytes()[:-500])
    assert "previous.ckpt" in run(tmp_path, *options, "--resume")
    assert_same_run(tmp_path, untouched)


@pytest.mark.parametrize(
    ("module", "algorithm"),
    [("gan", "tilted"), ("speech_gan", "tilted_acoustic"), ("regression", "feddyn"), ("regression", "apfl")],
    ids=[
        "f, its optimizer, sites and weights",
        "three optimizers, the sampler's noise, discriminators of before",
        "every client's slope and the server's",
        "every client's own model and share",
    ],
)
def test_what_stands_beside_the_model_comes_back(tmp_path: Path, module: str, algorithm: str) -> None:
    """What algorithms keep at the server and at clients, around a classifier, a GAN and a recogniser."""
    options = ("--module", module, "--algorithm", algorithm, "--optimizer-state", "keep")
    run(tmp_path / "whole", *options)
    run_until(tmp_path / "killed", "rank 0 round 2 batch 5", *options)
    run(tmp_path / "killed", *options, "--resume")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
