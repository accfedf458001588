"""A study in several settings."""

import csv
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imsave

from lit_epgan.cli import plots
from lit_epgan.cli.study import study
from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import runs_of
from lit_epgan.errors import UserError
from tests.studies import write_plan, write_stand_in

VARIANTS = """
variants:
  hard: {title: The hard one, set: {data.partition: one_class, model.lr: 0.1}}
  easy:
    title: The easy one
    seeds: [7]
    set: {data.partition: iid}
    methods: {plain: {model.lr: 0.9}, clever: null}
    published: {plain: {fd: "12"}}
pairwise: [plain, union]
ratios: [{metric: fd, of: clever, to: plain}, {metric: fd, of: union, to: plain}]
published: A paper
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = write_plan(tmp_path)
    path.write_text(path.read_text() + VARIANTS)
    return path


def test_each_variant_is_a_study_of_its_own(plan: Path) -> None:
    hard, easy = read_studies(plan)
    assert (hard.variant, easy.variant) == ("hard", "easy")
    assert hard.title == "A trial: The hard one"
    assert hard.seeds == [0, 1, 2]
    assert easy.seeds == [7]
    assert list(easy.methods) == ["plain", "clever"]
    assert hard.pairwise == ["plain", "union"]
    assert easy.pairwise == ["plain"]
    assert [ratio.of for ratio in hard.ratios] == ["clever", "union"]
    assert [ratio.of for ratio in easy.ratios] == ["clever"]
    # the variant's settings first, then the method's own, then the method's in this variant
    assert list(hard.methods["clever"].settings.items())[:2] == [("data.partition", "one_class"), ("model.lr", 0.5)]
    assert hard.methods["plain"].settings == {"data.partition": "one_class", "model.lr": 0.1}
    assert easy.methods["plain"].settings == {"data.partition": "iid", "model.lr": 0.9}
    assert easy.methods["plain"].published == {"fd": "12"}
    assert not hard.methods["plain"].published


def test_all_run_together_each_with_its_own_page_and_known_again(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in = write_stand_in(tmp_path)
    out = tmp_path / "out"
    assert study(["--config", str(plan), "--output", str(out)], stand_in) == 0
    shown = capsys.readouterr().out
    assert "hard/plain/seed-0" in shown
    for variant, runs in (("hard", 9), ("easy", 2)):
        assert (out / variant / "index.html").is_file()
        with (out / variant / "runs.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == runs
        assert {line["variant"] for line in lines} == {variant}
    known = [word for variant in ("hard", "easy") for word in ("--known", str(out / variant / "runs.csv"))]
    assert study(["--config", str(plan), "--output", str(tmp_path / "again"), *known], stand_in) == 0
    assert not list((tmp_path / "again").rglob("calls.txt"))
    for variant in ("hard", "easy"):
        first, second = ((folder / variant / "table.csv").read_text() for folder in (out, tmp_path / "again"))
        assert first == second


def test_pages_show_the_samples_of_every_method_in_all_settings(plan: Path, tmp_path: Path) -> None:
    """A row a method, a column a setting; a method with pictures in one setting alone has no row."""
    stand_in, out, studies = write_stand_in(tmp_path), tmp_path / "out", read_studies(plan)
    words = ["--config", str(plan), "--output", str(out)]
    assert study(words, stand_in) == 0
    assert not (out / "settings.png").exists()
    runs = {each.variant: runs_of(each, out) for each in studies}
    shades = {("plain", "hard"): 0.1, ("plain", "easy"): 0.9, ("clever", "easy"): 0.5}
    for (method, variant), shade in shades.items():
        run = next(run for run in runs[variant] if run.method.name == method)
        (run.folder / "pictures").mkdir()
        imsave(run.folder / "pictures" / f"{run.method.grid}.png", np.full((4, 8, 3), shade))
    figure = plots.settings(studies, runs)
    assert figure is not None
    assert len(figure.axes) == 2
    assert figure.axes[0].get_ylabel() == studies[0].methods["plain"].title
    shown = [float(np.asarray(axes.images[0].get_array())[..., :3].mean()) for axes in figure.axes]
    assert shown == pytest.approx([0.1, 0.9], abs=0.01)
    assert study(words, stand_in) == 0
    assert (out / "settings.png").is_file()
    for variant in ("hard", "easy"):
        drawn = re.search(
            r'<figure[^>]*>\s*<div role="img".*?</figure>', (out / variant / "index.html").read_text(), re.S
        )
        assert drawn is not None
        assert drawn[0].count("<image") == 2
        assert [title in drawn[0] for title in ("Plain", "The hard one", "The easy one", "Clever")] == [True] * 3 + [
            False
        ]


def test_only_the_variants_that_are_named_run(plan: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--config", str(plan), "--output", str(out), "--variants"]
    assert study([*words, "easy"], write_stand_in(tmp_path)) == 0
    assert [folder.name for folder in out.iterdir()] == ["easy"]
    with pytest.raises(UserError, match=r"has no variant 'esay', but hard, easy"):
        study([*words, "esay"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("clever: null}", "clevr: null}", r"variants.easy names 'clevr'"),
        ("published: {plain: {fd", "published: {plan: {fd", r"variants.easy names 'plan'"),
        ("seeds: [7]", "sets: {}", r"variants.easy: there is no key sets"),
        ("methods: {plain: {model.lr: 0.9}, clever: null}", "methods: [clever]", "the baseline 'plain' is none"),
    ],
)
def test_a_mistake_is_named(plan: Path, old: str, new: str, said: str) -> None:
    text = plan.read_text()
    assert old in text
    plan.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=said):
        read_studies(plan)
