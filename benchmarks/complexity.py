"""How much of the package a reader meets: in one round, in the sources as a whole, and of Lightning's private names.

python benchmarks/complexity.py --output benchmarks/results/complexity.md

The second round of FedAvg, of EP, and of FedAvg under CentralNoise is profiled: a linear model, three clients, two
steps each. Files of the package that are entered, functions that are called, and how often a call is in another file
than the one before it. ``results/complexity.json`` holds the values of before; ``--keep`` writes it anew.
"""

import ast
import collections
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from side_by_side import markdown, options, publish
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lit_epgan
from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation, FedAvg
from lit_epgan.privacy import CentralNoise

ROOT = Path(lit_epgan.__file__).resolve().parents[1]
ROOMS = ("lit_epgan", "callbacks", "datamodules")  # the latter two are links within the first
KEPT = Path(__file__).parent / "results" / "complexity.json"
ROUNDS: dict[str, dict[str, Any]] = {
    "FedAvg": {"algorithm": FedAvg},
    "EP": {"algorithm": ExpectationPropagation},
    "private sum": {"algorithm": FedAvg, "mechanism": lambda: CentralNoise(1.0, 1.0)},
}
BARS = {
    "FedAvg: files entered": 15,
    "EP: files entered": 20,
    "private sum: files entered": 20,
    "private names of Lightning": 4,
    "files that use them": 1,
    "files of source": 320,
    "lines of source": 41_000,
    "lines of tests": 39_000,
    "class names that occur twice": 0,
}
OF_LIGHTNING = {"trainer", "loop", "connector", "fit_loop", "epoch_loop", "strategy", "pl_module", "lightning_module"}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]  # rglob follows no links


class Linear(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Profile(Callback):
    """Notes the package's files and functions while the second round lasts."""

    def __init__(self) -> None:
        self.within = {path.resolve(): path.relative_to(ROOT).as_posix() for path in sources()}
        self.files, self.functions, self.changes, self.last = set[str](), set[tuple[str, str]](), 0, ""
        self.names: dict[str, str | None] = {}

    def note(self, frame: Any, event: str, _: Any) -> None:
        """What ``sys.setprofile`` calls."""
        code = frame.f_code
        if event != "call" or self.trainer.current_epoch != 1:
            return
        if code.co_filename not in self.names:
            self.names[code.co_filename] = self.within.get(Path(code.co_filename).resolve())
        if name := self.names[code.co_filename]:
            self.changes += name != self.last
            self.last = name
            self.files.add(name)
            self.functions.add((name, code.co_qualname))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.trainer = trainer
            sys.setprofile(self.note)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sys.setprofile(None)


def one_round(algorithm: Any, **made: Any) -> Profile:
    """The profile of a federation's second round."""
    torch.manual_seed(0)
    clients = [TensorDataset(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)]
    data = FederatedDataModule.from_datasets(clients, batch_size=4, local_steps=2)
    federation = FederationCallback(algorithm(), **{name: make() for name, make in made.items()})
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    profile = Profile()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LIT_EPGAN_LEDGERS"] = folder
        settings: dict[str, Any] = {"max_epochs": 3, "accelerator": "cpu", "default_root_dir": folder, **quiet}
        Trainer(callbacks=[federation, profile], **settings).fit(Linear(), datamodule=data)
    return profile


def imported(start: str) -> set[Path]:
    """The package's files that importing a module leads to, by the import statements that are in them."""
    found, waiting = set[Path](), [start]
    while waiting:
        name = waiting.pop()
        inner = Path(*name.split("."))
        path = next((p for p in (ROOT / inner.with_suffix(".py"), ROOT / inner / "__init__.py") if p.is_file()), None)
        if path is None or path.resolve() in found:
            continue
        found.add(path.resolve())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lit_epgan"):
                waiting += [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            elif isinstance(node, ast.Import):
                waiting += [each.name for each in node.names if each.name.startswith("lit_epgan")]
    return found


def private_names(tree: ast.AST) -> Iterator[str]:
    """``_name`` imported from lightning, or asked of what is called like one of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
            yield from (each.name for each in node.names if each.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name in OF_LIGHTNING or name.endswith(("_loop", "_connector")):
                yield node.attr


def class_names(tree: ast.Module | ast.ClassDef, owner: str = "") -> Iterator[str]:
    """Of a file's classes; one that stands in another has that one's name before its own."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield owner + node.name
            yield from class_names(node, f"{owner}{node.name}.")


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def counted() -> dict[str, int]:
    """Every number of the table."""
    found: dict[str, int] = {}
    for name, made in ROUNDS.items():
        profile = one_round(**made)
        found |= {
            f"{name}: files entered": len(profile.files),
            f"{name}: functions": len(profile.functions),
            f"{name}: changes of file": profile.changes,
        }
    found["FLARE: files imported by its controller and executor"] = len(imported("lit_epgan.carriers.flare"))
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sources()}
    users = {path: names for path, tree in trees.items() if (names := set(private_names(tree)))}
    classes = collections.Counter(name for tree in trees.values() for name in class_names(tree))
    return found | {
        "private names of Lightning": len(set().union(*users.values())),
        "files that use them": len(users),
        "files of source": len(trees),
        "lines of source": lines(list(trees)),
        "lines of tests": lines(sorted((ROOT / "tests").rglob("*.py"))),
        "class names that occur twice": sum(count > 1 for count in classes.values()),
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--keep", action="store_true", help="what is counted now is the before of later runs")
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    now = counted()
    if args.keep:
        KEPT.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
    before = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.is_file() else {}
    rows = []
    for name, value in now.items():
        bar = BARS.get(name)
        cells = ["", ""] if bar is None else [f"at most {bar:,}", "met" if value <= bar else "missed"]
        rows.append([name, f"{before[name]:,}" if name in before else "", f"{value:,}", *cells])
    notes = (
        "The second round of three clients with two steps each, a linear model under Lightning's Trainer, on a CPU; "
        "only files of lit_epgan, callbacks and datamodules count. Private names are attributes and imports that "
        "begin with an underscore. A class that stands in another is named with it: FedAvg.Report."
    )
    publish(markdown("What a reader meets", ["", "before", "now", "bar", ""], rows, notes), args.output)


if __name__ == "__main__":
    main()
