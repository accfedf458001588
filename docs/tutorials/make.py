"""Puts the examples' code, and what they print, into the tutorials.

    python docs/tutorials/make.py              # runs the example of every tutorial, in a scratch folder
    python docs/tutorials/make.py hospitals    # of one tutorial

A page says what it shows by a comment before a fenced block, which is then replaced:

    <!-- code: examples/hospitals.py Diagnosis -->     a class or a function; "end" is what follows the last of them
    <!-- output: examples/hospitals.py -->             what it prints
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


def main(names: list[str]) -> None:
    """Fill the named tutorials, or all."""
    for page in sorted(HERE.glob("*.md")):
        if not names or page.stem in names:
            page.write_text(with_output(with_code(page.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
