"""What leaves an institution: listed before it leaves, and refused where its own policy says so."""

import csv

import pytest
import torch

from lit_epgan.carriers.policy import Policy, ReportFilter
from lit_epgan.engine.messages import Count, Report, Task, Weighted
from lit_epgan.privacy import CentralNoise, RecordNoise, Releases, spent
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


def test_a_files_rules_are_the_policy():
    assert Policy.of({"epsilon": 2, "cohort": None}, "policy.yaml") == Policy(epsilon=2)
