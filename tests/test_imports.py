"""Imports run one way, and the mathematics needs no Lightning."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {"lit_epgan.errors", "lit_epgan.randomness", "lit_epgan.atomic", "lit_epgan.precision"}
MATHEMATICS = (
    "lit_epgan.embedding",
    "lit_epgan.inference",
    "lit_epgan.objectives",
    "lit_epgan.networks",
    "lit_epgan.metrics",
    "lit_epgan.speech",
)
MODULES = tuple(
    f"lit_epgan.{name}"
    for name in (
        *("conditional_gan", "gan", "gan_checks", "optimizers", "priors", "sampling", "steps"),
        *("supervised", "regression", "classifier"),
        *("acoustic", "speech_gan"),
    )
)
COMMANDS = ("lit_epgan.cli", "lit_epgan.lightning_cli", "lit_epgan.study", "lit_epgan.__main__")


def within(name: str, *rooms: str) -> bool:
    return any(name == room or name.startswith(room + ".") for room in rooms)


class Executed(ast.NodeTransformer):
    """Drops what only a type checker sees."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        typing_only = isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        return None if typing_only else self.generic_visit(node)


def imports(path: Path) -> set[str]:
    """Every module that a file imports, wherever in it; ``from a import b`` counts as a.b where that is a module."""
    found = set()
    for node in ast.walk(Executed().visit(ast.parse(path.read_text(encoding="utf-8")))):
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


def modules(*rooms: str) -> Iterator[tuple[str, Path]]:
    for room in ("lit_epgan", "callbacks", "datamodules"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            if not rooms or within(name, *rooms):
                yield name, path


def assert_imports_only(*rooms: str, allowed: tuple[str, ...]) -> None:
    """Of the project, files in ``rooms`` import only ``allowed`` (and the leaves)."""
    for name, path in modules(*rooms):
        ours = {i for i in imports(path) if within(i, "lit_epgan", "callbacks", "datamodules")}
        wrong = {i for i in ours if i not in LEAVES and not within(i, *allowed)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_this_test_sees_the_project() -> None:
    names = {name for name, _ in modules()}
    assert {"lit_epgan.federated.bayesian.ep", "callbacks.federation", "datamodules.base", "lit_epgan.cli"} <= names
    assert "lit_epgan.inference.gaussian" in imports(ROOT / "lit_epgan/federated/bayesian/ep.py")
    assert "lit_epgan.objectives" in imports(ROOT / "lit_epgan/gan.py")


@pytest.mark.parametrize("room", [*MATHEMATICS, "lit_epgan.federated"])
def test_mathematics_needs_no_lightning(room: str) -> None:
    for name, path in modules(room):
        assert not any(within(i, "lightning", "pytorch_lightning") for i in imports(path)), name


def test_rooms_import_one_way() -> None:
    assert_imports_only("lit_epgan.inference", allowed=("lit_epgan.inference",))
    assert_imports_only(*MATHEMATICS, allowed=MATHEMATICS)
    assert_imports_only("lit_epgan.federated", allowed=("lit_epgan.federated", *MATHEMATICS))
    assert_imports_only("lit_epgan.speech", allowed=("lit_epgan.speech",))
    assert_imports_only("datamodules", allowed=("datamodules", "lit_epgan.speech", "lit_epgan.metrics.cache"))


def test_the_modules_know_nothing_of_federation() -> None:
    for name, path in modules(*MODULES):
        wrong = {i for i in imports(path) if within(i, "lit_epgan.federated", "callbacks", "datamodules", *COMMANDS)}
        assert not wrong, f"{name} imports {sorted(wrong)}"


def test_nobody_imports_the_command_line() -> None:
    for name, path in modules():
        if not within(name, *COMMANDS, "lit_epgan.parse_errors"):
            wrong = {i for i in imports(path) if within(i, *COMMANDS)}
            assert not wrong, f"{name} imports {sorted(wrong)}"


def room_of(name: str) -> str:
    parts = name.split(".")
    package = len(parts) > 1 and (ROOT / parts[0] / parts[1]).is_dir()
    return ".".join(parts[:2]) if parts[0] == "lit_epgan" and (package or len(parts) == 2) else parts[0]


def test_no_cycles_among_rooms() -> None:
    graph: dict[str, set[str]] = {}
    for name, path in modules():
        targets = {room_of(i) for i in imports(path) if within(i, "lit_epgan", "callbacks", "datamodules")}
        graph.setdefault(room_of(name), set()).update(targets - {room_of(name)})
    finished: set[str] = set()

    def visit(room: str, trail: list[str]) -> None:
        assert room not in trail, " -> ".join([*trail, room])
        if room not in finished:
            for target in sorted(graph.get(room, ())):
                visit(target, [*trail, room])
            finished.add(room)

    for room in sorted(graph):
        visit(room, [])


def test_no_file_is_called_utils() -> None:
    assert not [name for name, _ in modules() if name.split(".")[-1] in ("utils", "util", "helpers", "common")]
