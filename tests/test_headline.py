"""Which logged names are headline metrics, and which way they are better."""

import pytest

from lit_epgan.runs.loggers import best_of, headlines


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("fid", "min"),
        ("fid_digits", "min"),
        ("is_digits", "max"),
        ("wer_dev", "min"),
        ("val_accuracy", "max"),
        ("test_auroc", "max"),
        ("val_loss", "min"),
        ("loss", None),
        ("loss/generator", None),
        ("island", None),  # no family's name
        ("fidelity", None),
        ("union/fid_digits", None),
        ("accuracy/client/ward-a", None),
        ("client/steps", None),
    ],
)
def test_a_headline_metric_is_known_by_its_name(name: str, best: str | None) -> None:
    assert best_of(name) == best


def test_one_of_each_family_the_shortest_name() -> None:
    names = [
        "val_loss",
        "accuracy",
        "val_accuracy",
        "fid_digits_val",
        "is_digits",
        "fid_digits",
        "loss",
        "wer_low",
        "wer",
    ]
    assert headlines(names) == ["fid_digits", "is_digits", "wer", "accuracy", "val_loss"]
