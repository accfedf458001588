"""Draws values for the numeric keys of small configurations and fits them, each in a process of its own."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, get_args, get_origin

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer

from lit_epgan.cli.main import main
from lit_epgan.cli.study_run import environment
from lit_epgan.cli.study_runner import IMPORTS, _run
from tests.photographs import write_images

VALUES = ["0", "-1", "1", "2", "1e12", str(10**12), "1e-12", "-0.5", "nan", "inf", "null", str(2**63), "0.5", '""']
CALLBACKS = ["RoundCheckpoint", "FederatedProgressBar"]
SMALL = ["--trainer.max_epochs", "1", "--data.local_steps", "1", "--data.batch_size", "8"]
SMALL_IMAGES = [*SMALL, "--data.clients", "2"]
SMALL_GAN = ["--data.warmup_steps", "1"]
SMALL_TOY = [*SMALL, *SMALL_GAN, "--data.clients", "2", "--data.points", "32", "--data.test_points", "16"]
NARROW = ["--model.generator.width", "4", "--model.discriminator.width", "4"]
FEW_FEATURES = ["--federation.algorithm.frequencies", "16", "--federation.algorithm.herding_steps", "2"]
ON_SERVER = ["--federation.algorithm.server_steps", "1", "--federation.algorithm.batch_size", "4"]
SMALL_POOL = ["--federation.algorithm.pool", "20"]
CONFIGURATIONS: dict[str, tuple[str, list[str], list[str]]] = {  # configs, words, callbacks beside CALLBACKS
    "vanilla": ("digits_vanilla", [*SMALL_IMAGES, *SMALL_GAN], ["SampleGrid", "SampleWriter"]),
    "probgan": ("toy_probgan", SMALL_TOY, ["ToyMetrics", "SampleWriter"]),
    "sites": ("toy", [*SMALL_TOY, *SMALL_POOL], ["DensityMap"]),
    "ep": ("digits", [*SMALL_IMAGES, *SMALL_GAN], []),
    "fednp": ("polynomial algorithms/fednp", SMALL, ["CurveFit"]),
    "scaffold": ("digits_classifier algorithms/scaffold", SMALL_IMAGES, ["RoundsToTarget"]),
    "fedadam": ("digits_classifier algorithms/fedadam", [*SMALL_IMAGES, "--model.optimizer", "torch.optim.Adam"], []),
    "embedding": ("toy algorithms/embedding_sites", [*SMALL_TOY, *FEW_FEATURES], []),
    "tilted": ("toy_probgan algorithms/tilted_ep", SMALL_TOY, []),
    "moon": ("digits_classifier algorithms/moon algorithms/trimmed_mean", SMALL_IMAGES, []),
    "folder": ("folder", [*SMALL, *SMALL_GAN, *NARROW, *SMALL_POOL, "--data.path", "images"], []),
    "private": (
        "digits_vanilla algorithms/private_release",
        [*SMALL_IMAGES, *SMALL_GAN, *FEW_FEATURES, *ON_SERVER],
        [],
    ),
}
WORK = ("local_steps", "local_epochs", "warmup_steps", "max_epochs", "min_epochs", "herding_steps", "server_steps")
CHEAP: dict[str, dict[str, Any]] = {  # arguments of callbacks
    "SampleGrid": {"rows": 2, "columns": 2, "by_class": None},
    "SampleWriter": {"images": 4},
    "ToyMetrics": {"samples": 50},
    "RoundsToTarget": {"metric": "accuracy", "target": 0.87},
}
PRELOADED = [*IMPORTS, "matplotlib.figure", "torch._dynamo", "tests.values"]
PRELOADED += [f"lit_epgan.{room}" for room in ("modules", "datamodules", "networks", "federated")]


@dataclass(frozen=True)
class Draw:
    configuration: str
    key: str  # as a person writes it
    value: str
    words: tuple[str, ...]  # of the command line
    override: str = ""  # a config file's text, where a key lies in a list

    @property
    def name(self) -> str:
        return self.key.rsplit(".", 1)[-1]


def words_of(configuration: str) -> list[str]:
    configs, small, callbacks = CONFIGURATIONS[configuration]
    names = [*CALLBACKS, *callbacks]
    classes = [{"class_path": f"lit_epgan.callbacks.{name}", "init_args": CHEAP.get(name, {})} for name in names]
    words = ["fit", *(word for config in configs.split() for word in ("--config", f"{config}.yaml")), *small]
    return [*words, "--trainer.callbacks", json.dumps(classes)]


def resolved(words: list[str]) -> dict[str, Any]:
    """The configuration that the words mean, as --print_config shows it."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([*words, "--print_config"])
    return yaml.safe_load(printed.getvalue())


def numeric_keys(node: Any, cls: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every key under ``node``, the arguments of ``cls``, that may be a number: its path and its value."""
    parser = ArgumentParser(exit_on_error=False)
    skip = {"params"} if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) else set()
    parser.add_class_arguments(cls, "it", fail_untyped=False, skip=skip)
    actions = {action.dest.removeprefix("it."): action for action in parser._actions}
    hints = {name: getattr(action, "_typehint", None) or action.type for name, action in actions.items()}
    for name, value in node.items():
        if isinstance(value, dict) and "class_path" in value:
            yield from of_class(value, (*path, name))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            for index, item in enumerate(value):
                if isinstance(item, dict):
                    yield from of_class(item, (*path, name, index))
        elif may_be_number(hints.get(name)):
            yield (*path, name), value


def of_class(node: dict[str, Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    module, _, name = node["class_path"].rpartition(".")
    yield from numeric_keys(node.get("init_args") or {}, getattr(import_module(module), name), (*path, "init_args"))


def may_be_number(hint: Any) -> bool:
    if get_origin(hint) is None:
        return isinstance(hint, type) and issubclass(hint, int | float) and not issubclass(hint, bool)
    return get_origin(hint) is not Callable and any(map(may_be_number, get_args(hint)))


@cache
def keys_of(configuration: str) -> tuple[dict[str, Any], list[tuple[tuple[Any, ...], Any]]]:
    config = resolved(words_of(configuration))
    found = [(("seed_everything",), 0)]
    trainer = numeric_keys(config["trainer"], Trainer, ("trainer",))
    found += [
        each for each in trainer if each[0] != ("trainer", "num_nodes")
    ]  # it waits for machines that are not here
    for part in ("model", "data", "federation"):
        found += of_class(config[part], (part,))
    return config, found


def draws(count: int, seed: int) -> list[Draw]:
    """``count`` draws: configuration, key and value."""
    source = random.Random(seed)
    made = []
    for _ in range(count):
        name = source.choice(list(CONFIGURATIONS))
        config, keys = keys_of(name)
        path, now = source.choice(keys)
        value = source.choice(VALUES)
        if isinstance(now, list) and now and source.random() < 0.8:
            items = [json.dumps(item) for item in now]
            items[source.randrange(len(items))] = value
            value = f"[{', '.join(items)}]"
        made.append(one(name, config, path, value))
    return made


def one(name: str, config: dict[str, Any], path: tuple[Any, ...], value: str) -> Draw:
    key = ".".join(str(part) for part in path if part != "init_args" and not isinstance(part, int))
    words = tuple(words_of(name))
    if not any(isinstance(part, int) for part in path):
        return Draw(name, key, value, (*words, f"--{key}", yaml.safe_load(value) if value == '""' else value))
    index = next(i for i, part in enumerate(path) if isinstance(part, int))
    items = json.loads(json.dumps(config[path[0]][path[1]]))
    node = items[path[index]]
    for part in path[index + 1 : -1]:
        node = node[part]
    node[path[-1]] = "PLACE"
    text = {"nan": ".nan", "inf": ".inf"}.get(value, value)
    override = yaml.safe_dump({path[0]: {path[1]: items}}).replace("PLACE", text)
    at = words.index("--trainer.callbacks")
    kept = words if path[1] != "callbacks" else words[:at]
    return Draw(name, key, value, (*kept, "--config", "override.yaml"), override)


# A fit of one draw


def attempt(draw: Draw, folder: Path, seconds: int = 10, bytes_: int = 12 * 2**30) -> BaseProcess:
    """Start it, in an empty ``folder``, whose file ``log`` holds what it prints."""
    folder.mkdir(parents=True)
    if draw.configuration == "folder":
        write_images(folder / "images")
    (folder / "override.yaml").write_text(draw.override)
    seconds = min(seconds, 4) if draw.name in WORK else seconds
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=_limited, args=(list(draw.words), os.fspath(folder), seconds, bytes_))
    process.start()
    return process


def _limited(words: list[str], folder: str, seconds: int, bytes_: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _run("lit_epgan", words, {**environment(), "WANDB_MODE": "disabled"}, folder, os.path.join(folder, "log"), False)


def kind_of(draw: Draw, code: int | None, log: str) -> str:
    """How it ended: run, named, unnamed, traceback, hang or killed."""
    told = [line for line in log.splitlines() if line.startswith("error: ")]
    if code == 0:
        return "run"
    if code is None or code == -signal.SIGXCPU:
        return "run" if draw.name in WORK else "hang"  # as much work as was asked for
    if code == 2 and len(told) == 1 and "Traceback" not in log:
        return "named" if draw.name in told[0] else "unnamed"
    if "Traceback" in log:
        return "traceback"
    return f"code {code}"
