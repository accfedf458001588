"""Three hospitals and a server on a network of their own: mutual TLS, two trainings, a site and the server killed.

Each machine is a network namespace. Each hospital holds scans (the digits, of which two hospitals lack some) behind a
manifest of its own, and a table of tumours. The first training is that of digits_classifier.yaml. In it one hospital's
line is slow, one's is cut for a while, one hospital is killed, and then the server. The second training is of a
LightningModule that is not ours. Then each hospital tests both models on its own data. A kit of another authority tries
to take part, too.

Needs root, iproute2, and the extra flare.

python -m evidence.hospital_walk --output evidence/results/hospital_walk.md
"""

import argparse
import csv
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

from benchmarks.side_by_side import markdown, options, publish
from evidence.network import Network

HOST = "fl.example.org"
SITES = {"east": range(10), "north": range(8), "south": range(2, 10)}  # and the digits that they see
CUT = 8  # seconds
ENGINE = [sys.executable, "-m", "lit_epgan"]
HERE = Path(__file__).resolve().parent
SCANS = """base: digits_classifier.yaml
trainer:
  max_epochs: {rounds}
  callbacks: [lit_epgan.callbacks.RoundCheckpoint, lit_epgan.callbacks.FederatedProgressBar]
"""
OWN_SCANS = """data:
  class_path: lit_epgan.datamodules.FolderDataModule
  init_args:
    path: manifest.csv
    image_size: 8
    color: grayscale
    classes: ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9']
    batch_size: 32
"""
TUMOURS = """seed_everything: 0
federation: {{class_path: lit_epgan.callbacks.FederationCallback, init_args: {{algorithm: lit_epgan.federated.FedAvg}}}}
model: hospital_module.Diagnosis
trainer: {{max_epochs: {rounds}, accelerator: cpu, logger: false, callbacks: [lit_epgan.callbacks.RoundCheckpoint]}}
"""
OWN_TUMOURS = """data:
  class_path: lit_epgan.datamodules.Institutions
  init_args:
    datamodules: {{{site}: {{class_path: hospital_module.Tumours, init_args: {{path: tumours.csv}}}}}}
"""


class Walk:
    """The machines' folders, and what has happened when.

    Args:
        folder: holds a folder for each machine.
        network: the machines.
        rounds: of the first training.
    """

    def __init__(self, folder: Path, network: Network, rounds: int) -> None:
        self.folder, self.network, self.rounds = folder, network, rounds
        self.start, self.steps = time.monotonic(), list[tuple[str, str, str]]()

    def note(self, what: str, seen: str) -> None:
        """A step is done."""
        self.steps.append((f"{time.monotonic() - self.start:.0f}", what, seen))
        print(*self.steps[-1], sep=" | ", flush=True)

    def run(self, machine: str, *words: str) -> subprocess.Popen[bytes]:
        """``python -m lit_epgan WORDS`` on a machine."""
        folder = self.folder / machine
        with (folder / "terminal.log").open("ab") as log:
            return self.network.start(machine, [*ENGINE, *words], folder, log, {"PYTHONPATH": str(folder)})

    def site(self, site: str, agreed: str) -> None:
        """A hospital takes part."""
        self.run(site, "federate", "--site", site, "--config", agreed, "--config", f"own_{agreed}")

    def serve(self, agreed: str, *words: str) -> subprocess.Popen[bytes]:
        """The server runs a training."""
        kits = ["--server", HOST, "--operator", "operator@example.org"]
        return self.run("server", "federate", *kits, "--config", agreed, "--patience", "20", *words)

    def contributed(self, agreed: str) -> list[dict[str, str]]:
        """Who contributed when, as the server lists it."""
        path = self.folder / "server" / "runs" / Path(agreed).stem / "contributions.csv"
        return list(csv.DictReader(path.open())) if path.is_file() else []

    def until(self, happened: Callable[[], bool], what: str, seconds: float = 240) -> None:
        """Wait.

        Raises:
            SystemExit: it did not happen.
        """
        end = time.monotonic() + seconds
        while not happened():
            if time.monotonic() > end:
                raise SystemExit(f"{what} did not happen; {self.folder} holds everybody's logs")
            time.sleep(0.1)

    def round_is_over(self, agreed: str, number: int) -> Callable[[], bool]:
        return lambda: any(int(row["round"]) >= number for row in self.contributed(agreed))

    def tested(self, site: str, agreed: str, metric: str) -> str:
        """What a hospital measures on its own test data with the model that it was given."""
        words = ["test", "--config", agreed, "--config", f"own_{agreed}", "--ckpt_path", "model.ckpt"]
        self.run(site, *words, "--trainer.logger", "false").wait()
        said = (self.folder / site / "terminal.log").read_text(errors="replace")
        return re.findall(rf"{metric}\W+([0-9.]+)", said)[-1][:5]


def place_data(folder: Path, rounds: int) -> None:
    """Everybody's files: what is agreed, and each hospital's own data and configuration."""
    digits, tumours = load_digits(), load_breast_cancer()
    scans = (digits.images / 16 * 255).astype(np.uint8)
    table = np.column_stack([(tumours.data - tumours.data.mean(0)) / tumours.data.std(0), tumours.target])
    for k, (site, seen) in enumerate(SITES.items()):
        own = folder / site
        (own / "scans").mkdir(parents=True)
        rows = []
        for i in range(k, len(scans), len(SITES)):
            if digits.target[i] in seen:
                Image.fromarray(scans[i]).save(own / "scans" / f"{i}.png")
                rows.append([f"scans/{i}.png", site, digits.target[i], "test" if i % 5 == 0 else "train"])
        with (own / "manifest.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["path", "client", "label", "split"], *rows])
        np.savetxt(own / "tumours.csv", table[k :: len(SITES)], delimiter=",", fmt="%.5f")
        (own / "own_scans.yaml").write_text(OWN_SCANS)
        (own / "own_tumours.yaml").write_text(OWN_TUMOURS.format(site=site))
    (folder / "server").mkdir()
    for machine in ("server", *SITES):
        (folder / machine / "scans.yaml").write_text(SCANS.format(rounds=rounds))
        (folder / machine / "tumours.yaml").write_text(TUMOURS.format(rounds=5))
        shutil.copy(HERE / "hospital_module.py", folder / machine)


def place_kits(folder: Path) -> None:
    """Ask for certificates, sign, and carry each kit to its machine."""
    sites = ", ".join(SITES)
    members = (
        f"name: hospitals\nserver: {{host: {HOST}, port: 8002}}\nsites: [{sites}]\noperator: operator@example.org\n"
    )
    (folder / "members.yaml").write_text(members)
    names = (HOST, *SITES, "operator@example.org")
    for kits in ("kits", "forged"):
        requests, signs = [["--request", name] for name in names], ["--sites", "members.yaml", "--kits", kits]
        for words in (*requests, signs, *(["--assemble", f"{kits}/{name}"] for name in names)):
            subprocess.run([*ENGINE, "federate", *words], cwd=folder, check=True, capture_output=True)
    for name in (HOST, "operator@example.org"):
        shutil.move(folder / "kits" / name, folder / "server" / name)
    for site in SITES:
        shutil.move(folder / "kits" / site, folder / site / site)


def first_training(walk: Walk) -> None:
    """Scans: a slow line, a hospital killed, the server killed."""
    scans = "scans.yaml"
    walk.network.slow("north", "20mbit")
    for site in SITES:
        walk.site(site, scans)
    server = walk.serve(scans)
    walk.until(walk.round_is_over(scans, 2), "the third round")
    walk.note("three hospitals train; north's line is slow (20 Mbit/s)", f"{len(walk.contributed(scans)) // 3} rounds")
    walk.network.cut("east", down=True)
    time.sleep(CUT)
    walk.network.cut("east", down=False)
    now = len(walk.contributed(scans)) // 3
    walk.until(walk.round_is_over(scans, now + 2), "a round after east's cable was back")
    east = [row for row in walk.contributed(scans) if row["client"] == "east" and int(row["round"]) >= now]
    counted = sum(int(row["counted"]) for row in east)
    walk.note(f"east's cable is pulled for {CUT} seconds", f"east has counted in {counted} of {len(east)} rounds after")
    walk.network.kill("south")
    now = len(walk.contributed(scans)) // 3
    walk.until(walk.round_is_over(scans, now + 3), "a round without south")
    told = {row["why"] for row in walk.contributed(scans) if row["client"] == "south" and row["why"]}
    walk.note("south is killed", "goes on without it: " + "; ".join(sorted(told)))
    walk.network.kill("server")
    done = len(walk.contributed(scans)) // 3
    walk.note("the server is killed", f"after {done} rounds")
    walk.site("south", scans)
    server = walk.serve(scans, "--ckpt_path", "last")
    if server.wait(300):
        raise SystemExit("the second half of the training has failed")
    again = [row for row in walk.contributed(scans) if int(row["round"]) > done and row["client"] == "south"]
    walk.note(
        "both are started again, the server with --ckpt_path last",
        f"all {walk.rounds} rounds; south has counted in {sum(int(row['counted']) for row in again)} of {len(again)}",
    )


def second_training(walk: Walk) -> None:
    """Tumours: a module and a data module that are not ours."""
    for site in SITES:
        walk.network.kill(site)
        walk.site(site, "tumours.yaml")
    if walk.serve("tumours.yaml").wait(300):
        raise SystemExit("the second training has failed")
    rows = walk.contributed("tumours.yaml")
    walk.note("a module that is not ours", f"{sum(int(row['counted']) for row in rows)} of {len(rows)} reports counted")


def forged_kit(walk: Walk) -> None:
    """A site with a kit of another authority calls while a training runs."""
    kit = walk.folder / "south" / "south"
    walk.network.kill("south")
    shutil.move(kit, walk.folder / "south" / "true")
    shutil.move(walk.folder / "forged" / "south", kit)
    walk.site("south", "tumours.yaml")
    server = walk.serve("tumours.yaml", "--gather", "30", "--least", "2")
    code = server.wait(300)
    rows = walk.contributed("tumours.yaml")
    counted = {row["client"] for row in rows if row["counted"] == "1"}
    log = (kit / "flare.log").read_text(errors="replace")
    cause = "certificate" if re.search("certificate|SSL|handshake", log, re.IGNORECASE) else "no answer"
    walk.note("south calls with a kit of another authority", f"exit {code}; counted: {', '.join(counted)}; {cause}")


def hand_out(walk: Walk, agreed: str, metric: str) -> None:
    """Everybody fetches the model, and tests it."""
    run = walk.folder / "server" / "runs" / Path(agreed).stem
    for site in SITES:
        shutil.copy(run / "checkpoints" / "last.ckpt", walk.folder / site / "model.ckpt")
    found = ", ".join(f"{site} {walk.tested(site, agreed, metric)}" for site in SITES)
    walk.note(f"each hospital tests {agreed}'s model on its own data", f"accuracy {found}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--keep", type=Path, help="leave everybody's folders here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, Network(["server", *SITES], HOST) as network:
        folder = args.keep or Path(made)
        folder.mkdir(exist_ok=True)
        walk = Walk(folder, network, args.rounds)
        publish(walked(walk, args), args.output)


def walked(walk: Walk, args: argparse.Namespace) -> str:
    """The table."""
    place_data(walk.folder, args.rounds)
    place_kits(walk.folder)
    walk.note("kits are provisioned, and carried to four machines", "three sites, a server, an operator")
    first_training(walk)
    hand_out(walk, "scans.yaml", "accuracy")
    second_training(walk)
    hand_out(walk, "tumours.yaml", "test/accuracy")
    forged_kit(walk)
    left = [row["entry"] for row in csv.DictReader((walk.folder / "north/runs/own_scans/sent.csv").open())]
    walk.note("all that has left north, by its own list", ", ".join(sorted(set(left))))
    minutes = (time.monotonic() - walk.start) / 60
    return markdown(
        "A hospital's walk", ["seconds", "what", "seen"], walk.steps,
        f"Four machines as network namespaces on two cores, {minutes:.1f} minutes in all; FLARE with mutual TLS.",
    )  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
