"""Pages as headless Chromium shows them, on a telephone and on a desk, in light and dark."""

import html
import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)

# Chromium's own window is never narrower than 500 pixels, so every page stands in a frame and tells what it is like
TELLS = """<script>addEventListener("load", () => parent.postMessage({
  frame: name,
  width: document.documentElement.clientWidth,
  needed: document.documentElement.scrollWidth,
  ink: getComputedStyle(document.body).color,
  page: getComputedStyle(document.body).backgroundColor,
  drawn: [...document.querySelectorAll("figure svg text")].map(text => getComputedStyle(text).fill),
  plots: [...document.querySelectorAll("img.plot")].map(each => getComputedStyle(each).filter),
  pictures: [...document.querySelectorAll("figure img, figure svg, .groups img")].map(each => each.clientWidth),
}, "*"))</script>"""
HEARS = """<pre></pre><script>addEventListener("message",
  event => { document.querySelector("pre").append(JSON.stringify(event.data) + "\\n") })</script>"""


@dataclass(frozen=True)
class Shown:
    """A page in a frame.

    Attributes:
        width: pixels that the frame has.
        needed: pixels that the page is wide; more than ``width``, and a reader has to scroll sideways.
        ink, page: colours of the text and of what it stands on, as ``rgb(0, 0, 0)``.
        drawn: colours of the letters within drawings.
        plots: how the colours of plots that are files are changed, as ``none``.
        pictures: the widths of pictures in pixels.
    """

    width: int
    needed: int
    ink: str
    page: str
    drawn: Sequence[str]
    plots: Sequence[str]
    pictures: Sequence[int]


def look(
    pages: Mapping[str, str], widths: Sequence[int], dark: bool, folder: Path
) -> tuple[dict[tuple[str, int], Shown], list[str], Path]:
    """Open every page at every width.

    Args:
        pages: HTML by name.
        widths: pixels.
        dark: whether the reader has asked for dark pages.
        folder: for copies of the pages and the screenshot.

    Returns:
        What each page is like, by name and width; what the browser wrote to its console; a picture of them all.
    """
    folder.mkdir(exist_ok=True)
    frames = []
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page.replace("</body>", f"{TELLS}</body>"), encoding="utf-8")
        frames += [f'<iframe name="{name} {w}" src="{name}.html" width="{w}" height="900"></iframe>' for w in widths]
    (folder / "frames.html").write_text(f"<!doctype html>{HEARS}{''.join(frames)}", encoding="utf-8")
    words = [
        *(str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
        *("--virtual-time-budget=3000", f"--blink-settings=preferredColorScheme={0 if dark else 1}"),
        *(f"--user-data-dir={folder / 'profile'}", f"--window-size={sum(widths) + 100},{950 * len(pages)}"),
        *("--dump-dom", f"--screenshot={folder / 'frames.png'}", (folder / "frames.html").as_uri()),
    ]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    told = re.search(r"<pre>(.*?)</pre>", ended.stdout, re.DOTALL)
    assert told is not None, ended.stderr
    shown = {}
    for line in html.unescape(told[1]).splitlines():
        name, width = (content := json.loads(line)).pop("frame").rsplit(" ", 1)
        shown[name, int(width)] = Shown(**content)
    console = [line for line in ended.stderr.splitlines() if ":CONSOLE" in line]
    return shown, console, folder / "frames.png"
