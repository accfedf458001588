"""A federation whose server and clients are processes of their own ends with the model of one process."""

import secrets
from pathlib import Path

import pytest
import torch

from lit_epgan.remote.link import Place
from tests.processes import Started, command, model, run

pytestmark = pytest.mark.slow

NAMES = [f"client-{k}" for k in range(4)]
RUNS = [
    ("--module", "regression"),
    ("--module", "regression", "--algorithm", "fedprox"),
    ("--module", "regression", "--algorithm", "scaffold"),
    ("--module", "regression", "--algorithm", "fedadam"),
    ("--module", "regression", "--algorithm", "ep"),
    ("--module", "regression", "--algorithm", "tied_ep"),
    ("--module", "regression", "--algorithm", "fednp"),
    ("--module", "regression", "--algorithm", "fedseq"),
    ("--module", "regression", "--noise-seed", "1"),
    ("--module", "regression", "--noise-seed", "1", "--unit", "record"),
    ("--module", "gan", "--algorithm", "tilted"),
    ("--module", "points", "--algorithm", "generator_sites"),
    ("--module", "points", "--algorithm", "embedding_sites"),
    ("--module", "points", "--algorithm", "fedavg_gan"),
]


def started(folder: Path, *options: str) -> dict[str, Started]:
    """Five processes: the server's, and one for each client."""
    folder.mkdir(exist_ok=True)
    key, address = secrets.token_hex(16), str(folder / f"{secrets.token_hex(4)}")
    server = Started(command(folder / "server", *options), **Place("server", address, key).environment())
    found = {"server": server}
    for name in NAMES:
        where = Place("institution", address, key, name)
        found[name] = Started(command(folder / name, *options), **where.environment())
    return found


def ended(processes: dict[str, Started]) -> None:
    codes = [process.wait() for process in processes.values()]
    assert not any(codes), "\n".join(process.printed() for process in processes.values())


def wait_for(process: Started, line: str) -> None:
    for printed in process.lines():
        if printed.strip() == line:
            return
    raise AssertionError(f"never printed {line!r}:\n{process.printed()}")


def assert_equal(folder: Path, expected: Path) -> None:
    found = model(folder)
    for name, value in model(expected).items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-6 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_several_processes_end_with_the_model_of_one(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Float64, five rounds, cohorts of 3 of 4 clients, dropout, buffers, private state, noise."""
    run(tmp_path / "alone", *options)
    ended(started(tmp_path / "several", *options))
    assert_equal(tmp_path / "several" / "server", tmp_path / "alone")


def test_a_server_killed_within_a_round_goes_on_to_the_same_model(tmp_path: Path) -> None:
    """Its institutions end, too; they keep their site factors in checkpoints of their own."""
    options = ("--module", "regression", "--algorithm", "ep")
    run(tmp_path / "alone", *options)
    processes = started(tmp_path / "several", *options)
    wait_for(processes["client-2"], "rank 0 round 2 batch 0")
    processes["server"].kill()
    for name in NAMES:
        assert processes[name].wait() != 0
        assert "the server has closed the link" in processes[name].printed()
    ended(started(tmp_path / "several", *options, "--resume"))
    assert_equal(tmp_path / "several" / "server", tmp_path / "alone")


def test_an_institution_that_is_killed_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    processes = started(tmp_path / "several", "--module", "regression")
    wait_for(processes["client-2"], "rank 0 round 2 batch 0")
    processes.pop("client-2").kill()
    ended(processes)
    printed = processes["server"].printed()
    assert "round 2: client 'client-2' is left out: its link is broken" in printed
    assert all(bool(value.isfinite().all()) for value in model(tmp_path / "several" / "server").values())
