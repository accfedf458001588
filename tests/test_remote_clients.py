"""The server's end of links to institutions: what they send wrong, late or not at all, and the operator's page."""

import csv
import html
import json
import re
import secrets
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection

import pytest
import torch

from lit_epgan.carriers.contributions import Contribution, Contributions, in_words, operator_page, read_contributions
from lit_epgan.carriers.policy import Policy, ReportFilter
from lit_epgan.carriers.protocol import VERSION, Endpoint, Frame, Kind, answered
from lit_epgan.carriers.remote_clients import RemoteClients, agreed
from lit_epgan.carriers.remote_server import RemoteServer
from lit_epgan.engine.messages import Count, Task, Weighted
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import LENGTH, encode_answer
from lit_epgan.lib.errors import UserError

NAMES = ["a", "b", "c"]
PATIENCE, LARGEST = 0.2, 10_000


@pytest.fixture
def at(tmp_path):
    return Endpoint("server", str(tmp_path / "s"), secrets.token_hex(16))


@pytest.fixture
def clients(at):
    found = RemoteClients(at.listener(), NAMES, PATIENCE, LARGEST)
    yield found
    found.end()


def called(at, name, version=VERSION):
    link = at.called()
    link.send_bytes(Frame.of(Kind.HELLO, name=name, version=version).written())
    return link


def task(client, round_=3, exchange=1):
    return Task(client, round_, exchange, "train", True, {"parameters": torch.ones(2)})


def answer(value=1.0):
    return Answer({"change": Weighted(torch.full((2,), value), 5.0), "weight": Count(5.0, True)}, Private(), 4)


def note(value=1.0, round_=3, exchange=1):
    return answered(task(0, round_, exchange), encode_answer(answer(value))).written()


def saying(**instead):
    """An answer whose header says something else; its tensors are whole."""
    body = encode_answer(answer())
    end = LENGTH + int.from_bytes(body[:LENGTH], "little")
    words = json.dumps(json.loads(body[LENGTH:end]) | instead).encode()
    return answered(task(0), len(words).to_bytes(LENGTH, "little") + words + body[end:]).written()


def test_answers_come_in_the_order_of_the_tasks_whoever_is_quick(at, clients):
    links = [called(at, name) for name in NAMES]
    assert clients.meet(range(3)) == {0, 1, 2}
    for k in (2, 0, 1):
        links[k].send_bytes(note(float(k)))
    found = list(clients.ask({k: task(k) for k in (1, 2, 0)}))
    assert [k for k, _ in found] == [1, 2, 0]
    for k, each in found:
        assert each is not None
        assert each.steps == 4
        torch.testing.assert_close(each.report["change"].tensor, torch.full((2,), float(k)))  # type: ignore[union-attr]
    assert not clients.lost


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (None, "has not answered for 0.2 seconds"),
        (note(round_=2), "an answer to another question"),
        (note(exchange=0), "an answer to another question"),
        (Frame(Kind.HELLO).written(), "says HELLO where ANSWER was expected"),
        (b"?", "is not a valid Kind"),
        (b"", "is not a valid Kind"),
        (note()[:40], "is no answer"),
        (b"A" + bytes(LARGEST), "more than 10,000 bytes"),
        (b"A" + bytes(16) + b"cos\nsystem\n(S'false'\ntR.", "an answer to another question"),
        (note()[:17] + b"cos\nsystem\n(S'false'\ntR.", "is no answer"),
        (saying(steps="4"), "'4' stands where a finite number should"),
        (saying(weights={"change": float("nan")}), "nan stands where"),
        (saying(weights={"change": float("inf")}), "inf stands where"),
        (saying(counts={"weight": [[1], True]}), "[1] stands where"),
        (saying(counts={"weight": [float("-inf"), True]}), "-inf stands where"),
        (Frame.of(Kind.REFUSED).written(), "says REFUSED where ANSWER was expected"),
    ],
)
def test_what_is_no_answer_leaves_one_institution_out(at, clients, sent, why):
    good, bad = called(at, "a"), called(at, "b")
    clients.meet([0, 1])
    if sent is not None:
        bad.send_bytes(sent)
    good.send_bytes(note())
    found = dict(clients.ask({1: task(1), 0: task(0)}))
    assert found[1] is None
    assert found[0] is not None
    assert why in clients.lost[1]
    assert clients.present == {0}
    assert [k for k, each in clients.ask({1: task(1)}) if each is not None] == []  # nobody is asked: nothing waits


def test_an_answer_that_comes_twice_is_not_counted_twice_and_what_was_heard_of_it_is_its_seconds_and_bytes(at, clients):
    link = called(at, "a")
    clients.meet([0])
    link.send_bytes(note())
    link.send_bytes(note())
    ((_, first),) = clients.ask({0: task(0)})
    assert first is not None
    ((_, second),) = clients.ask({0: task(0, exchange=2)})
    assert second is None
    assert "another question" in clients.lost[0]
    assert clients.heard[0].bytes == len(note())
    assert 0 <= clients.heard[0].seconds < PATIENCE


def test_who_is_lost_calls_again_and_takes_part_from_then_on(at, clients):
    first = called(at, "a")
    clients.meet([0])
    first.close()
    ((_, nothing),) = clients.ask({0: task(0)})
    assert nothing is None
    again = called(at, "a")
    assert clients.meet([0]) == {0}
    again.send_bytes(note())
    ((_, found),) = clients.ask({0: task(0)})
    assert found is not None
    assert not clients.lost


def test_strangers_are_not_let_in_and_one_that_says_nothing_holds_nobody_up(at, clients):
    """A wrong key, a name that is not expected, a note that is no hello, and no note at all."""
    with pytest.raises(AuthenticationError):
        Client(at.address, "AF_UNIX", authkey=b"wrong")
    called(at, "nobody")
    at.called().send_bytes(Frame.of(Kind.BEGIN, round=1, trains=True).written())
    at.called().send_bytes(Frame(Kind.HELLO, b"[1]").written())
    at.called().close()
    link = called(at, "c")
    assert clients.meet([2]) == {2}
    assert clients.present == {2}
    link.close()
    silent = at.called()
    called(at, "a")
    assert clients.meet([0], seconds=5) == {0}
    silent.close()


def test_one_under_other_settings_is_told_which_they_are(at, recwarn):
    ours = RemoteClients(at.listener(), NAMES, PATIENCE, LARGEST, agreed({"model.lr": "0.1"}))
    link = at.called()
    link.send_bytes(Frame.of(Kind.HELLO, name="b", version=VERSION, settings=agreed({"model.lr": "0.2"})).written())
    same = at.called()
    same.send_bytes(Frame.of(Kind.HELLO, name="c", version=VERSION, settings=agreed({"model.lr": "0.1"})).written())
    assert ours.meet([2]) == {2}
    refused = Frame.read(link.recv_bytes())  # the warning comes before it
    assert refused.kind is Kind.REFUSED
    assert any("'b' is not let in" in str(warning.message) for warning in recwarn)
    assert "model.lr" in refused.about()["why"]
    assert ours.meet([1], seconds=0.1) == set()  # it is not waited for without end
    assert ours.why(1) == "it has not called"
    ours.end()


def test_rounds_and_refusals_are_told(at, clients, tmp_path):
    links = {k: called(at, NAMES[k]) for k in (0, 1)}
    clients.meet(links)
    clients.begin(7, [1, 2, 3], True)
    clients.over(7, [0])
    clients.end()
    for k, link in links.items():
        told = [Frame.read(link.recv_bytes()) for _ in range(3)]
        assert told[0].about() == {"round": 7, "trains": k == 1, "cohort": 3}
        assert told[1].about() == {"round": 7, "counts": k != 0}
        assert told[2].kind is Kind.END
    ours, theirs = Pipe()
    institution = RemoteServer(ours, "a", 0, ReportFilter(Policy(), tmp_path / "sent.csv"))
    assert Frame.read(theirs.recv_bytes()).about() == {"name": "a", "version": VERSION, "settings": {}}
    theirs.send_bytes(Frame.of(Kind.REFUSED, why="the server speaks version 2").written())
    with pytest.raises(UserError, match="does not let this institution in: the server speaks version 2"):
        institution.trains(0)


@pytest.mark.filterwarnings("ignore:'a' is not let in")
@pytest.mark.parametrize("version", [None, 0, VERSION + 1, "1", [VERSION]])
def test_another_version_of_the_protocol_is_refused_in_a_sentence_at_both_ends(at, clients, version):
    link = called(at, "a", version)
    assert link.poll(30)
    refused = Frame.read(link.recv_bytes())
    assert refused.kind is Kind.REFUSED
    assert refused.about()["why"].startswith(f"the server speaks version {VERSION} of the federation's protocol, and ")
    called(at, "b")
    assert clients.meet([1]) == {1}
    assert clients.present == {1}


def test_all_have_the_same_time_to_answer(at, clients, monkeypatch):
    """After one was silent for all of it, the next one is waited for no more."""
    links = [called(at, name) for name in ("a", "b")]
    clients.meet([0, 1])
    waited: list[float] = []
    original = Connection.poll
    monkeypatch.setattr(Connection, "poll", lambda link, seconds: waited.append(seconds) or original(link, seconds))
    assert [each for _, each in clients.ask({0: task(0), 1: task(1)})] == [None, None]
    assert waited[1] == 0
    assert all("0.2 seconds" in why for why in clients.lost.values())
    assert len(links) == 2


def test_contributions_are_listed_by_round_and_repeated_rounds_anew(tmp_path):
    path = tmp_path / "run" / "contributions.csv"
    first = Contributions(path)
    for round_ in range(3):
        first.note(round_, {"a": Contribution(True, True, 1.5, 10), "b": Contribution()})
    second = Contributions(path)
    second.note(1, {"a": Contribution(True, False, 0.25, 0, "its link is broken")})
    rows = list(csv.reader(path.open()))
    assert rows == [
        ["round", "client", "asked", "counted", "seconds", "bytes", "why"],
        ["0", "a", "1", "1", "1.500", "10", ""],
        ["0", "b", "0", "0", "0.000", "0", ""],
        ["1", "a", "1", "0", "0.250", "0", "its link is broken"],
    ]


@pytest.fixture
def path(tmp_path):
    list_ = Contributions(tmp_path / "contributions.csv")
    for round_ in range(3):
        lost = Contribution(asked=True, why="its <link> is broken") if round_ == 1 else Contribution(True, True, 2.0, 5)
        list_.note(round_, {"a": Contribution(True, True, 1.0 + round_, 500_000), "b": lost, "c": Contribution()})
    return tmp_path / "contributions.csv"


def rows(page):
    found = re.findall(r'<tr>\s*<th scope="row">(.*?)</th>(.*?)</tr>', page, re.DOTALL)
    return {name: html.unescape(re.sub(r"<[^>]*>|\s+", " ", cells)) for name, cells in found}


def test_it_says_who_contributed_when(path):
    page = operator_page(path, "scans", 4, over=False)
    told = rows(page)
    assert "3 of 3" in told["a"]
    assert "2.0" in told["a"]  # the median of 1, 2 and 3 seconds
    assert "1.5 MB" in told["a"]
    assert "2 of 3" in told["b"]
    assert "takes part" in told["b"]
    assert "0 of 0" in told["c"]
    assert "Round 3 of 4" in page
    assert page.count('class="lost"') == 2  # b's round, and the key
    assert "Round 2: b is left out: its &lt;link&gt; is broken." in page
    assert "Round 3: b takes part again." in page
    assert "<link>" not in page
    assert not re.search(r"(src|href)=", page)  # nothing comes from elsewhere


def test_a_page_of_a_running_training_loads_itself_again(path):
    assert 'http-equiv="refresh"' in operator_page(path, "scans", None, over=False)
    ended = operator_page(path, "scans", None, over=True)
    assert 'http-equiv="refresh"' not in ended
    assert "The training has ended." in ended


def test_a_run_that_goes_on_loses_no_row_if_it_is_stopped_at_its_start_but_one_that_was_cut_off(path, monkeypatch):
    before = path.read_bytes()

    def refuses(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lit_epgan.carriers.contributions.csv.writer", refuses)
    with pytest.raises(KeyboardInterrupt):
        Contributions(path).note(3, {})
    assert path.read_bytes() == before
    read = read_contributions(path)
    with path.open("a") as file:
        file.write("3,a,1")
    assert read_contributions(path) == read


@pytest.mark.parametrize(
    ("size", "words"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (1_234_567, "1.2 MB"), (10**13, "10.0 TB")]
)
def test_bytes_have_a_unit(size, words):
    assert in_words(size) == words
