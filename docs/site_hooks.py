"""What makes a site of these pages: files beside docs/ that pages link to become part of it."""

import importlib
import os
import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BESIDE = ("benchmarks", "evidence")
LINK = re.compile(r"(\]\(|src=\")(?!https?:|#|mailto:)([^)\s\"#]+)")
REFERENCE = {
    "callbacks": "Callbacks",
    "datamodules": "Data modules",
    "federated": "Algorithms",
    "privacy": "Mechanisms",
    "modules": "Modules",
    "engine": "Engine",
}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of benchmarks/ and evidence/, and every file outside of docs/ that a page links to."""
    from mkdocs.structure.files import File

    beside = [page for room in BESIDE for page in (ROOT / room).rglob("*.md")]
    wanted = {page.relative_to(ROOT).as_posix() for page in beside}
    wanted |= {target for page in (*ROOT.glob("docs/**/*.md"), *beside) for target in _outside(page)}
    for name in sorted(wanted):
        if (ROOT / name).is_file():
            files.append(File.generated(config, _in_site(name), abs_src_path=str(ROOT / name)))
    for room, title in REFERENCE.items():
        files.append(File.generated(config, f"reference/{room}.md", content=_reference(room, title)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Let links that leave docs/ lead to where the files are in the site."""
    here = page.file.src_uri
    source = here if here.split("/")[0] in BESIDE else f"docs/{here}"

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        if (ROOT / target).is_dir():
            target = f"{target}/README.md"
        site = _in_site(target) if not target.startswith("docs/") else target.removeprefix("docs/")
        return found[1] + os.path.relpath(site, posixpath.dirname(here) or ".")

    return LINK.sub(moved, markdown)


def _reference(room: str, title: str) -> str:
    """The page of a room: every public class, by where it is defined."""
    module = importlib.import_module(f"lit_epgan.{room}")
    public = [getattr(module, name) for name in module.__all__]
    named = [f"{each.__module__}.{each.__qualname__}" for each in public if hasattr(each, "__qualname__")]
    return f"# {title}\n\n" + "\n".join(f"::: {name}\n" for name in named if name.startswith("lit_epgan."))


def _outside(page: Path) -> set[str]:
    """Files outside of docs/ that a page links to, by their paths in the project."""
    found = (m[2] for m in LINK.finditer(page.read_text(encoding="utf-8")))
    targets = {posixpath.normpath(posixpath.join(page.relative_to(ROOT).parent.as_posix(), each)) for each in found}
    return {target for target in targets if not target.startswith(("docs/", ".."))}


def _in_site(name: str) -> str:
    """Where a file of the project is in the site: source files as text, so that a browser shows them."""
    return name if name.endswith((".md", ".png", ".csv", ".html")) else f"{name}.txt"
