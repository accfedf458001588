"""A line in the letters of each method of studies/typefaces.yaml, below real ones: what is drawn can be read.

A letter is the first sample in its row of the run's grid, which holds what the classifier reads as it; where it comes
again it is the second, and so on. An empty place: fewer were read. Nothing is chosen. The real letters are those of the
first families, one after another.

python -m evidence.spelled --study runs/studies/typefaces --output docs/pictures/typefaces.png
"""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from lit_epgan.lib.typefaces import CHARACTERS, read_typefaces

LINE = "200 Families and 1 Generator"
CELL, GAP, LEFT = 56, 2, 620  # pixels of a sample in a grid, around it, and for the titles
LINES = {
    "fedavg/{}/samples": "FedAvg, cohorts of twenty",
    "cohorts_4/{}/samples": "FedAvg, cohorts of four",
    "distilled/{}/union": "each client's own generator",
    "cvae/{}/samples": "autoencoder, FedAvg",
    "centralised/{}/samples": "all images in one place",
}


def spelled(letter: Callable[[int, int], Image.Image]) -> Image.Image:
    """The line in images that ``letter`` gives for a character's place and how often it came before."""
    line, seen = Image.new("L", (len(LINE) * CELL, CELL)), Counter[str]()
    for place, character in enumerate(LINE):
        if character in CHARACTERS:
            line.paste(letter(CHARACTERS.index(character), seen[character]), (place * CELL, 0))
            seen[character] += 1
    return line


def of_grid(path: Path) -> Image.Image:
    """The line in the letters of a picture of SampleGrid, a row for each character."""
    grid = Image.open(path).convert("L")

    def letter(row: int, column: int) -> Image.Image:
        left, top = GAP + column * (CELL + GAP), GAP + row * (CELL + GAP)
        return grid.crop((left, top, left + CELL, top + CELL))

    return spelled(letter)


def of_fonts(folder: str) -> Image.Image:
    """The line in the letters of the first families, one after another."""
    families = list(read_typefaces(folder).values())
    turns = iter(range(len(LINE)))

    def letter(row: int, _: int) -> Image.Image:
        pixels = families[next(turns)][0][row, 0].numpy()
        return Image.fromarray(np.kron(pixels, np.ones((2, 2), np.uint8)))

    return spelled(letter)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=Path("runs/studies/typefaces"), help="the study's folder")
    parser.add_argument("--fonts", default="data/typefaces/node_modules/@fontsource")
    parser.add_argument("--seed", type=int, default=300)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    runs = given.study / "runs"
    shown = {"real": of_fonts(given.fonts)} | {
        title: of_grid(runs / f"{where.format(f'seed-{given.seed}/pictures')}.png") for where, title in LINES.items()
    }
    sheet = Image.new("L", (LEFT + len(LINE) * CELL, len(shown) * (CELL + 16)), 255)
    font = ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf", 34)
    for k, (title, line) in enumerate(shown.items()):
        sheet.paste(line, (LEFT, k * (CELL + 16) + 8))
        ImageDraw.Draw(sheet).text((8, k * (CELL + 16) + 12), title, fill=0, font=font)
    sheet.save(given.output, optimize=True)
