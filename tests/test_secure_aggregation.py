"""A federation whose server sees sums of masked reports alone ends with the model of one whose server sees them all."""

import contextlib
import csv
import json
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from scipy import stats

from lit_epgan.carriers.policy import Policy
from lit_epgan.carriers.protocol import WORDS, FederateSettings, Frame, Kind
from lit_epgan.carriers.secure_aggregation import MASKED, MaskedSum, Masking
from lit_epgan.engine import Algorithm, Exchange, FixedSize, Median, Round, Rounds, Server
from lit_epgan.engine.messages import Count, Task, Weighted
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import Answer
from lit_epgan.federated import FedSeq
from lit_epgan.lib.errors import UserError
from tests.certificates import Root
from tests.pipe_federations import half
from tests.processes import run
from tests.refusals import assert_refused
from tests.secure_institutions import NAMES, Secure, without_masks
from tests.test_remote import Site, assert_equal, ended

pytestmark = pytest.mark.filterwarnings("ignore:secure aggregation without certificates", "ignore:.*self.log")
SECURE = FederateSettings(patience=60.0, secure=True)
RUNS = [  # with entries of their own in their reports; others are in ``tests.test_remote``
    ("--module", "regression", "--algorithm", "scaffold"),
    ("--module", "regression", "--noise-seed", "1", "--unit", "record"),
    ("--module", "points", "--algorithm", "embedding_sites"),
]


@pytest.fixture
def secure(tmp_path):
    made: list[Secure] = []

    def make(*args: Any, **options: Any) -> Secure:
        made.append(Secure(tmp_path, *args, **options))
        return made[-1]

    yield make
    for each in made:
        each.end()


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_masks_leave_the_model_as_it_is(tmp_path, options):
    """Processes of their own; float64, five rounds, cohorts of 3 of 4 clients, dropout, buffers, state, noise."""
    run(tmp_path / "alone", *options)
    ended(Site(tmp_path / "several", SECURE).all_started(*options))
    assert_equal(tmp_path / "several" / "server", tmp_path / "alone")


@pytest.mark.slow
def test_an_institution_that_wants_masks_takes_part_in_nothing_else(tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text("secure: true\n")
    process = Site(tmp_path).started(NAMES[0], "--policy", str(policy))
    assert process.wait() != 0
    assert "secure is True, and the federation's server sees every report by itself" in process.printed()


def cut(institution, server, round_):
    """Stands between an institution and the server until the institution sends a masked answer in this round."""

    def hand_on(source: Any, target: Any, stops: Callable[[Frame], bool]) -> None:
        with contextlib.suppress(EOFError, OSError, TypeError):
            while not stops(Frame.read(data := source.recv_bytes())):
                target.send_bytes(data)
            for each in (source, target):  # a thread that waits for it would keep a link that is merely closed
                with socket.socket(fileno=os.dup(each.fileno())) as end:
                    end.shutdown(socket.SHUT_RDWR)

    def in_round(note: Frame) -> bool:
        return note.kind is Kind.ANSWER and int.from_bytes(note.body[:8], "little") >= round_

    with institution.listener() as listener:
        outside = listener.accept()
    inside = server.called(60.0)
    Thread(target=hand_on, args=(inside, outside, lambda note: False), daemon=True).start()
    hand_on(outside, inside, in_round)


@pytest.mark.slow
def test_processes_go_on_after_a_round_that_is_void(tmp_path):
    """The last client's link is cut when it sends its masked answer; from then on a round with it has two of three."""
    site = Site(tmp_path / "several", SECURE)
    site.tap(NAMES[-1], cut, 1)
    processes = site.all_started("--module", "regression")
    assert processes.pop(NAMES[-1]).wait() != 0
    ended(processes)
    printed = processes["server"].printed()
    rows = list(csv.DictReader((tmp_path / "several" / "server" / "contributions.csv").open()))
    asked = {n: [row["client"] for row in rows if row["asked"] == "1" and row["round"] == str(n)] for n in range(5)}
    void = [n for n in range(5) if n >= 1 and NAMES[-1] in asked[n]]
    assert 0 < len(void) < 4
    assert f"round {void[0]} is void: {NAMES[-1]} got lost when the others had masked for it" in printed
    assert all(f"round {n} is void: 2 institutions are ready, of at least 3" in printed for n in void[1:])
    for n in range(5):
        counted = [row["client"] for row in rows if row["counted"] == "1" and row["round"] == str(n)]
        assert counted == ([] if n in void else asked[n])


def test_secure_aggregation_may_be_insisted_on_and_refuses_what_it_cannot_hide(secure):
    Policy.of({"secure": True}, "policy.yaml").check_secure(True)
    Policy.of({"secure": False}, "policy.yaml").check_secure(False)
    Policy().check_secure(False)
    with pytest.raises(UserError, match="secure is True, and the federation's server sees every report by itself"):
        Policy.of({"secure": True}, "policy.yaml").check_secure(False)
    assert_refused("secure is 1; give true or false", Policy.of, {"secure": 1}, "policy.yaml")
    with pytest.raises(UserError, match="Median looks at every client's report by itself"):
        secure(changes=lambda federation: setattr(federation, "aggregator", Median()))
    with pytest.raises(UserError, match="at least 3 institutions, and a round has 2"):
        secure(changes=lambda federation: setattr(federation, "sampler", FixedSize(2)))


def masked_by(institution):
    """All masked words that an institution has sent."""
    answers = [note.body[WORDS:] for note in map(Frame.read, institution.sent) if note.kind is Kind.ANSWER]
    return np.concatenate([load(each)[MASKED].numpy().view(np.uint64) for each in answers])


def test_what_the_server_receives_of_a_client_is_uniform_and_never_the_same(secure):
    """Every bit is a fair coin, byte values have equal shares (p > 1e-6), and a second run with the same data and the
    same model shares no word with the first."""
    found = []
    for _ in range(2):
        federation = secure("scaffold")
        for number in range(4):
            federation.round(number)
        federation.end()
        assert_close(federation.parameters, without_masks(dict.fromkeys(range(4), range(4)), "scaffold"))
        found.append(masked_by(federation.institutions[2]))
    first, second = found
    assert len(first) > 300
    assert not set(first.tolist()) & set(second.tolist())
    for words in (first, second, first - second):
        data = np.frombuffer(words.tobytes(), np.uint8)
        assert stats.chisquare(np.bincount(data, minlength=256)).pvalue > 1e-6
        ones = int(np.unpackbits(data).sum())
        assert stats.binomtest(ones, 8 * len(data)).pvalue > 1e-6


def test_what_a_round_costs_is_known_and_nothing_but_names_shapes_keys_and_masked_numbers_leaves(secure):
    """Steps come as a sum; a masked number takes 8 bytes, and so does one of float64."""
    federation = secure()
    federation.round(0)
    expected = half("fedavg").round(0).budget
    found = federation.budget
    assert found["client/steps"] == expected["client/steps"] > 0
    assert found["client/bytes_down"] == expected["client/bytes_down"]
    assert found["client/bytes_up"] == expected["client/bytes_up"]
    federation.end()
    hello, ready, answer = map(Frame.read, federation.institutions[0].sent)
    assert (hello.kind, ready.kind, answer.kind) == (Kind.HELLO, Kind.READY, Kind.ANSWER)
    told = json.loads(ready.body[WORDS:])
    assert set(told) == {"layout", "announced"}
    assert told["layout"] == {"change": [41], "weight": None, "federation/weight": None, "federation/steps": None}
    assert [len(each) for each in told["announced"]] == [64, 0, 0]
    assert {name: each.shape for name, each in load(answer.body[WORDS:]).items()} == {MASKED: (44,)}


class LostWhenReady(Masking):
    """Gone in round 1 after it was ready."""

    def masked(self, members: bytes) -> bytes:
        if self._ready[0].round == 1:
            raise ConnectionResetError
        return super().masked(members)


class LostAtWork(Masking):
    """Gone in round 1 before it was ready."""

    def ready(self, task: Task, answer: Answer, cohort: int) -> bytes:
        if task.round == 1:
            raise ConnectionResetError
        return super().ready(task, answer, cohort)


def sends(value):
    """One whose update in round 1 has a number of this value."""

    class Sends(Masking):
        def ready(self, task: Task, answer: Answer, cohort: int) -> bytes:
            if task.round == 1:
                tensor = torch.zeros(41).index_fill(0, torch.tensor([3]), value)
                answer.report = {**answer.report, "change": Weighted(tensor, 1.0)}
            return super().ready(task, answer, cohort)

    return Sends


class Short(Masking):
    """Sends too few numbers in round 1."""

    def masked(self, members: bytes) -> bytes:
        round_, data = self._ready[0].round, super().masked(members)
        return save({MASKED: load(data)[MASKED][:-1]}) if round_ == 1 else data


@pytest.mark.parametrize(("kind", "why"), [(LostWhenReady, "its link is broken"), (Short, "what it sent is no answer")])
def test_who_is_lost_after_it_was_ready_makes_the_round_void_and_the_next_one_goes_on(secure, tmp_path, kind, why):
    """As if round 1 had not been: the server's model and control variate, and what the clients keep."""
    federation = secure("scaffold", {2: kind})
    federation.round(0)
    before = federation.parameters.clone()
    with pytest.warns(UserWarning, match="round 1 is void: client-2 got lost when the others had masked for it"):
        federation.round(1)
    assert torch.equal(federation.parameters, before)
    if kind is LostWhenReady:
        federation.round(2)
        federation.round(3)
        assert_close(federation.parameters, without_masks(dict.fromkeys((0, 2, 3), range(4)), "scaffold"))
    rows = list(csv.DictReader((tmp_path / "contributions.csv").open()))
    found = [(row["counted"], row["why"]) for row in rows if row["round"] == "1"]
    assert [counted for counted, _ in found] == ["0"] * 4
    assert found[2][1].startswith(why)
    assert [reason for k, (_, reason) in enumerate(found) if k != 2] == ["the round is void"] * 3


class Twice(Algorithm):
    def round(self, server: Server) -> Rounds:
        for _ in range(2):
            total = yield Exchange({"parameters": server.parameters})
            server.parameters += total.change


@torch.no_grad()
def test_a_round_that_is_void_in_its_second_exchange_leaves_no_trace_of_the_first():
    federation = half("fedavg", Twice())
    before = federation.server.parameters.clone()
    round_ = Round(federation.federation, 0)
    for k in list(round_.asked):
        round_.receive(k, federation.answer(round_.task(k), Private()))
    round_.close()
    assert not torch.equal(federation.server.parameters, before)
    with pytest.warns(UserWarning, match="round 0 is void: for a reason; the server's model stays as it was"):
        round_.void("for a reason")
    assert torch.equal(federation.server.parameters, before)
    assert (round_.exchange, round_.asked, round_.dropped) == (None, [], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (LostAtWork, "its link is broken"),
        (sends(float("nan")), "its update is not finite"),
        (sends(-3e8), "its 'change' has numbers beyond 2.68e+08"),
    ],
)
def test_who_is_lost_before_or_has_nothing_to_be_masked_is_left_out_and_the_round_counts(secure, kind, why):
    federation = secure("scaffold", {1: kind})
    federation.round(0)
    with pytest.warns(UserWarning, match="round 1: client 'client-1' is left out: " + why.replace("+", r"\+")):
        federation.round(1)
    federation.round(2)
    counted = {0: range(4), 1: (0, 2, 3), 2: range(4)}
    assert_close(federation.parameters, without_masks(counted, "scaffold"))


def announces(**entries):
    """One that says in round 1 that it is going to send these entries, too."""

    class Announces(Masking):
        def ready(self, task, answer, cohort):
            if task.round == 1:
                answer.report = {**answer.report, **entries}
            return super().ready(task, answer, cohort)

    return Announces


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"control": Weighted(torch.ones(7), 1.0)}, r"'control' has the shape \[7\], not \[41\]"),
        ({"change": Count(1.0, True)}, "'change' is a number"),
        ({"extra": torch.ones(7)}, "nothing asks for 'extra'"),
    ],
)
def test_whose_masked_answer_would_not_be_as_declared_is_left_out_be_it_the_first(secure, entries, why):
    federation = secure("scaffold", {0: announces(**entries)})
    federation.round(0)
    with pytest.warns(UserWarning, match=f"round 1: client 'client-0' is left out: {why}"):
        federation.round(1)
    assert_close(federation.parameters, without_masks({0: range(4), 1: (1, 2, 3)}, "scaffold"))


def test_a_sum_of_two_is_not_made(secure):
    federation = secure("fedavg", {1: LostAtWork, 3: sends(float("inf"))})
    federation.round(0)
    wanted = "1 is void: 2 institutions are ready, of at least 3; client-1: .*; client-3: its update is not finite"
    with pytest.warns(UserWarning, match=wanted):
        federation.round(1)
    federation.round(2)
    assert_close(federation.parameters, without_masks(dict.fromkeys((0, 2), range(4))))
    assert not [note for note in map(Frame.read, federation.institutions[0].sent) if note.kind is Kind.ANSWER][2:]


def task(round_=0):
    return Task(0, round_, 0, "train", True, {})


def answer(value=1.0, **further):
    report = {"change": Weighted(torch.full((2,), value), 5.0), "weight": Count(5.0, True), **further}
    return Answer(report, Private(), 4)


def ready(maskings, answers, round_=0):
    summed = MaskedSum(1000)
    for name, masking in maskings.items():
        assert summed.take(name, masking.ready(task(round_), answers[name], len(maskings))) == ""
    return summed


def three():
    return {name: Masking(name, NAMES) for name in NAMES[:3]}


def assert_not_masked(sentence, maskings):
    """By the first of them, for the others."""
    told = ready(maskings, dict.fromkeys(maskings, answer())).told()
    assert_refused(sentence, next(iter(maskings.values())).masked, told)


def test_a_sum_is_that_of_the_reports_and_an_entry_that_one_lacks_counts_as_zero():
    """2 x 5, -3 x 5 and 0.5 x 5, an entry of one of them alone, weights and steps."""
    maskings = three()
    answers = dict(zip(NAMES, (answer(2.0), answer(-3.0, new=torch.eye(2)), answer(0.5)), strict=False))
    summed = ready(maskings, answers)
    for masking in maskings.values():
        summed.add(summed.words(masking.masked(summed.told())))
    report, steps = summed.total()
    assert steps == 12
    assert report["weight"] == Count(15.0)
    assert torch.equal(report["change"], torch.full((2,), -2.5, dtype=torch.float64))  # type: ignore[arg-type]
    assert torch.equal(report["new"], torch.eye(2, dtype=torch.float64))  # type: ignore[arg-type]


def test_an_institution_masks_one_answer_to_a_question_once():
    masking = Masking(NAMES[0], NAMES)
    masking.ready(task(3), answer(), 4)
    for again in (3, 2):
        assert_refused(f"the server asks for round {again}, exchange 0 again", masking.ready, task(again), answer(), 4)
    maskings = three()
    summed = ready(maskings, dict.fromkeys(NAMES[:3], answer()))
    maskings[NAMES[0]].masked(summed.told())
    with pytest.raises(UserError, match="where none is ready"):
        maskings[NAMES[0]].masked(summed.told())


@pytest.mark.parametrize("least", [1, 4])
def test_an_institution_takes_part_in_no_sum_that_is_too_small(least):
    members = NAMES[: max(2, least - 1)]
    maskings = {name: Masking(name, NAMES, least=least) for name in members}
    assert_not_masked(f"{len(members)} institutions are ready, and this one takes part in sums of at", maskings)


def test_an_institution_takes_part_with_no_stranger_and_without_certificates_that_is_said():
    maskings = {**three(), "nobody": Masking("nobody", NAMES)}
    assert_not_masked("'nobody' is to be in the sum, and is none of the sites that this one knows", maskings)
    with pytest.warns(UserWarning, match="without certificates: a server that keeps to the protocol learns sums alone"):
        Masking("a", ["a"])


def test_who_is_unsigned_or_knows_other_members_is_refused():
    root = Root()
    identities = {name: root.identity(name) for name in NAMES[:3]}
    maskings = {name: Masking(name, NAMES, identities[name]) for name in NAMES[:2]}
    maskings[NAMES[2]] = Masking(NAMES[2], NAMES)
    assert_not_masked("the key of 'client-2' is refused: it is not signed", maskings)
    # One has a list with a member more, as somebody may have handed it out to that one alone
    root = Root()
    identities = {name: root.identity(name) for name in NAMES[:3]}
    others = replace(root.members, sites={**root.members.sites, "another": "00"})
    identities[NAMES[1]].members = others
    maskings = {name: Masking(name, NAMES, identity) for name, identity in identities.items()}
    assert_not_masked(r"the key of 'client-1' is refused: .* of another members\.json", maskings)


def test_a_server_with_kits_of_its_own_is_no_two_members():
    """It tells a site that its own certificate and its operator's, of the same authority, are the other two clients."""
    root = Root()
    own, site = {name: root.identity(name) for name in ("server", "operator")}, root.identity("north")
    for name in own:
        del root.members.sites[name]  # which lists sites alone
    told = ["north", *own]
    maskings = {"north": Masking("north", told, site, least=3)}
    maskings |= {name: Masking(name, told, identity) for name, identity in own.items()}
    assert_not_masked("'operator' is to be in the sum, and is none of the sites that this one knows", maskings)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"trouble": "its update is not finite"}, "its update is not finite"),
        (
            {"layout": {"large": [10**9], "federation/steps": None}, "announced": ["00", "", ""]},
            "it wants to send more than 1,000 bytes",
        ),
    ],
)
def test_who_does_not_fit_is_no_member(told, why):
    summed = ready(three(), dict.fromkeys(NAMES, answer()))
    assert summed.take(NAMES[3], json.dumps(told).encode()).startswith(why)
    assert list(summed.members) == NAMES[:3]


@pytest.mark.parametrize(
    "told",
    [
        b"?",
        b"{}",
        b'{"layout": {"a": [-1]}, "announced": ["", "", ""]}',
        b"[]",
        b'{"layout": {}, "announced": ["", "", ""]}',
    ],
)
def test_what_does_not_say_that_it_is_ready_is_an_error(told):
    with pytest.raises((ValueError, KeyError, TypeError)):
        MaskedSum(1000).take(NAMES[0], told)


@pytest.mark.parametrize(
    ("name", "algorithm", "why"),
    [
        ("generator_sites", None, "GeneratorSites wants every client's 'site' by itself, which secure"),
        ("fedavg", FedSeq(length=2), "FedSeq wants every client's 'change' by itself"),
    ],
)
def test_algorithms_that_need_single_reports_are_refused_before_anybody_is_asked(name, algorithm, why):
    federation = half(name, algorithm).federation
    federation.secure = True
    assert_refused(why, Round, federation, 0)
