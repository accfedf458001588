"""Runs a script as ``python SCRIPT WORD ...`` does, by a module's name: ``python -m tests.script SCRIPT WORD ...``."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
