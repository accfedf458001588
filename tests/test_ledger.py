"""What is written to a ledger counts, whoever writes at the same time and whoever is killed."""

import contextlib
import json
import math
import multiprocessing

import pytest
import torch
from rich.console import Console

from lit_epgan.cli.main import main, show
from lit_epgan.engine import Everyone, Plan
from lit_epgan.engine.mechanisms import LocalPlan
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import Budget, CentralNoise, Ledger, Queries, RecordNoise, Releases, spent
from tests.refusals import assert_refused

ONE = Releases(4.0, 1)


def test_a_run_pays_for_its_plan_until_it_ends_and_then_for_what_it_made(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.begin("run", ONE.times(10))
    ledger.release(name)
    assert ledger.read().spent().epsilon == spent([ONE.times(10)], 1e-5).epsilon
    ledger.end(name)
    ledger.end(name)
    assert ledger.read().spent().epsilon == spent([ONE], 1e-5).epsilon
    other = ledger.begin("another", ONE.times(3))
    ledger.end(other)
    assert ledger.read().spent().epsilon == spent([ONE], 1e-5).epsilon


def test_a_dead_run_in_the_same_folder_keeps_what_it_made_and_frees_the_rest(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    budget = Budget(spent([ONE.times(3)], 1e-5).epsilon, 1e-5)
    dead = ledger.begin("run", ONE.times(3), budget=budget)
    ledger.release(dead)
    ledger.begin("run", ONE.times(2), budget=budget)
    assert ledger.read().spent().epsilon == spent([ONE.times(3)], 1e-5).epsilon


def test_a_resumed_run_goes_on_with_its_account(tmp_path):
    """Of ten rounds two were released, the second one after the last checkpoint: nine are still to come."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.begin("run", ONE.times(10))
    ledger.release(name)
    ledger.release(name)
    assert ledger.begin("run", ONE.times(9), before=ledger.read().accounts[name]) == name
    (account,) = ledger.read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (2, 11, False)
    with_more_noise = ledger.begin("run", Releases(5.0, 1), before=ledger.read().accounts[name])
    assert with_more_noise != name
    assert ledger.read().accounts[name].ended


@pytest.mark.parametrize("lines", [0, 1])
def test_nobody_begins_on_a_ledger_that_has_lost_its_last_lines(tmp_path, lines):
    """A run that knows nothing of it began a ledger of its own, and stated the cost of its own releases."""
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.release(ledger.begin("run", ONE))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))
    if not lines:
        path.unlink()
    assert_refused("has lost its last lines, or all: ledger.jsonl.last beside it", Ledger(path).begin, "next", ONE)
    (tmp_path / "ledger.jsonl.last").unlink()
    Ledger(path).begin("next", ONE)


def test_the_budget_is_kept_before_anything_is_released(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    budget = Budget(spent([ONE.times(5)], 1e-5).epsilon, 1e-5)
    ledger.begin("first", ONE.times(4), budget=budget)
    before = ledger.path.read_bytes()
    with pytest.raises(UserError, match=r"allows epsilon 2\.258.* it would be 2\.5: nothing was read"):
        ledger.begin("second", ONE.times(2), budget=budget)
    assert ledger.path.read_bytes() == before
    name = ledger.begin("second", ONE, budget=budget)
    ledger.release(name)
    assert_refused("allows epsilon", ledger.release, name)
    assert_refused("has the budget", ledger.begin, "third", ONE, budget=Budget(100.0, 1e-5))


def test_disjoint_groups_do_not_add_up_and_all_users_count_for_each(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for group, count in (("low accuracy", 3), ("high accuracy", 2), ("all users", 1)):
        ledger.begin(group, ONE.times(count), group=group)
    book = ledger.read()
    assert book.spent("low accuracy").epsilon == spent([ONE.times(4)], 1e-5).epsilon
    assert book.spent("high accuracy").epsilon == spent([ONE.times(3)], 1e-5).epsilon
    assert book.total().epsilon == book.spent("low accuracy").epsilon


def _begin_and_release(path, number: int) -> None:
    ledger = Ledger(path)
    name = ledger.begin(f"run {number}", ONE.times(20))
    for _ in range(20):
        ledger.release(name)


def test_concurrent_runs_lose_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=_begin_and_release, args=(path, number)) for number in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert sorted(a.made for a in Ledger(path).read().accounts.values()) == [20] * 4
    assert all(json.loads(line) for line in path.read_text().splitlines())


def _begin_within(path, number: int, together, budget: Budget) -> None:
    together.wait()
    with contextlib.suppress(UserError):
        Ledger(path).begin(f"run {number}", ONE, budget=budget)


def test_runs_that_begin_at_the_same_moment_do_not_pass_the_budget_together(tmp_path):
    path, budget = tmp_path / "ledger.jsonl", Budget(spent([ONE.times(3)], 1e-5).epsilon, 1e-5)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(8)
    runs = [context.Process(target=_begin_within, args=(path, number, together, budget)) for number in range(8)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert len(Ledger(path).read().accounts) == 3


def written(path) -> bytes:
    """A small ledger: a budget, two runs, one of several groups."""
    ledger = Ledger(path)
    name = ledger.begin("a run", ONE.times(3), budget=Budget(6.0, 1e-5))
    names = ledger.begin_groups("another", {"east": ONE.times(2), "west": ONE})
    for each in (name, names["east"], name):
        ledger.release(each)
    ledger.end(*names.values())
    return path.read_bytes()


def test_a_line_cut_off_by_a_kill_was_no_release(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.begin("run", ONE.times(2))
    with ledger.path.open("ab") as file:
        file.write(b'{"kind": "rele')
    ledger.release(name)
    assert Ledger(ledger.path).read().accounts[name].made == 1
    assert b'"rele{' not in ledger.path.read_bytes()
    assert_refused(r"ledger .* cannot be used: Is a directory", Ledger(tmp_path).read)


def test_a_line_cut_off_anywhere_was_none(tmp_path):
    """Just before its last brace, too. With all of it but its end of line it counts, and the next follows it."""
    path = tmp_path / "ledger.jsonl"
    name = Ledger(path).begin("run", ONE.times(2))
    whole = path.read_bytes().rstrip()
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        assert not Ledger(path).read().accounts
    path.write_bytes(whole)
    Ledger(path).release(name)
    assert Ledger(path).read().accounts[name].made == 1


def test_every_byte_that_is_changed_is_found(tmp_path):
    path = tmp_path / "ledger.jsonl"
    whole = written(path)
    for place in range(len(whole)):
        changed = whole[place] ^ (0x01, 0x20, 0xFF)[place % 3]
        path.write_bytes(whole[:place] + bytes([changed]) + whole[place + 1 :])
        assert_refused(r"line \d+ of .*: what was spent cannot be told", Ledger(path).read)


def test_every_line_that_is_removed_doubled_or_moved_is_found(tmp_path):
    """A removed tail is found by whoever has written it, and by nobody else."""
    path = tmp_path / "ledger.jsonl"
    lines = written(path).splitlines(keepends=True)
    assert len(lines) == 9
    for k in range(len(lines) - 1):
        for others in (lines[:k] + lines[k + 1 :], [*lines[: k + 1], *lines[k:]], [*lines[:k], lines[k + 1], lines[k]]):
            path.write_bytes(b"".join(others))
            assert_refused("is not as it was written, or a line before it is missing", Ledger(path).read)
    path.write_bytes(b"".join(lines[:-1]))
    assert len(Ledger(path).read().accounts) == 3


@pytest.mark.parametrize("damage", ["emptied", "deleted", "cut off", "replaced"])
def test_a_ledger_that_is_damaged_while_a_run_goes_on_is_told_in_a_sentence(tmp_path, damage):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.begin("run", ONE.times(4))
    ledger.release(name)
    if damage == "deleted":
        ledger.path.unlink()
    else:
        lines = ledger.path.read_bytes().splitlines(keepends=True)
        other = tmp_path / "other.jsonl"
        Ledger(other).begin("run", ONE)
        kept = {"emptied": b"", "cut off": b"".join(lines[:-1]), "replaced": other.read_bytes()}
        ledger.path.write_bytes(kept[damage])
    for act in (lambda: ledger.release(name), ledger.read, lambda: ledger.begin("run", ONE)):
        assert_refused("has lost lines that this run has written: .* restore the file", act)


def test_a_key_of_the_owners_keeps_others_from_writing(tmp_path, monkeypatch):
    path, key = tmp_path / "ledger.jsonl", tmp_path / "key"
    key.write_bytes(b"of the owner")
    monkeypatch.setenv("LIT_EPGAN_LEDGER_KEY", str(key))
    whole = written(path)
    assert len(Ledger(path).read().accounts) == 3
    for other in (b"of somebody else", b""):
        key.write_bytes(other)
        assert_refused("another key than LIT_EPGAN_LEDGER_KEY names|is empty", Ledger(path).read)
    monkeypatch.delenv("LIT_EPGAN_LEDGER_KEY")
    assert_refused("line 1 of", Ledger(path).read)
    assert whole == path.read_bytes()


def test_who_goes_on_after_its_account_was_ended_is_held_to_the_budget(tmp_path):
    """Two trainers of one script in one folder: the second ends the first one's account, and the first goes on."""
    budget = Budget(spent([ONE.times(4)], 1e-5).epsilon, 1e-5)
    first, second = Ledger(tmp_path / "ledger.jsonl"), Ledger(tmp_path / "ledger.jsonl")
    one = first.begin("script", ONE.times(3), budget=budget)
    second.begin("script", ONE.times(3), budget=budget)
    first.release(one)
    assert_refused("allows epsilon", first.release, one)


def test_a_limit_is_set_once_and_holds_for_runs_that_give_none(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.begin("first", ONE, budget=Budget(None, 1e-4))
    ledger.begin("second", ONE, budget=Budget(3.0, 1e-5))
    assert ledger.read().budget == Budget(3.0, 1e-5)
    assert_refused("allows epsilon 3", ledger.begin, "third", ONE.times(30), budget=Budget(None, 1e-3))
    assert_refused("has the budget", ledger.begin, "third", ONE, budget=Budget(4.0, 1e-5))


def test_what_dead_processes_have_reserved_is_given_back(tmp_path, capsys):
    path = tmp_path / "ledger.jsonl"
    dead = multiprocessing.get_context("fork").Process(target=_begin_and_die, args=(path,))
    dead.start()
    dead.join(60)
    alive = Ledger(path).begin("alive", ONE.times(5))
    before = Ledger(path).read().total().epsilon
    assert main(["privacy", "give-back", str(path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "dead: 43 of 44 reserved releases are given back, and 1 stays" in told
    assert f"from epsilon {before:.3g} to {spent([ONE.times(6)], 1e-5).epsilon:.3g}" in told
    book = Ledger(path).read()
    assert {a.what: a.releases.count for a in book.accounts.values()} == {"dead": 1, "alive": 5}
    assert not book.accounts[alive].ended
    assert main(["privacy", "give-back", str(path)]) == 0
    assert "Nothing is given back" in capsys.readouterr().out


def _begin_and_die(path) -> None:
    ledger = Ledger(path)
    ledger.release(ledger.begin("dead", ONE.times(44)))


def test_it_is_shown_as_a_table_with_what_is_left(tmp_path, capsys):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.end(ledger.begin("runs/[/]", ONE.times(4), budget=Budget(3.0, 1e-5)))
    ledger.release(ledger.begin("runs/digits", ONE.times(2), budget=Budget(3.0, 1e-5)))
    console = Console(width=200, record=True)
    show(ledger.read(), console)
    shown = console.export_text()
    assert "runs/[/]" in shown
    assert "1 of 2 made, all reserved" in shown
    price = spent([ONE.times(2)], 1e-5)
    assert f"all together: {price}" in shown
    assert f"{3 - price.epsilon:.3g} is left" in shown
    capsys.readouterr()
    assert main(["privacy", "show", str(ledger.path)]) == 0
    assert "is left" in capsys.readouterr().out
    assert main(["privacy", "show", str(tmp_path / "none")]) == 2
    assert main(["privacy"]) == 2
    assert main(["privacy", "--help"]) == 0


AT_1 = "with noise multiplier 1"


@pytest.mark.parametrize(
    ("releases", "sentence"),
    [
        (Releases(2.5), "one release with noise multiplier 2.5, all users take part"),
        (Releases(1.0, 2, unit="record"), "2 releases with noise multiplier 1, all records take part"),
        (Releases(1.0, 3, "fixed", 0.1, 500), f"3 releases {AT_1}, 50 of 500 users, drawn without replacement"),
        (Releases(1.0, 1, "poisson", 0.25, unit="record"), f"one release {AT_1}, each record with probability 0.25"),
        (Releases(1.0, 3, separation=2), f"3 participations {AT_1}, each user at most once in 2 rounds"),
        (Releases(1.0, 1, separation=4), f"one participation {AT_1}, each user at most once in 4 rounds"),
        (Releases(math.inf, epsilon=0.5), "one release, all users take part, and (0.5, 0) of its own"),
        (Releases(1.0, delta=1e-6), f"one release {AT_1}, all users take part, and (0, 1e-06) of its own"),
    ],
)
def test_releases_are_told(releases, sentence):
    assert str(releases) == sentence


def queries(tmp_path, **settings):
    return Queries(Ledger(tmp_path / "ledger.jsonl"), **settings)


@pytest.mark.parametrize("entry", [1e-3, 1.0, 1e300, math.nan, math.inf])
def test_no_user_moves_the_sum_by_more_than_one(tmp_path, entry):
    """The same noise twice: the difference is what the user has moved."""
    others, user = [torch.full((3,), 0.2)] * 4, torch.full((3,), entry, dtype=torch.float64)
    without = queries(tmp_path, noise_seed=3).sum(others, 1.0, "a sum")
    moved = queries(tmp_path, noise_seed=3).sum([*others, user], 1.0, "a sum") - without
    expected = min(entry * math.sqrt(3), 1.0) if math.isfinite(entry * entry) else 0.0
    assert float(moved.norm()) == pytest.approx(expected, abs=1e-12)


def test_answers_have_noise_and_stand_in_the_ledger(tmp_path):
    answer, again = (queries(tmp_path / "zeros").sum([torch.zeros(40_000)], 2.5, "zeros") for _ in range(2))
    assert float(answer.std()) == pytest.approx(2.5, rel=0.02)
    assert not torch.equal(answer, again)
    asked = queries(tmp_path)
    for group in ("low", "high"):
        asked.sum([torch.ones(2)], 2.0, "embedding", group)
    book = asked.ledger.read()
    assert [a.made for a in book.accounts.values()] == [1, 1]
    assert book.total() == asked.price(Releases(2.0))
    asked.sum([torch.ones(1)], 2.0, "how many", "low")
    assert asked.ledger.read().total() == asked.price(Releases(2.0, 2))


def test_selections_whose_deltas_use_the_ledgers_up_are_refused_before(tmp_path):
    """Two at half of the ledger's delta each had no finite epsilon; a smaller delta has."""
    asked, selected = queries(tmp_path), Releases(4.0, delta=5e-6)
    with asked.account(selected, "words") as release:
        release()
    assert_refused("no epsilon would be finite.*Nothing was read.*smaller", asked.refuse_beyond_budget, [selected])
    with pytest.raises(UserError, match="no epsilon would be finite"), asked.account(selected, "words again"):
        pass
    with asked.account(Releases(4.0, delta=2e-6), "words at a smaller delta") as release:
        release()
    assert asked.ledger.read().total().epsilon < 3


def test_a_delta_that_guarantees_nothing_is_refused_with_the_reason(tmp_path):
    for delta in (0.9, 0.02, 0.0, -1.0, math.nan):
        for kind in (CentralNoise, RecordNoise):
            assert_refused("publishes each one's data with a probability of delta", kind, 1.0, 1.0, delta=delta)
        assert_refused("delta is .*; it must lie between 0 and 0.01", queries, tmp_path, delta=delta)
    # 340 users: to publish one of them at random is (0, 1/340)-private
    mechanism = CentralNoise(1.0, 1.0, delta=0.003)
    assert_refused("there are 340 users.*give less than 0.00294", mechanism.begin, Plan(Everyone(), 340, 1))
    mechanism.begin(Plan(Everyone(), 333, 1))
    local = LocalPlan({0: 50, 1: 400}, ["a", "b"], 10, lambda _: {0: 5, 1: 40})
    asked = Plan(Everyone(), 2, 1, rounds=range(1), local=local)
    assert_refused("there are 400 records", RecordNoise(1.0, 1.0, delta=0.003).begin, asked)


def test_what_passes_the_budget_or_fails_costs_nothing(tmp_path):
    asked = queries(tmp_path, budget=1.0)

    def read():
        raise AssertionError("data were read")
        yield

    assert_refused(r"allows epsilon 1 .* nothing was read", asked.sum, read(), 1.0, "too much")
    assert_refused("there is no user to ask", asked.sum, [], 40.0, "nobody")

    def broken():
        yield torch.ones(2)
        raise ValueError("a user's data are damaged")

    asked = queries(tmp_path / "damaged")
    with pytest.raises(ValueError, match="damaged"):
        asked.sum(broken(), 2.0, "embedding")
    (account,) = asked.ledger.read().accounts.values()
    assert (account.made, account.ended) == (0, True)
    assert asked.ledger.read().total().epsilon == 0
