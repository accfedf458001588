"""Puts the examples' code, and what they print, into the tutorials, and makes a notebook of each.

    python docs/tutorials/make.py              # runs the example of every tutorial, in a scratch folder
    python docs/tutorials/make.py hospitals    # of one tutorial

A page says what it shows by a comment before a fenced block, which is then replaced:

    <!-- code: examples/hospitals.py Diagnosis -->     a class or a function; "end" is what follows the last of them
    <!-- output: examples/hospitals.py -->             what it prints

A notebook has the page's words and the whole example: what the page does not show stands in its first cell of code.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CODE = re.compile(r"(<!-- code: (\S+) (\w+) -->\n```python\n).*?(```)", re.DOTALL)
OUTPUT = re.compile(r"(<!-- output: (\S+) -->\n```text\n).*?(```)", re.DOTALL)
BLOCK = re.compile(r"<!-- (code|output): (\S+)(?: (\w+))? -->\n```\w+\n(.*?)\n```", re.DOTALL)


def code(file: str, name: str) -> str:
    """The lines of a top-level definition, or of all that follows the last one."""
    source = (ROOT / file).read_text(encoding="utf-8")
    lines = source.splitlines()
    definitions = {
        each.name: each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef | ast.ClassDef)
    }
    if name == "end":
        return "\n".join(lines[max(each.end_lineno or 0 for each in definitions.values()) :]).strip("\n")
    return "\n".join(lines[definitions[name].lineno - 1 : definitions[name].end_lineno])


def printed(file: str) -> str:
    """What the example prints, without empty lines."""
    settings = os.environ | {"COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, str(ROOT / file)]
        out = subprocess.run(words, cwd=folder, env=settings, check=True, text=True, stdout=subprocess.PIPE).stdout
    return "\n".join(line.rstrip() for line in out.splitlines() if line.strip())


def with_code(page: str) -> str:
    """The page with the examples' code as it is now."""
    return CODE.sub(lambda found: f"{found[1]}{code(found[2], found[3])}\n{found[4]}", page)


def with_output(page: str) -> str:
    """The page with what the examples print now; it runs them."""
    return OUTPUT.sub(lambda found: f"{found[1]}{printed(found[2])}\n{found[3]}", page)


def notebook(page: str) -> str:
    """The page as a notebook, whose code cells are the example; JSON."""
    import nbformat
    from nbformat import v4

    cells, codes = list[nbformat.NotebookNode](), list[nbformat.NotebookNode]()
    text, blocks = 0, list(BLOCK.finditer(page))
    shown = {block[3] for block in blocks if block[3]}
    for block in blocks:
        if words := page[text : block.start()].strip():
            cells.append(v4.new_markdown_cell(words))
        if block[1] == "output":
            codes[-1].outputs = [v4.new_output("stream", text=block[4] + "\n")]
        else:
            sources = [block[4]] if codes else [rest(block[2], shown), block[4]]
            new = [v4.new_code_cell(source) for source in sources]
            codes, cells = codes + new, cells + new
        text = block.end()
    cells.append(v4.new_markdown_cell(page[text:].strip()))
    for number, cell in enumerate(cells):
        cell.id = str(number)
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return nbformat.writes(v4.new_notebook(cells=cells, metadata=kernel)) + "\n"


def rest(file: str, shown: set[str]) -> str:
    """The example's lines before ``end`` that define none of what is shown, without its docstring."""
    source = (ROOT / file).read_text(encoding="utf-8")
    lines, body = source.splitlines(), ast.parse(source).body
    last = max(k for k, each in enumerate(body) if isinstance(each, ast.FunctionDef | ast.ClassDef))
    gone = [each for each in body[1 : last + 1] if getattr(each, "name", None) in shown]
    dropped = {n for each in (body[0], *gone) for n in range(each.lineno, (each.end_lineno or 0) + 1)}
    kept = [line for n, line in enumerate(lines[: body[last].end_lineno], start=1) if n not in dropped]
    return re.sub(r"\n{3,}", "\n\n\n", "\n".join(kept)).strip("\n")


def main(names: list[str]) -> None:
    """Fill the named tutorials, or all."""
    for page in sorted(HERE.glob("*.md")):
        if not names or page.stem in names:
            text = with_output(with_code(page.read_text(encoding="utf-8")))
            page.write_text(text, encoding="utf-8")
            page.with_suffix(".ipynb").write_text(notebook(text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
