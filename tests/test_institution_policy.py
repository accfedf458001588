"""An institution's policy holds for all that its records pay, by noise that nobody can take off, in every command."""

from typing import Any

import pytest

from lit_epgan.callbacks import FederationCallback
from lit_epgan.carriers.policy import Policy
from lit_epgan.cli.main import main
from lit_epgan.privacy import CentralNoise, RecordNoise
from tests.federations import federation, fit
from tests.modules import Regression
from tests.refusals import assert_refused

RULES = Policy.of({"mechanisms": ["RecordNoise"], "epsilon": 4, "delta": 1e-6}, "policy.yaml")


def planned(mechanism: Any) -> float | None:
    fit(Regression(), federation(), 1, mechanism=mechanism)
    found: float | None = mechanism.own_epsilon(RULES.delta)
    return found


def test_the_mechanisms_delta_is_not_the_policys(tmp_path, monkeypatch):
    """At its own delta of 1 % the mechanism's epsilon is below 4, and at the policy's above."""
    monkeypatch.chdir(tmp_path)
    mechanism = RecordNoise(1.0, 1.3, delta=0.01)
    epsilon, own = planned(mechanism), mechanism.own_epsilon()
    assert own is not None
    assert own < 4
    assert_refused("epsilon is 4, and .* is planned at delta 1e-06", RULES.check_plan, "FedAvg", "RecordNoise", epsilon)
    assert planned(CentralNoise(1.0, 1.0)) is None


def test_noise_that_repeats_and_an_epsilon_of_nothing_do_not_pass():
    RULES.check_plan("FedAvg", "RecordNoise", 3.9)
    assert_refused("noise_seed is set: whoever knows it", RULES.check_plan, "FedAvg", "RecordNoise", 3.9, True)
    only = Policy.of({"mechanisms": ["RecordNoise"]}, "policy.yaml")
    assert_refused("noise_seed is set", only.check_plan, "FedAvg", "RecordNoise", None, True)
    assert_refused("0 is planned, for which no step", RULES.check_plan, "FedAvg", "RecordNoise", 0.0)
    Policy().check_plan("FedAvg", "RecordNoise", None, True)


@pytest.mark.parametrize(
    "rule", [{"epsilon": 0}, {"epsilon": float("inf")}, {"delta": 0.9}, {"delta": 0}, {"cohort": -1}]
)
def test_rules_out_of_their_range_are_refused(rule):
    assert_refused(
        f"the policy policy.yaml: {next(iter(rule))} is .*; it must lie between", Policy.of, rule, "policy.yaml"
    )


@pytest.mark.slow
def test_a_policy_that_is_missing_or_that_nobody_keeps_to_is_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
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


def test_a_policy_is_looked_at_when_the_federation_is_made(tmp_path):
    assert_refused(r"none\.yaml cannot be read", FederationCallback, policy=str(tmp_path / "none.yaml"))
