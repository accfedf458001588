"""The page's parts that are computed: the verdict, where an interval is drawn, what is left, and text made safe."""

import base64
from dataclasses import replace

import pytest
import torch

from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection import Ask, Check, Findings, ImageView, Inspection, Panel
from lit_epgan.inspection.inspection import drawn, page, uri, verdict
from lit_epgan.privacy import Ledger, Queries

CHECK = Check("a - b", "+0.10 against +0.20", -0.1, -0.3, 0.2, 0.1, 0.4, False, "a note")


def test_an_interval_is_drawn_to_its_scale():
    """From -0.4 at 0 to 0.4 at 100; what lies beyond is drawn at the edge."""
    assert drawn(CHECK) == {"low": 12.5, "high": 75.0, "estimate": 37.5, "band_low": 37.5, "band_high": 62.5}
    assert drawn(replace(CHECK, low=-9.0, high=float("inf")))["low"] == 0
    assert drawn(replace(CHECK, low=-9.0, high=float("inf")))["high"] == 100


def test_the_verdict_counts_alarms():
    alarm = replace(CHECK, alarm=True)
    assert verdict([]) == "Nothing could be compared"
    assert verdict([CHECK]) == "No alarm from 1 detectors"
    assert verdict([alarm, CHECK, alarm]) == "2 of 3 detectors raise an alarm"


def test_a_picture_is_within_the_page():
    assert base64.b64decode(uri(b"\x89PNG").removeprefix("data:image/png;base64,")) == b"\x89PNG"


@pytest.mark.parametrize(("budget", "left"), [(None, "No budget is set."), (3.0, "of the budget is left.")])
def test_a_page_tells_the_price_and_what_is_left(budget, left, tmp_path):
    ask = Ask(Queries(Ledger(tmp_path / "ledger.jsonl"), budget=budget), 2.0, "a <look>")
    Ask(ask.queries, 4.0, "an <earlier> look")([torch.ones(1)])
    panels = [Panel("<b>", ["a line"], b"\x89PNG"), Panel("words", words=[("<w>", "3.0")]), Panel("few", refused="no")]
    findings = Findings(
        panels, [replace(CHECK, alarm=True, estimate=0.2), CHECK], ["a sum"], ["look there"], "rates", "to read"
    )
    inspection = Inspection(WritersDataModule(), ImageView(), title="Why?", description="One.\n\nTwo.")
    html = page(inspection, findings, ask, "python -m lit_epgan inspect --x \udcff")
    cost = f"This inspection: {ask.price}".replace("'", "&#39;")
    for expected in ("<h1>Why?</h1>", "<p>One.</p>", "<p>Two.</p>", "&lt;b&gt;", "&lt;w&gt;", "&lt;earlier&gt;",
                     "look there", "rates", "to read", "a sum", "1 of 2 detectors raise an alarm", left, "\\udcff",
                     cost, "one user&#39;s whole data set emptied"):  # fmt: skip
        assert expected in html, expected
    assert html.count("data:image/png") == 1
    assert html.count('tag alarm"') == 1
    assert all(html.count(f'cx="{place}%"') == 1 for place in (75.0, 37.5))
    assert '<div class="verdict alarm">' in html
    nothing = page(inspection, Findings(panels), ask, "a command")
    assert '<div class="verdict none">Nothing could be compared' in nothing
    assert "The detectors" not in nothing
    assert "whoever knows the seed" not in html
    if budget is not None:
        total = ask.queries.ledger.read().total().epsilon
        assert f"Epsilon {budget - total:.3g} of" in html
