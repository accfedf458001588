"""The pages that people are shown, in a browser: they fit a telephone, follow light and dark, and make no error."""

import io
import re

import numpy as np
import pytest
from matplotlib.image import imread, imsave
from PIL import Image

from lit_epgan.carriers.contributions import Contribution, Contributions, operator_page
from lit_epgan.cli.study import study
from lit_epgan.cli.study_run import runs_of
from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection import Ask, Check, Findings, ImageView, Inspection, Panel
from lit_epgan.inspection.inspection import page as inspection_page
from lit_epgan.privacy import Ledger, Queries
from tests.browser import CHROMIUM, Shown, look
from tests.studies import read_study, run_quietly, write_plan, write_stand_in

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium on the PATH, to open the pages in")
WIDTHS = (390, 1280)  # a telephone's, a desk's
LONG = "word_without_a_place_to_break_" * 4


def study_page(folder):
    """With samples, curves, a partition, pairs of methods and a title that is hard to break."""
    plan = write_plan(folder)
    text = plan.read_text().replace("title: A trial", f"title: {LONG}").replace("title: Clever", f"title: {LONG}")
    plan.write_text(text + "pairwise: [plain, clever, union]\n")
    runs, output = runs_of(read_study(plan), folder / "out"), folder / "out"
    run_quietly(runs, write_stand_in(folder))
    for run in runs:
        pictures = run.folder / "pictures"
        pictures.mkdir()
        for name in ("samples", "union"):
            imsave(pictures / f"{name}.png", np.full((500, 500, 3), 0.5))
        Image.new("RGB", (1200, 900), "white").save(pictures / "partition.png")
    assert study(["--config", str(plan), "--output", str(output)], write_stand_in(folder)) == 0
    return (output / "index.html").read_text()


def inspected_page(folder):
    ask = Ask(Queries(Ledger(folder / "ledger.jsonl")), 2.0, "a look")
    ask.queries.ledger.read()
    check = Check(f"{LONG} - b", "+0.10 against +0.20", -0.1, -0.3, 0.2, 0.1, 0.4, True, "a note")
    picture = io.BytesIO()
    Image.new("RGB", (500, 500), "grey").save(picture, format="png")
    panels = [Panel("a", ["3 users"], picture.getvalue(), samples=picture.getvalue(), made=["mean +0.1"]),
              Panel("words", words=[(LONG, "3.0")], made_words=[LONG]), Panel("few", refused=LONG)]  # fmt: skip
    findings = Findings(panels, [check, check], [LONG], [LONG], "rates", "to read")
    inspection = Inspection(WritersDataModule(), ImageView(), title=LONG, description="One.")
    return inspection_page(inspection, findings, ask, f"python -m lit_epgan inspect {LONG}")


def operators_page(folder):
    list_ = Contributions(folder / "contributions.csv")
    for round_ in range(60):
        lost = Contribution(asked=True, why=f"its link is broken: {LONG}")
        list_.note(round_, {"a": Contribution(True, True, 1.0, 500_000), LONG: lost, "c": Contribution()})
    return operator_page(folder / "contributions.csv", LONG, 80, over=True)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    made = {"study": study_page, "inspection": inspected_page, "operator": operators_page}
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in made.items()}


def brightness(colour):
    """Mean of red, green and blue of ``rgb(0, 0, 0)``, from 0 to 255."""
    return float(np.mean([int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]))


def test_tables_have_captions_and_headers_and_pictures_have_words(pages):
    for name, page in pages.items():
        assert page.count("<table") == page.count("<caption>") > 0, name
        heads = re.findall(r"<th(?: [^>]*)?>[^<]*", page)
        assert all(re.match(r'<th scope="(row|col)"', head) for head in heads), name
        assert not re.search(r"<th[^>]*></th>", page), name
        assert page.count("<tr>") + page.count("<tr ") == page.count("<thead>") + page.count('scope="row"'), name
        assert page.count("<img") == len(re.findall(r'<img [^>]*alt="[^"]{9,}"', page)), name
        assert len(re.findall(r"<svg", page)) == len(
            re.findall(r'role="img" aria-label="[^"]{9,}">\s*<svg|<svg role="img" aria-label', page)
        ), name


@in_browser
@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_pages_fit_the_reader_and_follow_light_and_dark(pages, dark, tmp_path):
    shown, console, picture = look(pages, WIDTHS, dark, tmp_path / "look")
    assert not console
    assert set(shown) == {(name, width) for name in pages for width in WIDTHS}
    for (name, width), page in shown.items():
        assert page.needed <= page.width <= width, name
        assert (brightness(page.page) < 60) == (brightness(page.ink) > 180) == dark, name
        assert min(page.pictures, default=width) > 250, name  # a sample of ten in a row has 25 pixels
    for width in WIDTHS:
        assert shown["study", width].drawn
        assert set(shown["study", width].drawn) == {shown["study", width].ink}
        inverted = "none" if not dark else "invert(1) hue-rotate(180deg)"
        assert list(shown["study", width].plots) == [inverted]  # a white plot on a dark page would dazzle
    assert imread(picture).shape[:2] == (950 * len(pages), sum(WIDTHS) + 100)


@in_browser
@pytest.mark.slow
def test_the_check_sees_what_is_too_wide_and_what_goes_wrong(tmp_path):
    wide = '<!doctype html><body style="margin: 0"><div style="width: 2000px">wide</div></body>'
    wrong = "<!doctype html><body><script>undefined.x</script></body>"
    shown, console, _ = look({"wide": wide, "wrong": wrong}, [390], dark=False, folder=tmp_path / "look")
    assert shown["wide", 390] == Shown(390, 2000, "rgb(0, 0, 0)", "rgba(0, 0, 0, 0)", [], [], [])
    assert len(console) == 1
    assert "Uncaught TypeError" in console[0]
