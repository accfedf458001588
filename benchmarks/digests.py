"""Final parameters of every configuration and algorithm in miniature, in files, to compare two versions of the code.

PYTHONPATH=. python benchmarks/digests.py BEFORE                  # on the one version; what is there already is left
PYTHONPATH=. python benchmarks/digests.py AFTER                   # on the other
PYTHONPATH=. python benchmarks/digests.py AFTER --against BEFORE  # exits with 1 where a run is missing or differs

A run has three rounds, in float64, with the data and settings of tests/test_configs.py: in one process, on two ranks
(`.2`), or carried by `federate`. What it leaves in its last checkpoint is in NAME.safetensors, its output in NAME.log.
"""

import argparse
import fnmatch
import multiprocessing
import os
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from lit_epgan.cli import lightning_cli  # noqa: F401  imported once, before the runs' processes are forked
from lit_epgan.cli.main import main as command_line
from lit_epgan.runs.config_files import with_bases
from tests import test_configs

BOUND = 1e-9
SECONDS = 600  # that a process may take
RUN = "../run"  # one for all ranks
FIXED = ["--seed_everything", "0", "--trainer.max_epochs", "3", "--trainer.default_root_dir", RUN]
DRAWN = "privacy.paid"  # it holds a number that a privacy ledger's account is known by, another one in each run
FLOAT64 = ["--trainer.precision", "64-true"]
HOW = {"": [], "federate": [], "2": ["--trainer.strategy", "federated", "--trainer.devices", "2"]}
ON_TOP = [[test_configs.suits(path)[0], f"algorithms/{path.name}"] for path in test_configs.ALGORITHMS]
ALL = [*ON_TOP, *([path.name] for path in test_configs.CONFIGS)]
BY_SITES = [["digits_classifier.yaml", f"algorithms/{name}.yaml"] for name in ("fedavg", "ep_laplace")]
RUNS = [(how, each) for how, configs in {"": ALL, "federate": BY_SITES, "2": ALL}.items() for each in configs]


def name_of(how: str, configs: list[str]) -> str:
    return ".".join(["+".join(Path(config).stem for config in configs), *([how] if how else [])])


def words(how: str, configs: list[str], cache: Path) -> list[str]:
    """Of the command line; the data that they name are written to the working directory."""
    config, *on_top = configs
    more = [word for each in on_top for word in ("--config", each, *test_configs.CHEAPER.get(Path(each).name, []))]
    options = SimpleNamespace(getoption=lambda name: "cpu")
    request = SimpleNamespace(getfixturevalue=lambda name: cache / name, config=options)
    with mock.patch("tests.test_configs.main", return_value=1) as told, pytest.raises(AssertionError):
        test_configs.two_rounds(config, more, Path("run"), request)
    (_, *small), *_ = told.call_args.args
    return ["federate" if how == "federate" else "fit", *small, *FIXED, *FLOAT64, *seeded(configs), *HOW[how]]


def seeded(configs: list[str]) -> Iterator[str]:
    """Noise that comes from the operating system would not repeat."""
    parts: dict[str, Any] = {}
    for path in (path for config in configs for path in with_bases(test_configs.FOLDER / config)):
        parts |= (yaml.safe_load(path.read_text()).get("federation") or {}).get("init_args", {})
    for part in parts.keys() & {"algorithm", "mechanism"}:
        arguments = parts[part].get("init_args", {}) if isinstance(parts[part], dict) else {}
        if arguments.keys() & {"noise_multiplier", "target_epsilon"}:
            yield from (f"--federation.{part}.noise_seed", "0")


def process(run: tuple[str, list[str]], folder: Path, cache: Path, log: Path, variables: dict[str, str]) -> None:
    """One of a run's, in a folder of its own."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    folder.mkdir()
    patch = pytest.MonkeyPatch()
    patch.setattr(test_configs, "seal", lambda _: None)  # it is about how an engine works, not about what it gives
    test_configs.no_network.__wrapped__(folder, cache / "classifiers", patch, None)
    try:
        code = command_line(words(*run, cache))
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    os._exit(code)


def digest(run: tuple[str, list[str]], out: Path, cache: Path) -> bool:
    """Let a run's processes end, and keep what its checkpoint holds; whether it has ended well."""
    log = out / f"{name_of(*run)}.log"
    log.unlink(missing_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "NODE_RANK": "0"}
    ranks = [{}] if run[0] != "2" else [common | {"LOCAL_RANK": str(k), "WORLD_SIZE": "2"} for k in range(2)]
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["LIT_EPGAN_LEDGERS"] = scratch
        fork = multiprocessing.get_context("fork").Process
        places = [Path(scratch) / str(k) for k in range(len(ranks))]
        started = [fork(target=process, args=(run, places[k], cache, log, ranks[k])) for k in range(len(ranks))]
        for one in started:
            one.start()
        for one in started:
            one.join(SECONDS)
            one.kill()
            one.join()
        checkpoint = Path(scratch) / "run" / "checkpoints" / "last.ckpt"
        if any(one.exitcode for one in started) or not checkpoint.is_file():
            return False
        loaded = torch.load(checkpoint, map_location="cpu", weights_only=True)
    states = [state for name, state in loaded["callbacks"].items() if "Federation" in name]
    tensors = dict(floating({"model": loaded["state_dict"], "federation": states}))
    save_file(tensors, log.with_suffix(".part"))
    log.with_suffix(".part").replace(out / f"{name_of(*run)}.safetensors")  # whole, or not there
    return True


def floating(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """All floating tensors in nested dictionaries and lists, as float64, by their paths."""
    if isinstance(value, Tensor) and value.is_floating_point():
        yield name, value.double().clone(memory_format=torch.contiguous_format)
    elif isinstance(value, dict | list | tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from floating(inner, f"{name}/{key}".lstrip("/"))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest over tensors, relative to the larger of 1 and the largest absolute value, and where it is."""
    worst = (0.0, "")
    for name in sorted(name for name in found.keys() | expected.keys() if not name.endswith(DRAWN)):
        if name not in found or name not in expected or found[name].shape != expected[name].shape:
            return float("inf"), f"{name} is missing or of another shape"
        one, other = found[name], expected[name]
        same = (one == other) | (one.isnan() & other.isnan())
        apart = torch.where(same, 0.0, (one - other).abs()).nan_to_num(nan=float("inf"))
        if one.numel():
            scale = other.nan_to_num(posinf=0.0, neginf=0.0).abs().amax().clamp(1.0)
            worst = max(worst, (float(apart.amax() / scale), name))
    return worst


def compare(found: Path, expected: Path, only: str) -> int:
    """Print every run's difference; 1 where one is too large or missing."""
    names = {path.stem for folder in (found, expected) for path in folder.glob("*.safetensors")}
    asked, wrong = fnmatch.filter(sorted(names), only), 0
    for name in asked:
        files = [folder / f"{name}.safetensors" for folder in (found, expected)]
        missing = [file for file in files if not file.is_file()]
        apart, where = (float("inf"), f"no {missing[0]}") if missing else difference(*map(load_file, files))
        wrong += apart > BOUND
        print(f"{apart:9.2e}  {name}  {where}{'  !' if apart > BOUND else ''}")
    print(f"{wrong} of {len(asked)} runs are missing or more than {BOUND} apart")
    return int(wrong > 0 or not asked)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--against", type=Path, metavar="OTHER", help="compare, and run nothing")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="of runs' names, as 'digits*.2'")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "digests", help="of prepared data")
    args = parser.parse_args()
    if args.against is not None:
        return compare(args.folder, args.against, args.only)
    out = args.folder.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for run in (run for run in RUNS if fnmatch.fnmatch(name_of(*run), args.only)):
        if not (out / f"{name_of(*run)}.safetensors").exists() and not digest(run, out, args.cache.resolve()):
            failed += 1
            print(f"{name_of(*run)} has failed: {out / name_of(*run)}.log", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
