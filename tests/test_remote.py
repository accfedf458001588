"""A federation whose server and clients are processes of their own ends with the model of one process."""

import csv
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from lit_epgan.carriers.protocol import VERSION, WORDS, Endpoint, FederateSettings, Frame, Kind
from lit_epgan.engine.messages import Count, tensor_of
from lit_epgan.engine.wire import decode_answer
from tests.processes import Started, command, model, run
from tests.same_weights import assert_same

pytestmark = pytest.mark.slow
NAMES = [f"client-{k}" for k in range(4)]
RUNS = [
    ("--module", "regression", "--algorithm", "apfl"),
    ("--module", "regression", "--algorithm", "ep"),
    ("--module", "regression", "--algorithm", "fedseq"),
    ("--module", "regression", "--algorithm", "laplace"),
    ("--module", "regression", "--noise-seed", "1"),
    ("--module", "gan", "--algorithm", "tilted"),
    ("--module", "points", "--algorithm", "generator_sites"),
    ("--module", "points", "--algorithm", "fedavg_gan"),
    ("--module", "posterior", "--algorithm", "graffl"),  # rounds without training
]


class Site:
    """A server and institutions, whose runs are in folders of their names."""

    def __init__(self, folder: Path, terms: FederateSettings | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self._terms = folder, terms or FederateSettings()
        self._key, self._address = secrets.token_hex(16), str(folder / secrets.token_hex(4))
        self._tapped: dict[str, Endpoint] = {}

    def place(self, name: str) -> Endpoint:
        role = "server" if name == "server" else "institution"
        own = Endpoint(role, self._address, self._key, "" if name == "server" else name, self._terms)
        return self._tapped.get(name, own)

    def tap(self, name: str, between: Callable[..., None], *args: Any) -> None:
        """From now on ``between`` stands between an institution and the server."""
        self._tapped[name] = replace(self.place(name), address=f"{self._address}-tapped")
        Thread(target=between, args=(self._tapped[name], self.place("server"), *args), daemon=True).start()

    def started(self, name: str, *options: str) -> Started:
        return Started(command(self.folder / name, *options), **self.place(name).environment())

    def all_started(self, *options: str, own: Mapping[str, tuple[str, ...]] | None = None) -> dict[str, Started]:
        return {name: self.started(name, *options, *(own or {}).get(name, ())) for name in ("server", *NAMES)}


def tap(institution, server, overheard):
    """Stands between an institution and the server, and keeps all that the institution sends."""

    def hand_on(source: Connection, target: Connection, keep: list[bytes]) -> None:
        try:
            while True:
                keep.append(source.recv_bytes())
                target.send_bytes(keep[-1])
        except (EOFError, OSError, TypeError):  # the last one of a link that is closed meanwhile
            target.close()

    with institution.listener() as listener:
        outside = listener.accept()
    inside = server.called(60.0)
    Thread(target=hand_on, args=(inside, outside, []), daemon=True).start()
    hand_on(outside, inside, overheard)


def ended(processes):
    codes = [process.wait() for process in processes.values()]
    assert not any(codes), "\n".join(process.printed() for process in processes.values())


def wait_for(process, line):
    for printed in process.lines():
        if printed.strip() == line:
            return
    raise AssertionError(f"never printed {line!r}:\n{process.printed()}")


def assert_equal(folder, expected):
    assert_same(model(folder), model(expected))


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_several_processes_end_with_the_model_of_one(tmp_path, options):
    """Float64, five rounds, cohorts of 3 of 4 clients, dropout, buffers, private state, noise."""
    run(tmp_path / "alone", *options)
    ended(Site(tmp_path / "several").all_started(*options))
    assert_equal(tmp_path / "several" / "server", tmp_path / "alone")


def test_an_institution_that_is_killed_is_left_out_and_the_others_go_on(tmp_path):
    processes = Site(tmp_path / "several").all_started("--module", "regression")
    wait_for(processes["client-2"], "rank 0 round 2 batch 0")
    processes.pop("client-2").kill()
    ended(processes)
    printed = processes["server"].printed()
    assert "round 2: client 'client-2' is left out: its link is broken" in printed
    rows = list(csv.DictReader((tmp_path / "several" / "server" / "contributions.csv").open()))
    assert len(rows) == 5 * 4
    own = [row for row in rows if row["client"] == "client-2" and row["asked"] == "1"]
    assert [row["counted"] for row in own if int(row["round"]) < 2] == ["1"] * sum(int(r["round"]) < 2 for r in own)
    later = [row for row in own if int(row["round"]) >= 2]
    assert later
    assert all((row["counted"], row["bytes"], row["why"]) == ("0", "0", "its link is broken") for row in later)
    counted = [row for row in rows if row["counted"] == "1"]
    assert all(int(row["bytes"]) > 300 and not row["why"] for row in counted)
    assert all(bool(value.isfinite().all()) for value in model(tmp_path / "several" / "server").values())


def test_an_institution_keeps_to_its_policy(tmp_path):
    """It ends before its first report leaves, and nothing is listed; without it the server has nothing to merge."""
    policy = tmp_path / "policy.yaml"
    policy.write_text("algorithms: [ExpectationPropagation]\n")
    processes = Site(tmp_path / "several").all_started("--module", "regression", "--policy", str(policy))
    for name in NAMES:
        assert processes[name].wait() != 0
        assert "algorithms is ['ExpectationPropagation'], and FedAvg is none of them" in processes[name].printed()
        assert not (tmp_path / "several" / name / "sent.csv").exists()
    assert processes["server"].wait() != 0
    said = processes["server"].printed()  # as they were asked, or, where this machine is slow, before
    assert "round 0: no client's answer counts, so there is nothing to merge" in said or "its link is broken" in said


def test_nothing_but_its_name_and_reports_leaves_an_institution(tmp_path):
    """Every byte is looked at on its way. The list of what has left says the same, entry by entry."""
    overheard, site = list[bytes](), Site(tmp_path / "several")
    site.tap(NAMES[-1], tap, overheard)
    ended(site.all_started("--module", "regression", "--algorithm", "ep"))
    hello, *answers = map(Frame.read, overheard)
    assert (hello.kind, hello.about()) == (Kind.HELLO, {"name": NAMES[-1], "version": VERSION, "settings": {}})
    assert {note.kind for note in answers} == {Kind.ANSWER}
    found = []
    for note in answers:
        round_, exchange = (int.from_bytes(note.body[k : k + 8], "little") for k in (0, 8))
        for name, term in decode_answer(note.body[WORDS:]).report.items():
            shape = "" if isinstance(term, Count) else " x ".join(map(str, tensor_of(term).shape))
            found.append((str(round_), str(exchange), name, shape))
    listed = list(csv.DictReader((tmp_path / "several" / NAMES[-1] / "sent.csv").open()))
    assert sorted(found) == sorted((r["round"], r["exchange"], r["entry"], r["shape"]) for r in listed)
    assert len(found) > 5
    sizes = {len(note.written()) for note in answers}
    assert max(sizes) < 3000  # 41 parameters, their precisions and a header
