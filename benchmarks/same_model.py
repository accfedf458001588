"""One configuration gives the same server's model in one process, on four ranks, and through FLARE with four sites.

Three commands for each algorithm, which differ in nothing else: `fit`, `fit --trainer.devices 4`, and `federate`. The
table has the largest difference of an entry of the model from that of one process, relative to the largest absolute
value of its tensor.

python benchmarks/same_model.py --output benchmarks/results/same_model.md
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from side_by_side import markdown, options, publish

from lit_epgan.flare.plan import QUIET

BAR = 1e-6
CLASSIFIER = ["--config", "digits_classifier.yaml", "--data.clients", "4"]
DIGITS = ["--data.clients", "4", "--data.local_steps", "5"]
GAN = ["--config", "digits.yaml", *DIGITS, "--data.warmup_steps", "10"]
SITES = ["--config", "digits_generator_sites.yaml", *DIGITS, "--data.warmup_steps", "10"]
TOY = ["--config", "graffl_toy.yaml", "--data.partition", "iid", "--data.clients", "4", "--data.points", "400"]
ALGORITHMS = {
    "FedAvg": CLASSIFIER,
    "FedProx": [*CLASSIFIER, "--config", "algorithms/fedprox.yaml"],
    "SCAFFOLD": [*CLASSIFIER, "--config", "algorithms/scaffold.yaml"],
    "FedAdam": [*CLASSIFIER, "--config", "algorithms/fedadam.yaml"],
    "EP": GAN,
    "tied EP": [*GAN, "--federation.algorithm.tied", "true"],
    "generator sites": SITES,
    "embedding sites": [*SITES, "--config", "algorithms/embedding_sites.yaml", "--model.lr", "1e-3"],
    "FedNP": [*CLASSIFIER, "--config", "algorithms/fednp.yaml"],
    "FedAvg-GAN": ["--config", "digits_fedavg_gan.yaml", *DIGITS],
    "DP-FedAvg, zero noise": [*CLASSIFIER, "--config", "algorithms/norm_clipping.yaml"],
    "DP-FedAvg": [*CLASSIFIER, "--config", "algorithms/central_noise.yaml", "--federation.mechanism.noise_seed", "1"],
    "GRAFFL": TOY,
}
WAYS = {"one process": ["fit"], "four ranks": ["fit", "--trainer.devices", "4"], "four sites": ["federate"]}


def model(command: list[str], words: list[str], folder: Path) -> dict[str, torch.Tensor]:
    """The server's model that a command ends with; nothing where it fails."""
    command = [sys.executable, "-m", "lit_epgan", *command, *words, "--trainer.default_root_dir", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}", flush=True)
        return {}
    loaded: dict[str, torch.Tensor] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return loaded


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest of an entry, relative to the largest absolute value of its tensor."""
    if not found or found.keys() != expected.keys():
        return float("nan")
    pairs = [(found[name].double(), value.double()) for name, value in expected.items() if value.numel()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    args = parser.parse_args()
    small = QUIET | {"max_epochs": str(args.rounds), "accelerator": "cpu"}
    settings = [word for key, value in small.items() for word in (f"--trainer.{key}", value)]
    rows, begun = [], time.monotonic()
    for name in args.algorithms:
        words = [*ALGORITHMS[name], *settings]
        with tempfile.TemporaryDirectory() as folder:
            models = [model(way, words, Path(folder) / str(k)) for k, way in enumerate(WAYS.values())]
        apart = [difference(each, models[0]) for each in models[1:]]
        met = all(each <= BAR for each in apart)
        rows.append([name, *(f"{each:.1e}" if each else "0" for each in apart), "yes" if met else "**no**"])
        print(rows[-1], f"{time.monotonic() - begun:.0f} s", flush=True)
    publish(table(rows, args.rounds), args.output)


def table(rows: list[list[str]], rounds: int) -> str:
    """A row for each algorithm."""
    return markdown(
        "One configuration, the same model",
        ["algorithm", "four gloo ranks", "four sites, FLARE", f"at most {BAR:g}"],
        rows,
        f"The shipped configurations of the digits, and GRAFFL's of the toy: four clients, {rounds} rounds, single "
        "precision. The largest difference of an entry of the server's model from that of one process, relative to the "
        "largest absolute value of its tensor. 0: the same bits.",
    )


if __name__ == "__main__":
    main()
