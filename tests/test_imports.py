"""Imports run one way, neither mathematics nor engine needs Lightning, and public names say what they are for."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule

ROOT = Path(__file__).parent.parent
# where a room's files are; in lit_epgan/ stand links to the latter two, which rglob does not follow
FOLDERS = {"lit_epgan": "lit_epgan", "lit_epgan.callbacks": "callbacks", "lit_epgan.datamodules": "datamodules"}
LEAVES = (
    "atomic",
    "bounds",
    "cache",
    "class_splits",
    "csv_table",
    "emoji_package",
    "errors",
    "precision",
    "randomness",
    "typefaces",
)
LEAVES = {f"lit_epgan.lib.{name}" for name in (*LEAVES, "signals", "symbols", "tensor_file", "text")}
MATHEMATICS = (
    "lit_epgan.bayes",
    "lit_epgan.modules.objectives",
    "lit_epgan.networks",
    "lit_epgan.metrics",
    "lit_epgan.speech",
)
ENGINE = "lit_epgan.engine"
FEDERATION = (ENGINE, "lit_epgan.federated", "lit_epgan.callbacks", "lit_epgan.datamodules")
COMMANDS = ("lit_epgan.cli", "lit_epgan.__main__")


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


class Executed(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.AST | None:
        typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if typing_only else self.generic_visit(node)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return Executed().visit(ast.parse(path.read_text(encoding="utf-8")))


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it; ``from a import b`` counts as a.b where that is a module."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" if is_module(f"{module}.{a.name}") else module for a in node.names}
    return found


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def modules(*rooms: str):
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join((package, *path.relative_to(ROOT / folder).with_suffix("").parts)).removesuffix(".__init__")
            if not rooms or within(name, *rooms):
                yield name, path


def assert_imports_only(*rooms: str, allowed: tuple[str, ...]) -> None:
    """Of the project, files in ``rooms`` import only ``allowed`` (and the leaves)."""
    for name, path in modules(*rooms):
        ours = {i for i in imports(path) if within(i, "lit_epgan")}
        wrong = {i for i in ours if i not in LEAVES and not within(i, *allowed)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_this_test_sees_the_project():
    names = {name for name, _ in modules()}
    assert {
        "lit_epgan.engine.rounds",
        "lit_epgan.federated.bayesian.ep",
        "lit_epgan.callbacks.federation",
        "lit_epgan.datamodules.base",
        "lit_epgan.cli.main",
    } <= names
    assert "lit_epgan.bayes.gaussian" in imports(ROOT / "lit_epgan/federated/bayesian/ep.py")
    assert "lit_epgan.modules.objectives" in imports(ROOT / "lit_epgan/modules/gan.py")
    assert "lit_epgan.engine.samplers" in imports(ROOT / "datamodules/base.py")


WITHOUT_LIGHTNING = (ENGINE, "lit_epgan.federated", "lit_epgan.privacy", "lit_epgan.carriers")


@pytest.mark.parametrize("room", [*MATHEMATICS, *WITHOUT_LIGHTNING])
def test_mathematics_needs_no_lightning(room):
    for name, path in modules(room):
        assert not any(within(i, "lightning", "pytorch_lightning") for i in imports(path)), name


def test_rooms_import_one_way():
    assert_imports_only("lit_epgan.bayes", allowed=("lit_epgan.bayes", "lit_epgan.metrics"))
    tensors = [f"lit_epgan.bayes.{name}" for name in ("gaussian", "sghmc", "tilted", "tilted_mixture")]
    assert_imports_only(*tensors, allowed=("lit_epgan.bayes",))
    assert_imports_only(*MATHEMATICS, allowed=MATHEMATICS)
    assert_imports_only(ENGINE, allowed=(ENGINE,))
    assert_imports_only(
        "lit_epgan.federated", allowed=("lit_epgan.federated", "lit_epgan.privacy", ENGINE, *MATHEMATICS)
    )
    assert_imports_only("lit_epgan.speech", allowed=("lit_epgan.speech",))
    assert_imports_only("lit_epgan.privacy", allowed=("lit_epgan.privacy", ENGINE))
    runs = ("lit_epgan.runs.run_folder", "lit_epgan.runs.yaml_files")
    assert_imports_only("lit_epgan.carriers", allowed=("lit_epgan.carriers", ENGINE, *runs))
    inspects = (
        "lit_epgan.bayes",
        "lit_epgan.privacy",
        "lit_epgan.datamodules.base",
        "lit_epgan.datamodules.text",
        "lit_epgan.callbacks.pictures",
        "lit_epgan.federated.fedavg_gan",
        "lit_epgan.federated.drift.server_optimizers",
        "lit_epgan.modules",
        ENGINE,
    )
    assert_imports_only("lit_epgan.inspection", allowed=("lit_epgan.inspection", *inspects))
    data = "lit_epgan.datamodules"
    assert_imports_only(data, allowed=(data, "lit_epgan.speech", f"{ENGINE}.samplers"))


def test_the_engine_stands_alone():
    """It touches no file: an institution drives it as it likes."""
    outside = [i for _, path in modules(ENGINE) for i in imports(path) if within(i, "lit_epgan")]
    found = {i for i in outside if not within(i, ENGINE)}
    assert found == {f"lit_epgan.lib.{name}" for name in ("errors", "precision", "randomness", "text")}


def test_modules_know_nothing_of_federation_nor_anybody_of_the_command_line():
    for name, path in modules("lit_epgan.modules"):
        wrong = {i for i in imports(path) if within(i, *FEDERATION, *COMMANDS)}
        assert not wrong, f"{name} imports {sorted(wrong)}"
    for name, path in modules():
        if not within(name, *COMMANDS):
            wrong = {i for i in imports(path) if within(i, *COMMANDS)}
            assert not wrong, f"{name} imports {sorted(wrong)}"


def room_of(name: str) -> str:
    return ".".join(name.split(".")[:2])


def test_no_cycles_among_rooms_nor_among_files():
    rooms: dict[str, set[str]] = {}
    files: dict[str, set[str]] = {}
    for name, path in modules():
        targets = {i for i in imports(path) if within(i, "lit_epgan")}
        rooms.setdefault(room_of(name), set()).update({room_of(i) for i in targets} - {room_of(name)})
        if path.name != "__init__.py":
            files[name] = targets
    for graph in (rooms, {name: targets & files.keys() for name, targets in files.items()}):
        assert list(TopologicalSorter(graph).static_order())  # or it raises CycleError


def test_every_file_names_the_package_and_none_is_called_utils():
    """Tests and scripts run in the checkout, where ``import callbacks`` would give every class a second identity."""
    files = [path for _, path in modules()]
    files += [path for folder in ("tests", "benchmarks", "evidence", "docs") for path in (ROOT / folder).rglob("*.py")]
    suspect = re.compile(r"(?:from|import|,)\s+(?:callbacks|datamodules|configs)\b")  # to parse them all takes seconds
    files = [path for path in files if suspect.search(path.read_text(encoding="utf-8"))]
    assert not [path for path in files if any(within(i, "callbacks", "datamodules", "configs") for i in imports(path))]
    assert not [name for name, _ in modules() if name.split(".")[-1] in ("utils", "util", "helpers", "common")]


GOAL = 0.97
HOOKS = {*dir(Callback), *dir(LightningDataModule), *dir(LightningModule)}


def public(path: Path):
    module = parsed(path)
    yield f"{path.relative_to(ROOT)}", bool(ast.get_docstring(module))
    yield from _within(module, f"{path.relative_to(ROOT)}")


def _within(node: ast.Module | ast.ClassDef, place: str):
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
