"""What is written to a ledger counts, whoever writes at the same time and whoever is killed."""

import contextlib
import json
import math
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from lit_epgan.cli.main import main, show
from lit_epgan.errors import UserError
from lit_epgan.privacy import Budget, Ledger, Queries, Releases, spent
from tests.refusals import assert_refused

ONE = Releases(4.0, 1)


def test_a_run_pays_for_its_plan_until_it_ends_and_then_for_what_it_made(tmp_path: Path) -> None:
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


def test_a_dead_run_in_the_same_folder_keeps_what_it_made_and_frees_the_rest(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    budget = Budget(spent([ONE.times(3)], 1e-5).epsilon, 1e-5)
    dead = ledger.begin("run", ONE.times(3), budget=budget)
    ledger.release(dead)
    ledger.begin("run", ONE.times(2), budget=budget)
    assert ledger.read().spent().epsilon == spent([ONE.times(3)], 1e-5).epsilon


def test_a_resumed_run_goes_on_with_its_account(tmp_path: Path) -> None:
    """Of ten rounds two were released, the second one after the last checkpoint: nine are still to come."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.begin("run", ONE.times(10))
    ledger.release(name)
    ledger.release(name)
    assert ledger.begin("run", ONE.times(9), before=ledger.resumed("run")) == name
    (account,) = ledger.read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (2, 11, False)
    with_more_noise = ledger.begin("run", Releases(5.0, 1), before=ledger.resumed("run"))
    assert with_more_noise != name
    assert ledger.read().accounts[name].ended


def test_the_budget_is_kept_before_anything_is_released(tmp_path: Path) -> None:
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


def test_disjoint_groups_do_not_add_up_and_all_users_count_for_each(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for group, count in (("low accuracy", 3), ("high accuracy", 2), ("all users", 1)):
        ledger.begin(group, ONE.times(count), group=group)
    book = ledger.read()
    assert book.spent("low accuracy").epsilon == spent([ONE.times(4)], 1e-5).epsilon
    assert book.spent("high accuracy").epsilon == spent([ONE.times(3)], 1e-5).epsilon
    assert book.total().epsilon == book.spent("low accuracy").epsilon


def _begin_and_release(path: Path, number: int) -> None:
    ledger = Ledger(path)
    name = ledger.begin(f"run {number}", ONE.times(20))
    for _ in range(20):
        ledger.release(name)


def test_concurrent_runs_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    runs = [context.Process(target=_begin_and_release, args=(path, number)) for number in range(4)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert sorted(a.made for a in Ledger(path).read().accounts.values()) == [20] * 4
    assert all(json.loads(line) for line in path.read_text().splitlines())


def _begin_within(path: Path, number: int, together: Any, budget: Budget) -> None:
    together.wait()
    with contextlib.suppress(UserError):
        Ledger(path).begin(f"run {number}", ONE, budget=budget)


def test_runs_that_begin_at_the_same_moment_do_not_pass_the_budget_together(tmp_path: Path) -> None:
    path, budget = tmp_path / "ledger.jsonl", Budget(spent([ONE.times(3)], 1e-5).epsilon, 1e-5)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(8)
    runs = [context.Process(target=_begin_within, args=(path, number, together, budget)) for number in range(8)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(60)
    assert len(Ledger(path).read().accounts) == 3


def test_a_line_cut_off_by_a_kill_was_no_release_and_any_other_damage_is_named(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    name = ledger.begin("run", ONE.times(2))
    with ledger.path.open("ab") as file:
        file.write(b'{"kind": "rele')
    ledger.release(name)
    assert ledger.read().accounts[name].made == 1
    ledger.path.write_text(ledger.path.read_text().replace('"begin"', '"bogus"'))
    assert_refused(r"line 1 of .* is not one of a ledger .*: what was spent cannot be told", ledger.read)
    assert_refused(r"ledger .* cannot be used: Is a directory", Ledger(tmp_path).read)


def test_a_line_cut_off_anywhere_was_none(tmp_path: Path) -> None:
    """Just before its last brace, too, where it ends in that of the plan within."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.begin("run", ONE.times(2))
    whole = ledger.path.read_bytes().rstrip()
    assert whole.endswith(b"}}")
    for length in range(1, len(whole)):
        ledger.path.write_bytes(whole[:length])
        assert not ledger.read().accounts
    ledger.path.write_bytes(whole)
    assert len(ledger.read().accounts) == 1


def test_it_is_shown_as_a_table_with_what_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("releases", "sentence"),
    [
        (Releases(2.5), "one release with noise multiplier 2.5, all users take part"),
        (Releases(1.0, 2, unit="record"), "2 releases with noise multiplier 1, all records take part"),
        (
            Releases(1.0, 3, "fixed", 0.1, 500),
            "3 releases with noise multiplier 1, 50 of 500 users, drawn without replacement",
        ),
        (
            Releases(1.0, 1, "poisson", 0.25, unit="record"),
            "one release with noise multiplier 1, each record with probability 0.25",
        ),
        (
            Releases(1.0, 3, separation=2),
            "3 participations with noise multiplier 1, each user at most once in 2 rounds",
        ),
        (
            Releases(1.0, 1, separation=4),
            "one participation with noise multiplier 1, each user at most once in 4 rounds",
        ),
        (Releases(math.inf, epsilon=0.5), "one release, all users take part, and (0.5, 0) of its own"),
        (
            Releases(1.0, delta=1e-6),
            "one release with noise multiplier 1, all users take part, and (0, 1e-06) of its own",
        ),
    ],
)
def test_releases_are_told(releases: Releases, sentence: str) -> None:
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


def test_the_noise_is_there(tmp_path):
    answer = queries(tmp_path).sum([torch.zeros(40_000)], 2.5, "zeros")
    assert float(answer.std()) == pytest.approx(2.5, rel=0.02)
    assert not torch.equal(answer, queries(tmp_path).sum([torch.zeros(40_000)], 2.5, "zeros"))


def test_every_answer_stands_in_the_ledger_and_disjoint_groups_do_not_add_up(tmp_path):
    asked = queries(tmp_path)
    for group in ("low", "high"):
        asked.sum([torch.ones(2)], 2.0, "embedding", group)
    book = asked.ledger.read()
    assert [a.made for a in book.accounts.values()] == [1, 1]
    assert book.total() == asked.price(Releases(2.0))
    asked.sum([torch.ones(1)], 2.0, "how many", "low")
    assert asked.ledger.read().total() == asked.price(Releases(2.0, 2))


def test_what_passes_the_budget_reads_nothing(tmp_path):
    asked = queries(tmp_path, budget=1.0)

    def read():
        raise AssertionError("data were read")
        yield

    assert_refused(r"allows epsilon 1 .* nothing was read", asked.sum, read(), 1.0, "too much")
    assert_refused("there is no user to ask", asked.sum, [], 40.0, "nobody")


def test_a_question_that_fails_costs_nothing(tmp_path):
    def broken():
        yield torch.ones(2)
        raise ValueError("a user's data are damaged")

    asked = queries(tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        asked.sum(broken(), 2.0, "embedding")
    (account,) = asked.ledger.read().accounts.values()
    assert (account.made, account.ended) == (0, True)
    assert asked.ledger.read().total().epsilon == 0
