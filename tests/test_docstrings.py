"""Public classes, functions and hooks say what they are for."""

import ast
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import Callback, LightningDataModule, LightningModule

ROOT = Path(__file__).parent.parent
GOAL = 0.97
HOOKS = {*dir(Callback), *dir(LightningDataModule), *dir(LightningModule)}


def public(path: Path) -> Iterator[tuple[str, bool]]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    yield f"{path.relative_to(ROOT)}", bool(ast.get_docstring(module))
    yield from _within(module, f"{path.relative_to(ROOT)}")


def _within(node: ast.Module | ast.ClassDef, place: str) -> Iterator[tuple[str, bool]]:
    derived = isinstance(node, ast.ClassDef) and bool(node.bases)
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.ClassDef) and not child.name.startswith("_"):
            name = f"{place}:{child.name}"
            yield name + ":override" * derived, bool(ast.get_docstring(child))
            if isinstance(child, ast.ClassDef):
                yield from _within(child, name)


def test_nearly_all_of_them():
    files = [p for room in ("lit_epgan", "callbacks", "datamodules") for p in sorted((ROOT / room).rglob("*.py"))]
    found = [each for path in files if not path.is_symlink() for each in public(path)]
    said = HOOKS | {name.removesuffix(":override").rpartition(":")[2] for name, has in found if has}
    # an override need not repeat what its base says
    missing = [n for n, has in found if not has and not (n.endswith(":override") and n.split(":")[-2] in said)]
    assert len(missing) <= (1 - GOAL) * len(found), f"{len(missing)} of {len(found)} have none: {missing}"
