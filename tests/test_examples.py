"""The examples keep what the tutorials promise of them, and the tutorials show the examples as they are."""

import ast
import csv
import json
import re
import runpy
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image

from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import runs_of

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FEWER_RECORDINGS = (("train", 150, 70), ("train", 75, 20), ("dev", 30, 3), ("eval", 100, 20))
MAKE = runpy.run_path(str(ROOT / "docs" / "tutorials" / "make.py"))


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(name: str, smaller: dict[str, str] | None = None) -> str:
        text = (ROOT / "examples" / name).read_text(encoding="utf-8")
        for old, new in (smaller or {}).items():
            assert old in text
            text = text.replace(old, new)
        Path(name).write_text(text, encoding="utf-8")
        runpy.run_path(name, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_islands_are_worst_and_their_own_normalisation_helps(printed):
    out = printed("hospitals.py")
    shared, own = (
        {name: float(auc) for name, auc in re.findall(r"^ (city|coast|islands) +\d+ +([\d.]+)", part, re.MULTILINE)}
        for part in out.split("Each hospital normalises for itself")
    )
    assert re.search(r"islands.*worst", out.split("Each hospital")[0])
    assert shared["islands"] < 0.92 < 0.99 < min(shared["city"], shared["coast"])
    assert own["islands"] > 0.95
    table = pd.read_csv("runs/hospitals/test_clients.csv", index_col="client")
    assert table["auroc"].to_dict() == pytest.approx(own, abs=1e-4)


@pytest.mark.slow
def test_generator_sites_draw_every_digit_and_fedavg_does_not(printed):
    fewer = {"warmup_steps=300, local_steps=50": "warmup_steps=60, local_steps=15", "epochs=6": "epochs=2"}
    out = printed("images.py", fewer | {"load_digits()": "load_digits(n_class=6)"})
    shares = {line.split()[0]: [float(share) for share in line.split()[1:]] for line in out.splitlines()[-2:]}
    assert [sum(row) for row in shares.values()] == pytest.approx([100, 100], abs=0.6)
    assert min(shares["GeneratorSites"][:6]) >= 2 > 1.5 > min(shares["FedAvg"][:6])
    pictures = Path("runs/images/GeneratorSites/pictures")
    assert all(Image.open(pictures / f"{name}.png").size[0] > 8 * 8 for name in ("samples", "union"))


@pytest.mark.slow
def test_own_algorithms_withstand_a_large_ward_with_wrong_labels(printed):
    right = {line.split()[0]: float(line.split()[1]) for line in printed("own_algorithm.py").splitlines()}
    assert right["FedAvg"] < 20 < 90 < right["EqualVoices"] < right["GeometricMedian"]
    assert right["GeometricMedian"] > 95


@pytest.mark.slow
def test_three_clinics_understand_a_new_one_and_the_islands_alone_do_not(printed):
    pytest.importorskip("kaldi_hmm_gmm")
    counts = {f'"{split}", {n}': f'"{split}", {m}' for split, n, m in FEWER_RECORDINGS}
    cheap = {"local_epochs=1,": "local_epochs=1, iterations=8, gaussians=200, workers=1,", "epochs=8": "epochs=4"}
    out = printed("speech.py", counts | cheap)
    alone, together = (float(share) for share in re.findall(r"(?:alone|together): ([\d.]+) %", out))
    assert together < 25 < 50 < alone
    manifest = pd.read_csv("runs/speech/together.csv")
    assert manifest.groupby("session").size().to_dict()["islands"] == 20
    assert all((Path("runs/speech") / audio).is_file() for audio in manifest["audio"])


@pytest.mark.slow
def test_only_adapters_travel_and_twelve_reports_alone_teach_nothing(printed):
    for package in ("transformers", "peft"):
        pytest.importorskip(package, reason="the extra lora")
    out = printed("lora.py")
    alone, together = (float(share) for share in re.findall(r": ([\d.]+) % of", out))
    assert alone < 70 < 95 < together
    assert re.findall(r"sends ([\d.]+) kB a round of a model of 436.8 kB", out) == ["16.9"] * 2


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_a_tutorial(example):
    assert len(example.read_text(encoding="utf-8").splitlines()) < 60
    page = (ROOT / "docs" / "tutorials" / f"{example.stem}.md").read_text(encoding="utf-8")
    assert f"<!-- output: examples/{example.name} -->\n```text\n" in page
    assert f"python examples/{example.name}" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_tutorial_shows_the_code_as_it_is(page):
    """Where it fails, run docs/tutorials/make.py."""
    text = page.read_text(encoding="utf-8")
    assert MAKE["with_code"](text) == text
    assert "```python\n```" not in text
    assert "```text\n```" not in text


def statements(source: str) -> list[str]:
    return [ast.dump(each) for each in ast.parse(source).body]


def cells(page: Path) -> list[str]:
    found = json.loads(page.with_suffix(".ipynb").read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_a_notebook_is_its_page_and_runs_what_the_example_does(page):
    """Where it fails, run docs/tutorials/make.py."""
    pytest.importorskip("nbformat", reason="notebooks are made by it")
    assert MAKE["notebook"](page.read_text(encoding="utf-8")) == page.with_suffix(".ipynb").read_text(encoding="utf-8")
    example = (ROOT / "examples" / f"{page.stem}.py").read_text(encoding="utf-8")
    assert sorted(statements("\n".join(cells(page)))) == sorted(statements(example)[1:])  # without its docstring


@pytest.mark.slow
def test_a_notebooks_cells_run_in_their_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for source in cells(ROOT / "docs" / "tutorials" / "hospitals.md"):
        exec(compile(source, "cell", "exec"), names)
    assert re.search(r"islands.*worst", capsys.readouterr().out)


SPARES = re.compile(r"--known\s+docs/results/(\w+)\.csv")

RESULTS = [
    (path, name) for path in sorted((ROOT / "docs").rglob("*.md")) for name in SPARES.findall(path.read_text("utf-8"))
]


assert RESULTS, "no page says that its runs are known, or it says so in other words"


@pytest.mark.parametrize(("page", "name"), RESULTS, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_committed_runs_are_known(page, name, tmp_path):
    with (ROOT / "docs" / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        settings = {(row["variant"], row["method"], row["seed"]): row["settings"] for row in csv.DictReader(file)}
    plan = ROOT / "configs" / "studies" / f"{name}.yaml"
    runs = [run for study in read_studies(plan) for run in runs_of(study, tmp_path)]
    changed = [run.name for run in runs if settings.get((run.variant, run.method.name, str(run.seed))) != run.settings]
    assert not changed, f"{page.name}: of {len(runs)} runs {len(changed)} have other settings today"
