"""What a page says of its committed runs: a study takes them as known, where the page says that it does."""

import csv
import re
from pathlib import Path

import pytest

from lit_epgan.cli.study_plan import read_studies
from lit_epgan.cli.study_run import runs_of

ROOT = Path(__file__).parent.parent

SPARES = re.compile(r"--known\s+docs/results/(\w+)\.csv")
PAGES = [
    (path, name) for path in sorted((ROOT / "docs").rglob("*.md")) for name in SPARES.findall(path.read_text("utf-8"))
]


assert PAGES, "no page says that its runs are known, or it says so in other words"


@pytest.mark.parametrize(("page", "name"), PAGES, ids=lambda value: value if isinstance(value, str) else value.stem)
def test_committed_runs_are_known(page: Path, name: str, tmp_path: Path) -> None:
    with (ROOT / "docs" / "results" / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        settings = {(row["variant"], row["method"], row["seed"]): row["settings"] for row in csv.DictReader(file)}
    plan = ROOT / "configs" / "studies" / f"{name}.yaml"
    runs = [run for study in read_studies(plan) for run in runs_of(study, tmp_path)]
    changed = [run.name for run in runs if settings.get((run.variant, run.method.name, str(run.seed))) != run.settings]
    assert not changed, f"{page.name}: of {len(runs)} runs {len(changed)} have other settings today"
