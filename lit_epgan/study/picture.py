"""A picture of a study's page."""

import base64
import io
import re
from dataclasses import dataclass
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

DPI = 150  # of the plots in a run's folder
METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # none: equal numbers give equal pages


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        path: its PNG.
        caption: below it.
        alt: what it shows, with its values, for whoever cannot see it.
        title: above its caption; maybe none.
        drawing: SVG that the page shows in place of the PNG; maybe none.
    """

    path: Path
    caption: str
    alt: str
    title: str = ""
    drawing: str = ""

    @property
    def uri(self) -> str:
        """The file's bytes as a data URI, so that the page needs no other file and no network."""
        return "data:image/png;base64," + base64.b64encode(self.path.read_bytes()).decode()

    @property
    def width(self) -> int:
        """Pixels of a page (96 an inch) over which a run's plot is as large as it was drawn, by the PNG's header."""
        return int.from_bytes(self.path.read_bytes()[16:20], "big") * 96 // DPI


def drawing(figure: Figure, name: str, dpi: int = 100) -> str:
    """A figure as SVG to stand within a page: what is black in it has the colour of the page's text, light or dark.

    Args:
        figure: drawn in black and colours on no background of its own.
        name: keeps the SVG's ids apart from those of the page's other drawings.
        dpi: pixels an inch of the images within it.
    """
    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(written, format="svg", dpi=dpi, bbox_inches="tight", transparent=True, metadata=METADATA)
    svg = written.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"(fill|stroke): #000000", r"\1: currentColor", svg)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg, count=2)  # HTML knows them
    return re.sub(r'<g id="[^"]*"', "<g", svg)  # the same in every figure
