"""Faults of sites and servers over real mutual TLS: who is refused, who is left out, and whether the model is the same.

A server and its sites are processes of NVIDIA FLARE on this machine, with kits and certificates of their own. Two sound
sites take part in every training. The model of a training that nothing disturbs is what is promised, bit for bit, where
a server is killed and goes on, where a site stops for less than the patience, and where an answer is left out.

PYTHONPATH=. python benchmarks/institution_faults.py --output benchmarks/results/institution_faults.md
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from side_by_side import markdown, options, publish

from lit_epgan.carriers import authority
from tests.processes import free_port
from tests.test_kits import kits_of, members

SOUND = ("a-sound", "b-sound")  # the first by name, so that they are the same clients whoever else is there
HOSTILE = (
    *("float8", "integers", "weight-1e306", "weight-minus-5", "shape", "nan", "unknown", "missing", "steps-1e18"),
    *("complex", "bool", "infinite", "largest", "weight-nan", "counts-minus-1000", "scalar", "renamed", "nothing"),
    *("random-bytes", "no-bytes", "pickle", "cut-off"),
)
CALLERS = ("expired", "early", "hour-ahead", "hour-behind", "revoked", "foreign", "twice")
FAULTY = {
    "killed": "a site is killed",
    "stopped": "a site halts until a round is over",
    "data": "a site's data fail in round 3",
    "disk": "a site's disk is full",
    "returns": "a site is killed and started again",
    "deaf": "a site halts for good",
}
LATE = "late"
CLOCKS = {"expired": -400.0, "early": 3.0, "hour-ahead": 1 / 24, "hour-behind": -1 / 24}  # days of who signs
ROUNDS, PACE = 6, 0.1  # seconds of a step; eight steps a round
AGREED = """seed_everything: 0
federation: {{class_path: lit_epgan.callbacks.FederationCallback, init_args: {{algorithm: lit_epgan.federated.FedAvg}}}}
model: site_code.Line
trainer: {{max_epochs: {rounds}, accelerator: cpu, logger: false, callbacks: [lit_epgan.callbacks.RoundCheckpoint]}}
"""
OWN = """data:
  class_path: lit_epgan.datamodules.Institutions
  init_args: {{datamodules: {{{site}: {{class_path: site_code.Own, init_args: {{site: {site}, fails: {fails}}}}}}}}}
"""
CODE = """import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, site, fails):
        generator = torch.Generator().manual_seed(sum(site.encode()))
        self.x, self.fails, self.reads = torch.randn(64, 20, generator=generator), fails, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        self.reads += 1
        if self.fails and self.reads > self.fails:
            raise OSError("the disk of the records does not answer")
        return self.x[i], self.x[i].sum()


class Own(LightningDataModule):
    def __init__(self, site: str, fails: int = 0):
        super().__init__()
        self.rows = Rows(site, fails)

    def train_dataloader(self):
        return DataLoader(self.rows, 8, shuffle=True)


class Line(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(20, 1)

    def training_step(self, batch, index):
        time.sleep(PACE)
        return (self.layer(batch[0]).squeeze(1) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
"""
LIE = '''"""A site whose process answers otherwise than it should, or does not look at its own certificate."""
import os
import pickle

KIND = os.environ.get("SITE_LIES")
if KIND == "unchecked":
    import lit_epgan.carriers.authority as authority

    authority.check_kit = lambda kit: "unchecked"
elif KIND:
    import torch

    from lit_epgan.engine import wire
    from lit_epgan.engine.messages import Count, Weighted, tensor_of
    from lit_epgan.engine.runner import Answer

    honest = wire.encode_answer

    def encode_answer(answer, half=False):
        report, steps = dict(answer.report), answer.steps
        name = next(n for n, t in report.items() if not isinstance(t, Count))
        tensor, weight = tensor_of(report[name]), getattr(report[name], "weight", 1.0)
        changed = {
            "float8": lambda: {name: Weighted(tensor.to(torch.float8_e4m3fn), weight)},
            "integers": lambda: {name: Weighted(tensor.long(), weight)},
            "weight-1e306": lambda: {name: Weighted(tensor, 1e306)},
            "weight-minus-5": lambda: {name: Weighted(tensor, -5.0)},
            "shape": lambda: {name: Weighted(torch.zeros(3), weight)},
            "nan": lambda: {name: Weighted(tensor * float("nan"), weight)},
            "unknown": lambda: {"extra": torch.ones(3)},
            "missing": lambda: {name: None},
            "complex": lambda: {name: Weighted(tensor.to(torch.complex64), weight)},
            "bool": lambda: {name: Weighted(tensor.bool(), weight)},
            "infinite": lambda: {name: Weighted(tensor * float("inf"), weight)},
            "largest": lambda: {name: Weighted(torch.full_like(tensor, 3e38), weight)},
            "weight-nan": lambda: {name: Weighted(tensor, float("nan"))},
            "counts-minus-1000": lambda: {n: Count(-1000.0, True) for n, t in report.items() if type(t) is Count},
            "scalar": lambda: {name: Weighted(tensor.sum(), weight)},
            "renamed": lambda: {name: None, name + "s": report[name]},
            "nothing": lambda: dict.fromkeys(report),
        }.get(KIND, dict)()
        report = {n: t for n, t in (report | changed).items() if t is not None}
        data = honest(Answer(report, answer.private, 10**18 if KIND == "steps-1e18" else steps), half)
        return {
            "random-bytes": lambda: os.urandom(len(data)),
            "no-bytes": lambda: b"",
            "pickle": lambda: pickle.dumps({"report": "what a pickle could run"}),
            "cut-off": lambda: data[:-9],
        }.get(KIND, lambda: data)()

    wire.encode_answer = encode_answer
'''


class Clock:
    """Of who signs certificates, so many days from the right one."""

    def __init__(self, days: float) -> None:
        self._ahead = timedelta(days)

    def now(self, zone: tzinfo) -> datetime:
        return datetime.now(zone) + self._ahead


class Faults:
    """The federation's folder, its processes, and the table."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows = folder, list[list[str]]()
        self.sites: dict[str, subprocess.Popen[bytes]] = {}
        port, names = free_port(), ", ".join((*SOUND, *HOSTILE, *FAULTY, LATE, *CALLERS))
        (folder / "elsewhere").mkdir()
        (folder / "code").mkdir()
        (folder / "code" / "site_code.py").write_text(CODE.replace("PACE", str(PACE)))
        (folder / "code" / "sitecustomize.py").write_text(LIE)
        (folder / "agreed.yaml").write_text(AGREED.format(rounds=ROUNDS))
        sign = authority.Authority.sign

        def signed(self: authority.Authority, name: str, *words: str | None) -> str:
            with mock.patch.object(authority, "datetime", Clock(CLOCKS.get(name, 0.0))):
                return sign(self, name, *words)  # type: ignore[arg-type]

        with mock.patch.object(authority.Authority, "sign", signed):
            shutil.copytree(kits_of(members(folder, names, port))["revoked"], folder / "old")
            self.kits = kits_of(members(folder, names, port), "revoked")
        self.kits |= {"revoked": folder / "old"}
        self.kits["foreign"] = kits_of(members(folder / "elsewhere", "foreign", port))["foreign"]

    def start(self, name: str, *words: str, lies: str = "", where: str = "") -> subprocess.Popen[bytes]:
        """``federate`` in a folder of its own."""
        folder = self.folder / (where or name)
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "lit_epgan", "federate", *words]
        paths = os.pathsep.join([str(self.folder / "code"), str(Path(__file__).parents[1])])
        more = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **({"SITE_LIES": lies} if lies else {})}
        with (folder / "terminal.log").open("ab") as log:
            return subprocess.Popen(
                command, cwd=folder, env=os.environ | more, stdout=log, stderr=log, start_new_session=True
            )

    def site(self, name: str, lies: str = "", fails: int = 0, kit: Path | None = None, run: Path | None = None) -> None:
        own = self.folder / f"{name}.yaml"
        own.write_text(OWN.format(site=name, fails=fails))
        words = ["--config", str(self.folder / "agreed.yaml"), "--config", str(own)]
        words += ["--trainer.default_root_dir", str(run or self.folder / name / "run")]
        self.sites[name] = self.start(name, "--site", str(kit or self.kits[name]), *words, lies=lies)

    def serve(self, run: str, *words: str, patience: int = 60, gather: int = 60) -> subprocess.Popen[bytes]:
        """The server runs a training; its folder is named ``run``."""
        kits = ["--server", str(self.kits["localhost"]), "--operator", str(self.kits["op@example.org"])]
        terms = ["--patience", str(patience), "--gather", str(gather), "--least", "2"]
        told = ["--config", str(self.folder / "agreed.yaml"), "--trainer.default_root_dir", str(self.folder / run)]
        return self.start("server", *kits, *terms, *told, *words, where=f"server of {run}")

    def contributed(self, run: str) -> list[dict[str, str]]:
        path = self.folder / run / "contributions.csv"
        return list(csv.DictReader(path.open())) if path.is_file() else []

    def said(self, name: str) -> str:
        return (self.folder / name / "terminal.log").read_text(errors="replace")

    def until(self, happened: Callable[[], bool], what: str, seconds: float = 240) -> None:
        """Wait. SystemExit: it did not happen."""
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                raise SystemExit(f"{what} did not happen; see {self.folder}")
            time.sleep(0.1)

    def round_of(self, run: str, number: int) -> None:
        """Wait for a round to be listed."""
        self.until(
            lambda: any(int(row["round"]) >= number for row in self.contributed(run)), f"round {number} of {run}"
        )

    def same(self, run: str) -> str:
        """Whether a training ended with the bits of the first one."""
        states = [
            torch.load(self.folder / each / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
            for each in ("undisturbed", run)
        ]
        return "same" if all(torch.equal(value, states[1][name]) for name, value in states[0].items()) else "differ"

    def told(self, run: str, name: str) -> str:
        """In how many rounds a site counted, and why not in others."""
        rows = [row for row in self.contributed(run) if row["client"] == name]
        why = sorted({row["why"] for row in rows if row["counted"] != "1" and row["why"]})
        return f"counted in {sum(row['counted'] == '1' for row in rows)} of {ROUNDS} rounds" + "".join(
            f"; {each}" for each in why
        )

    def note(self, fault: str, outcome: str, bits: str, seen: str) -> None:
        self.rows.append([fault, outcome, bits, " ".join(seen.split()).replace("|", "/")[:260]])
        print(*self.rows[-1], sep=" | ", file=sys.stderr, flush=True)

    def end(self, *names: str) -> None:
        """Kill sites' processes, all of them by default."""
        for name in names or tuple(self.sites):
            kill(self.sites.pop(name))


def kill(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
    """A process with all that it has started."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return
    if number in (signal.SIGKILL, signal.SIGTERM):
        process.wait(60)


def halt(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Stop a process with all that came of it, whatever sessions they are in, or let them go on."""
    waiting = [process.pid]
    while waiting:
        pid = waiting.pop()
        for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
            waiting += map(int, tasks.read_text().split())
        os.kill(pid, number)


def undisturbed(faults: Faults) -> None:
    """The training that others are compared with."""
    for name in SOUND:
        faults.site(name)
    if faults.serve("undisturbed", gather=20).wait(300):
        raise SystemExit(faults.said("server of undisturbed"))


def servers(faults: Faults) -> None:
    """The server killed, and ended; a site that halts for a while."""
    for fault, number in (("killed", signal.SIGKILL), ("ended by SIGTERM", signal.SIGTERM)):
        run = f"server-{number}"
        server = faults.serve(run, gather=20)
        faults.round_of(run, 1)
        kill(server, number)
        done = len({row["round"] for row in faults.contributed(run)})
        code = faults.serve(run, "--ckpt_path", "last", gather=20).wait(300)
        seen = f"exit {code} after --ckpt_path last; {done} rounds were over"
        faults.note(f"the server is {fault}", "survived" if not code else "failed", faults.same(run), seen)
    with small_disk(faults.folder / "disk-of-server", 60) as disk:
        full = faults.serve("disk-of-server", gather=20).wait(300)
        ended = faults.said("server of disk-of-server").strip().splitlines()[-1]
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        code = faults.serve("disk-of-server", "--ckpt_path", "last", gather=20).wait(300)
        outcome = "survived" if full and not code else "failed"
        bits = "not promised" if code else faults.same("disk-of-server")
        faults.note("the server's disk is full", outcome, bits, f"exit {full}: {ended}; then exit {code}")
    server = faults.serve("halted", gather=20)
    faults.round_of("halted", 1)
    halt(faults.sites[SOUND[0]], signal.SIGSTOP)
    time.sleep(8)
    halt(faults.sites[SOUND[0]], signal.SIGCONT)
    code = server.wait(300)
    seen = f"exit {code}; {faults.told('halted', SOUND[0])}"
    faults.note("a site halts for 8 seconds of 60", "survived", faults.same("halted"), seen)


def liars(faults: Faults, names: tuple[str, ...]) -> None:
    """Sites whose every answer is wrong."""
    run = f"hostile-{names[0]}"
    for name in names:
        faults.site(name, lies=name)
    code = faults.serve(run).wait(400)
    for name in names:
        counted = any(row["client"] == name and row["counted"] == "1" for row in faults.contributed(run))
        outcome = "failed" if code or counted else "left out"
        faults.note(f"every answer: {name}", outcome, faults.same(run), faults.told(run, name))
    faults.end(*names)


@contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[Path]:
    """A disk of its own that is nearly full."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def sites(faults: Faults) -> None:
    """Sites killed, halted, without data or disk, and one that comes when the training goes on already."""
    with small_disk(faults.folder / "disk of a site", 24) as disk:
        for name in FAULTY:
            faults.site(name, fails=150 if name == "data" else 0, run=disk / "run" if name == "disk" else None)
        server = faults.serve("faulty", patience=10)
        faults.round_of("faulty", 1)
        kill(faults.sites["killed"])
        kill(faults.sites["returns"])
        halt(faults.sites["stopped"], signal.SIGSTOP)
        halt(faults.sites["deaf"], signal.SIGSTOP)
        faults.site("returns")
        faults.site(LATE)
        faults.round_of("faulty", 2)
        halt(faults.sites["stopped"], signal.SIGCONT)
        code = server.wait(400)
    whole = all(
        sum(r["client"] == s and r["counted"] == "1" for r in faults.contributed("faulty")) == ROUNDS for s in SOUND
    )
    for name, fault in {**FAULTY, LATE: "a site comes when the training goes on"}.items():
        outcome = "survived" if not code and whole else "failed"
        faults.note(fault, outcome, "not promised", f"exit {code}; {faults.told('faulty', name)}")
    halt(faults.sites["deaf"], signal.SIGCONT)
    faults.end(*FAULTY, LATE)


def callers(faults: Faults) -> None:
    """Who calls with a certificate that does not hold, and who calls twice."""
    for name in CALLERS:
        faults.site(name)
    shutil.copytree(faults.kits["twice"], faults.folder / "twice, again")
    first = faults.sites["twice"]
    server = faults.serve("called", gather=60, patience=30)
    faults.site("twice", kit=faults.folder / "twice, again", run=faults.folder / "twice, again" / "run")
    code = server.wait(400)
    counted = {row["client"] for row in faults.contributed("called") if row["counted"] == "1"}
    for name in CALLERS:
        let_in, told = name in counted, [line for line in faults.said(name).splitlines() if line.strip()]
        seen = faults.told("called", name) if let_in else told[-1] if told else "nothing was said"
        expected = name in ("hour-ahead", "hour-behind", "twice")
        outcome = ("survived" if let_in else "refused") if expected != (not let_in) and not code else "failed"
        faults.note(f"certificate: {name}" if name != "twice" else "a name calls twice", outcome, "not promised", seen)
    kill(first)
    faults.end(*CALLERS)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where all files stay; by default they are deleted")
    parts = {
        "servers": servers,
        **{f"liars {i + 1}": partial(liars, names=HOSTILE[i::4]) for i in range(4)},
        "sites": sites,
        "callers": callers,
    }
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    args = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as made:
        folder = (args.folder or Path(made)).absolute()
        folder.mkdir(exist_ok=True)
        faults = Faults(folder)
        try:
            undisturbed(faults)
            for part in args.parts:
                parts[part](faults)
                publish(table(faults, time.monotonic() - begun), args.output)
        finally:
            faults.end()


def table(faults: Faults, seconds: float) -> str:
    """What has been seen until now."""
    failed = sum(row[1] == "failed" for row in faults.rows)
    notes = (
        f"NVIDIA FLARE with mutual TLS on one machine; {len(SOUND)} sound sites in every training, {ROUNDS} rounds; "
        f"{seconds / 60:.0f} minutes. {len(faults.rows)} faults, {failed} of them not survived or not refused."
    )
    header = ["fault", "outcome", "model's bits", "seen"]
    return markdown("Faults of institutions over mutual TLS", header, faults.rows, notes)


if __name__ == "__main__":
    main()
