"""When one of two ranks ends or hangs, the other one names it and ends too: real processes, real signals."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from lit_epgan.runs.checkpoints import fault
from tests.ledgers import the_ledger
from tests.processes import Started, command, model, ranks_of, run, until

pytestmark = pytest.mark.slow
DEADLINE = 60.0  # seconds from one rank's end to the other's


class Ranks:
    """Two, of which rank 0 has launched the other, or a cluster both: then neither ends with its parent."""

    def __init__(self, folder: Path, *options: str, launched: bool) -> None:
        self.folder = folder
        launch = [*options, "--devices", "2"]
        self.processes = [Started(command(folder, *launch))] if launched else ranks_of(folder, 2, *options)

    @property
    def printed(self) -> str:
        return "".join(process.printed() for process in self.processes)

    @property
    def pids(self) -> dict[int, int]:
        return {int(rank): int(pid) for rank, pid in re.findall(r"^rank (\d) is process (\d+)$", self.printed, re.M)}

    def await_line(self, line: str) -> None:
        until(lambda: re.search(line, self.printed) is not None, 120)

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.pids[rank], number)

    def ended(self, rank: int) -> bool:
        for process in self.processes:
            process.poll()
        try:
            state = Path(f"/proc/{self.pids[rank]}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"

    def await_end(self, *ranks: int) -> None:
        until(lambda: all(map(self.ended, ranks)), DEADLINE)

    def code(self) -> int:
        """Rank 0's exit code, when both have ended."""
        self.await_end(0, 1)
        return self.processes[0].wait(DEADLINE)

    def sentence(self, rank: int) -> str:
        said = re.findall(rf"^rank {rank} ends: (.*)$", self.printed, re.M)
        assert len(said) == 1, self.printed
        return said[0]


@pytest.fixture
def begin(tmp_path):
    """Begins a run of two ranks; nothing of it is left when the test is over."""
    begun: list[Ranks] = []

    def one(*options: str, launched: bool = False) -> Ranks:
        begun.append(Ranks(tmp_path / "run", *options, launched=launched))
        return begun[-1]

    yield one
    for ranks in begun:
        for process in ranks.processes:
            process.kill()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The final model of a run in which rank 1's interpreter is held three times longer than the watch has patience."""
    folder = tmp_path_factory.mktemp("undisturbed")
    printed = run(folder, "--trouble", "1=busy", "--patience", "1", devices=2)
    assert "rank 1 is busy" in printed
    assert "ends:" not in printed
    return model(folder)


def whole_checkpoint(ranks, said):
    last = ranks.folder / "checkpoints" / "last.ckpt"
    assert fault(last) is None
    assert f"The last checkpoint is {last} (round 2)" in said


def test_sigterm_ends_a_rank_after_its_batch(begin, undisturbed):
    """It reaches rank 0 in mid-round, and rank 1 too; the run that is resumed ends with the same bits."""
    ranks = begin("--trouble", "0=slow", "1=slow")
    ranks.await_line("rank 0 is slow")
    ranks.signal(0, signal.SIGTERM)
    assert ranks.code() == 143
    assert ranks.sentence(1).startswith("rank 0 was ended by SIGTERM. ")
    whole_checkpoint(ranks, ranks.sentence(1))
    run(ranks.folder, "--resume", devices=2)
    for name, value in model(ranks.folder).items():
        assert torch.equal(value, undisturbed[name]), name


def test_sigterm_ends_a_rank_that_waits_for_the_others(begin):
    ranks = begin("--trouble", "0=stuck")
    ranks.await_line("rank 0 is stuck")
    ranks.signal(1, signal.SIGTERM)
    assert ranks.code() == 143
    assert ranks.sentence(0).startswith("rank 1 was ended by SIGTERM. ")
    whole_checkpoint(ranks, ranks.sentence(0))


@pytest.mark.parametrize(("killed", "said"), [(0, "has ended without a word"), (1, "was ended by SIGKILL")])
def test_a_killed_rank_ends_the_other(begin, killed, said):
    """Rank 0 is killed at its batch, rank 1 while it waits for rank 0 at the round's end."""
    ranks = begin("--trouble", "0=stuck", launched=killed == 1)
    ranks.await_line("rank 0 is stuck")
    ranks.signal(killed, signal.SIGKILL)
    assert ranks.code() == (-signal.SIGKILL if killed == 0 else 1)
    assert ranks.sentence(1 - killed).startswith(f"rank {killed} {said}. ")
    whole_checkpoint(ranks, ranks.sentence(1 - killed))


def test_a_rank_killed_before_they_meet_leaves_no_orphan(begin):
    ranks = begin(launched=True)
    ranks.await_line("rank 1 is process")
    ranks.signal(0, signal.SIGKILL)
    assert ranks.code() == -signal.SIGKILL
    assert ranks.sentence(1) == "rank 0 has ended without a word."


def test_a_mistake_in_one_ranks_data_is_told_by_the_other(begin):
    ranks = begin("--trouble", "1=wrong")
    ranks.await_line("rank 1 is wrong")
    assert ranks.code() == 1
    assert ranks.sentence(0).startswith("rank 1 stopped: client-1's records hold a text. ")
    whole_checkpoint(ranks, ranks.sentence(0))


def test_a_rank_that_hangs_is_ended(begin):
    ranks = begin("--trouble", "0=stuck", "--patience", "3", launched=True)
    ranks.await_line("rank 0 is stuck")
    ranks.signal(1, signal.SIGSTOP)
    assert ranks.code() == 1
    assert ranks.sentence(0).startswith("rank 1 has not answered for 3 s. ")
    whole_checkpoint(ranks, ranks.sentence(0))


RUNS = {
    ("--module", "regression", "--algorithm", "ep"): (2, 4),  # of four ranks one stands idle
    ("--module", "regression", "--median"): (3,),
    ("--module", "regression", "--algorithm", "fedseq"): (3,),  # a model that another rank's client has trained
    ("--module", "gan", "--algorithm", "tilted"): (3,),
    ("--module", "regression", "--noise-seed", "1", "--groups", "2"): (3,),  # noise once, and not for each rank
}


def assert_near(folder, expected):
    for name, value in model(folder).items():
        near = 1e-6 * float(expected[name].abs().max())
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=near, msg=f"{folder.name}: {name}")


@pytest.mark.parametrize(("options", "counts"), RUNS.items(), ids=map(" ".join, RUNS))
def test_ranks_agree(tmp_path, options, counts):
    """Float64, five rounds, cohorts of 3 of 4 clients, dropout, and a GAN with its own noise.

    On 3 ranks clients are shared 2-1-1, so a cohort may leave one idle.
    """
    run(tmp_path / "1", *options)
    for ranks in counts:
        run(tmp_path / str(ranks), *options, devices=ranks)
        assert_near(tmp_path / str(ranks), model(tmp_path / "1"))


def test_every_client_pays_once_for_its_steps_whichever_rank_trains_it(tmp_path, monkeypatch):
    """A round's cohort of 3 of 4 clients moves from rank to rank; the ledger is one file."""
    books = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        monkeypatch.setenv("LIT_EPGAN_LEDGERS", str(tmp_path / f"ledgers {ranks}"))
        run(folder, "--module", "regression", "--noise-seed", "1", "--unit", "record", devices=ranks)
        accounts = the_ledger().read().accounts.values()
        books.append({each.group: (each.made, each.planned, each.ended) for each in accounts})
    assert_near(tmp_path / "2", model(tmp_path / "1"))
    assert (books[0], len(books[0])) == (books[1], 4)
    assert all(made > 0 and ended for made, _, ended in books[0].values())
