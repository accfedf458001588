"""What leaves an institution: listed before it leaves, and refused where its own policy says so, in every command."""

import csv

import pytest
import torch

from lit_epgan.callbacks import FederationCallback
from lit_epgan.carriers.policy import Policy, ReportFilter
from lit_epgan.cli.main import main
from lit_epgan.engine.messages import Count, Report, Task, Weighted
from lit_epgan.privacy import CentralNoise, RecordNoise, Releases, spent
from tests.federations import federation, fit
from tests.modules import Regression
from tests.refusals import assert_refused
from tests.test_record_noise import plan

TASK = Task(1, 4, 2, "train", True, {})
REPORT: Report = {
    "parameters": Weighted(torch.tensor([3.0, 4.0]), 7.0),
    "networks": torch.zeros(2, 3, dtype=torch.float64),
    "weight": Count(7.0, True),
}


def test_a_report_is_listed_entry_by_entry(tmp_path):
    gate = ReportFilter(Policy(), tmp_path / "institution" / "sent.csv")
    gate.passes(TASK, REPORT)
    gate.passes(TASK, {"weight": Count(2.0)})
    rows = list(csv.reader((tmp_path / "institution" / "sent.csv").open()))
    assert rows == [
        ["round", "exchange", "question", "entry", "shape", "type", "norm", "weight", "bytes"],
        ["4", "2", "train", "parameters", "2", "float32", "5", "7", "8"],
        ["4", "2", "train", "networks", "2 x 3", "float64", "0", "", "48"],
        ["4", "2", "train", "weight", "", "number", "7", "", "8"],
        ["4", "2", "train", "weight", "", "number", "2", "", "8"],
    ]


def test_a_dry_run_lists_and_sends_nothing(tmp_path):
    assert_refused("nothing was sent", ReportFilter(Policy(), tmp_path / "sent.csv", dry=True).passes, TASK, REPORT)
    assert len((tmp_path / "sent.csv").read_text().splitlines()) == 4


def test_what_may_not_leave_is_neither_listed_nor_sent(tmp_path):
    gate = ReportFilter(Policy(entries=["param*", "weight"]), tmp_path / "sent.csv")
    assert_refused(r"entries is \['param\*', 'weight'\], and 'networks' is none of them", gate.passes, TASK, REPORT)
    assert not (tmp_path / "sent.csv").exists()
    gate.passes(TASK, {name: REPORT[name] for name in ("parameters", "weight")})


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Policy(algorithms=["EP"]), "FedAvg is none of them"),
        (Policy(mechanisms=["RecordNoise"]), "none is at work"),
        (Policy(mechanisms=["RecordNoise"], algorithms=["FedAvg"]), "none is at work"),
        (Policy(epsilon=8.0), "no noise of this institution's own is planned"),
    ],
)
def test_a_training_is_refused_before_it_begins(policy, why):
    assert_refused(why, policy.check_plan, "FedAvg", None, None)


def test_a_training_that_keeps_the_rules_passes():
    policy = Policy(["FedAvg", "FedProx"], ["RecordNoise"], 2.0, cohort=3, entries=["parameters"])
    policy.check_plan("FedProx", "RecordNoise", 2.0)
    assert_refused(r"epsilon is 2\.0, and 2\.01 is planned", policy.check_plan, "FedProx", "RecordNoise", 2.01)
    assert_refused("CentralNoise is none of them", policy.check_plan, "FedProx", "CentralNoise", None)
    policy.check_cohort(3)
    assert_refused("cohort is 3, and the round has 2", policy.check_cohort, 2)
    Policy().check_plan("anything", None, None)
    Policy().check_cohort(1)
    assert Policy.of({"epsilon": 2, "cohort": None}, "policy.yaml") == Policy(epsilon=2)


def test_the_institutions_own_epsilon_is_that_of_all_planned_steps():
    mechanism = RecordNoise(1.0, 1.5)
    assert mechanism.own_epsilon() is None
    mechanism.begin(plan({0: 100, 1: 40}, 10, {0: 10, 1: 4}))
    expected = max(spent([kind], 1e-5).epsilon for kind in mechanism._payments.planned.values())
    assert mechanism.own_epsilon() == expected > 0
    assert CentralNoise(1.0, 1.0).own_epsilon() is None  # the server's noise: nothing the institution can vouch for
    assert spent([Releases(1.0)], 1e-5).epsilon > 0


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        (None, "None is no rule"),
        (["algorithms"], "is no rule"),
        ({"algoritms": []}, "algoritms is no rule; there are algorithms, cohort, delta, entries, epsilon, mechanisms"),
        ({"algorithms": "FedAvg"}, "algorithms is 'FedAvg'; give a list"),
        ({"epsilon": "2"}, "epsilon is '2'; give a number"),
        ({"cohort": True}, "cohort is True; give a number"),
    ],
)
def test_a_file_that_is_no_policy_is_refused(rules, why):
    assert_refused(why, Policy.of, rules, "policy.yaml")


RULES = Policy.of({"mechanisms": ["RecordNoise"], "epsilon": 4, "delta": 1e-6}, "policy.yaml")


def planned(mechanism) -> float | None:
    fit(Regression(), federation(), 1, mechanism=mechanism)
    return mechanism.own_epsilon(RULES.delta)


def test_delta_noise_that_repeats_and_an_epsilon_of_nothing(folder, tmp_path):
    """At its own delta of 1 % the mechanism's epsilon is below 4, and at the policy's above."""
    mechanism = RecordNoise(1.0, 1.3, delta=0.01)
    epsilon, own = planned(mechanism), mechanism.own_epsilon()
    assert own is not None
    assert own < 4
    assert_refused("epsilon is 4, and .* is planned at delta 1e-06", RULES.check_plan, "FedAvg", "RecordNoise", epsilon)
    assert planned(CentralNoise(1.0, 1.0)) is None
    RULES.check_plan("FedAvg", "RecordNoise", 3.9)
    assert_refused("noise_seed is set: whoever knows it", RULES.check_plan, "FedAvg", "RecordNoise", 3.9, True)
    only = Policy.of({"mechanisms": ["RecordNoise"]}, "policy.yaml")
    assert_refused("noise_seed is set", only.check_plan, "FedAvg", "RecordNoise", None, True)
    assert_refused("0 is planned, for which no step", RULES.check_plan, "FedAvg", "RecordNoise", 0.0)
    Policy().check_plan("FedAvg", "RecordNoise", None, True)
    for rule in ({"epsilon": 0}, {"epsilon": float("inf")}, {"delta": 0.9}, {"delta": 0}, {"cohort": -1}):
        sentence = f"the policy policy.yaml: {next(iter(rule))} is .*; it must lie between"
        assert_refused(sentence, Policy.of, rule, "policy.yaml")
    assert_refused(r"none\.yaml cannot be read", FederationCallback, policy=str(tmp_path / "none.yaml"))


@pytest.mark.slow
def test_a_policy_that_is_missing_or_that_nobody_keeps_to_is_an_error(folder, tmp_path, capsys):
    (tmp_path / "policy.yaml").write_text("epsilon: 4\n")
    words = ["--config", "polynomial.yaml", "--trainer.logger", "false", "--trainer.max_epochs", "1"]
    assert main(["fit", *words]) == 0
    for command in ("validate", "test", "predict", "fit"):
        more = ["--trainer.default_root_dir", "another"] if command == "fit" else []
        for path, told in (("policy.yaml", "nothing leaves one here"), ("none.yaml", "cannot be read")):
            capsys.readouterr()
            code = main([command, *words, *more, "--federation.policy", path])
            if command != "fit" and path == "policy.yaml":  # an institution tests the model on its own data
                assert code == 0
            else:
                assert code == 2
                assert told in " ".join(capsys.readouterr().err.split())
