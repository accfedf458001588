"""The pictures of a study's page: their values in words, and drawings in the colours of the page."""

import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imsave

from lit_epgan.cli import plots
from lit_epgan.cli.plots import Picture, drawing, partition_in_words
from lit_epgan.cli.study_run import runs_of
from tests.studies import read_study, run_quietly, write_plan, write_stand_in


def test_who_holds_what_is_said_in_words(tmp_path: Path) -> None:
    table = tmp_path / "partition.csv"
    table.write_text("client,0,1\nnorth,1200,0\nsouth,3,4\n")
    assert partition_in_words(table) == "north holds 1,200 examples of 1 class; south holds 7 examples of 2 classes"
    table.write_text("client,0,1\n" + "".join(f"site-{k},{k},1\n" for k in range(21)))
    # 0 + 1 + ... + 20 + 21
    assert partition_in_words(table) == "21 clients hold 231 examples, from 1 to 21 each"


def test_a_drawing_has_the_page_s_ink_and_no_background() -> None:
    """Black becomes the page's colour, colours stay, and what the text says is not changed."""
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 1], color="#000000")
    axes.plot([1, 0], color="#0072B2")
    axes.set_title("<b> fill #000000")
    svg = drawing(figure, "a")
    assert "stroke: currentColor" in svg
    assert "stroke: #0072b2" in svg
    assert "&lt;b&gt; fill #000000" in svg
    assert svg.count("#000000") == 1
    assert "#ffffff" not in svg
    assert "http" not in svg
    assert svg == drawing(figure, "a")
    ids = [set(re.findall(r'id="([^"]*)"', drawing(figure, name))) for name in ("a", "b")]
    assert ids[0]
    assert not ids[0] & ids[1]  # of two drawings on one page


def test_a_plot_is_as_wide_as_it_was_drawn(tmp_path: Path) -> None:
    imsave(tmp_path / "a.png", np.zeros((10, 300, 3)))
    assert Picture(tmp_path / "a.png", "", "").width == 192  # 300 pixels at 150 an inch are 2 inches of 96


def test_curves_tell_more_methods_apart_than_there_are_colours(tmp_path: Path) -> None:
    """By their dashes; and a long name does not make the figure wider."""
    plan = write_plan(tmp_path)
    more = "".join(f"  more{k}: {{title: {'long ' * 20}{k}, from: clever}}\n" for k in range(9))
    plan.write_text(plan.read_text() + more)
    trial = read_study(plan)
    runs = runs_of(trial, tmp_path / "out")
    run_quietly(runs, write_stand_in(tmp_path))
    figure = plots.curves(trial, trial.metrics[0], runs)
    styles = [(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines]
    assert len(set(styles)) == len(styles) == 12
    figure.draw_without_rendering()
    assert figure.get_tightbbox().width == pytest.approx(4.6, abs=0.15)
    assert figure.axes[0].get_position().height * figure.get_figheight() > 2
