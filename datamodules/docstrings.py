"""The documentation of Python's standard library, a module a user: text by user that everybody has."""

import ast
import re
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lit_epgan.datamodules.text import Sentence, TextDataModule
from lit_epgan.errors import UserError

LEFT_OUT = {"site-packages", "test", "tests"}  # folders
FEWEST = 3  # words of a sentence
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class DocstringsDataModule(TextDataModule):
    """The documentation strings of the standard library of the Python that runs: every module is a user.

    The modules are read as text and never imported. How many users and sentences there are depends on the Python:
    3.11.7 has 705 users with 22,327 sentences and 398,496 tokens, half of the users 9 sentences or fewer.

    Args:
        library: another folder of Python files, a user each, in the standard library's place.
        text: ``level``, ``clients``, ``held_out_users``, ``vocabulary``, ``longest``, ``joined`` and ``split_seed`` of
            TextDataModule, and what FederatedDataModule takes.
    """

    def __init__(self, library: str | None = None, **text: Any) -> None:
        super().__init__(**text)
        self.library = library

    def users(self) -> Mapping[str, Sequence[Sentence]]:
        """Every module's sentences, by its path in the library.

        Raises:
            UserError: there are none, as where a Python came without its library's source.
        """
        return docstrings(Path(self.library or sysconfig.get_paths()["stdlib"]).expanduser())


@cache
def docstrings(library: Path) -> dict[str, list[Sentence]]:
    """Sentences of the documentation strings below a folder, by the file's path in it, as lower-case tokens.

    A sentence ends at its full stop, question or exclamation mark, or at an empty line, and has at least 3 words. A
    token is a word of letters and apostrophes, or any other character.

    Raises:
        UserError: there are none.
    """
    users = {}
    for path in sorted(library.rglob("*.py")):
        if not LEFT_OUT & set(path.relative_to(library).parts) and (found := sentences(_read(path))):
            users[path.relative_to(library).as_posix()] = found
    if not users:
        raise UserError(f"there is no documented Python file below {library}: give another folder as data.library")
    return users


def sentences(source: str) -> list[Sentence]:
    """The sentences of the documentation strings of Python source; none where it cannot be parsed."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):  # files that test the parser, and null bytes
        return []
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, DOCUMENTED)]
    parts = [part for text in texts for part in re.split(r"(?<=[.!?])\s+|\n\s*\n", text)]
    return [tokens(part) for part in parts if len(part.split()) >= FEWEST]


def tokens(sentence: str) -> Sentence:
    """Lower-case words of letters and apostrophes, and every other character that is no space."""
    return re.findall(r"[a-z']+|[^\sa-z]", sentence.lower())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""
