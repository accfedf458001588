"""The page of an inspection: one HTML file that needs no other and no network."""

import base64
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.inspection import Inspection, paid
from lit_epgan.inspection.view import Check, Findings
from lit_epgan.privacy.releases import RELATIONS

WIDTH = 100.0  # of an interval's picture


def page(inspection: Inspection, findings: Findings, ask: Ask, command: str) -> str:
    """The page's HTML.

    Args:
        inspection: what was asked.
        findings: what was found.
        ask: how it was asked and paid for.
        command: what repeats it, at the same price.
    """
    environment = Environment(
        loader=PackageLoader("lit_epgan.inspection", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    cost, total = paid(ask)
    budget = ask.queries.ledger.read().budget
    html = environment.get_template("inspection.html").render(
        inspection=inspection,
        findings=findings,
        verdict=verdict(findings.checks),
        drawn=[drawn(check) for check in findings.checks],
        pictures=[panel.picture and uri(panel.picture) for panel in findings.panels],
        samples=[panel.samples and uri(panel.samples) for panel in findings.panels],
        cost=cost,
        total=total,
        relation=RELATIONS[cost.relation],
        left=None if budget.epsilon is None else max(0.0, budget.epsilon - total.epsilon),
        accounts=list(ask.queries.ledger.read().accounts.values()),
        ledger=ask.queries.ledger.path,
        seeded=ask.queries.noise_seed is not None,
        command=command,
        facts=_facts(inspection, ask),
    )
    return html.encode(errors="backslashreplace").decode()  # a path may hold bytes that are not UTF-8


def verdict(checks: Sequence[Check]) -> str:
    """The detectors' answer in a few words."""
    alarms = sum(check.alarm for check in checks)
    if not checks:
        return "Nothing could be compared"
    if not alarms:
        return f"No alarm from {len(checks)} detectors"
    return f"{alarms} of {len(checks)} detectors raise an alarm"


def drawn(check: Check) -> dict[str, float]:
    """Where an interval, its estimate and the band of tolerance stand, from 0 to ``WIDTH``."""

    def place(value: float) -> float:
        return round(WIDTH / 2 * (1 + max(-1.0, min(1.0, value / check.scale))), 2)

    ends = {"low": check.low, "high": check.high, "estimate": check.estimate}
    return {name: place(value) for name, value in ends.items()} | {
        "band_low": place(-check.tolerance),
        "band_high": place(check.tolerance),
    }


def uri(picture: bytes) -> str:
    """A PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def _facts(inspection: Inspection, ask: Ask) -> list[tuple[str, Any]]:
    cost, _ = paid(ask)
    return [
        ("epsilon", f"{cost.epsilon:.3g}"),
        ("delta", f"{cost.delta:g}"),
        ("unit", "a user"),
        ("noise multiplier", f"{ask.noise_multiplier:.3g}"),
        ("selection", str(inspection.rule)),
        ("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
        ("with", f"Python {platform.python_version()}, PyTorch {torch.__version__}"),
    ]
