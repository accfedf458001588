"""One configuration gives the same server's model in one process, on four ranks, and through FLARE with four sites.

Three commands for each algorithm, which differ in nothing else: `fit`, `fit --trainer.devices 4`, and `federate`. The
table has the largest difference of an entry of the model from that of one process, relative to the largest absolute
value of its tensor. What is not within the bar in single precision, as shipped, is run again in double precision.

python -m evidence.same_model --output evidence/results/same_model.md
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.carriers.fit import QUIET

BAR = 1e-6
PRECISIONS = ("32-true", "64-true")
CLASSIFIER = ["--config", "digits_classifier.yaml", "--data.clients", "4"]
DIGITS = ["--data.clients", "4", "--data.local_steps", "5"]
GAN = ["--config", "digits.yaml", *DIGITS, "--data.warmup_steps", "10"]
SITES = ["--config", "digits_generator_sites.yaml", *DIGITS, "--data.warmup_steps", "10"]
HERDING = ["--federation.algorithm.points", "100", "--federation.algorithm.herding_steps", "10"]
TOY = ["--config", "graffl_toy.yaml", "--data.partition", "iid", "--data.clients", "4", "--data.points", "400"]
ALGORITHMS = {
    "FedAvg": CLASSIFIER,
    "FedProx": [*CLASSIFIER, "--config", "algorithms/fedprox.yaml"],
    "SCAFFOLD": [*CLASSIFIER, "--config", "algorithms/scaffold.yaml"],
    "FedAdam": [*CLASSIFIER, "--config", "algorithms/fedadam.yaml"],
    "EP": GAN,
    "tied EP": [*GAN, "--federation.algorithm.tied", "true"],
    "generator sites": SITES,
    "embedding sites": [*SITES, "--config", "algorithms/embedding_sites.yaml", "--model.lr", "1e-3", *HERDING],
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


def small(rounds: int) -> list[str]:
    """Words that leave out all but the training."""
    settings = QUIET | {"max_epochs": str(rounds), "accelerator": "cpu"}
    return [word for key, value in settings.items() for word in (f"--trainer.{key}", value)]


def apart(words: list[str]) -> list[float]:
    """How far four ranks' and four sites' models are from that of one process."""
    with tempfile.TemporaryDirectory() as folder:
        models = [model(way, words, Path(folder) / str(k)) for k, way in enumerate(WAYS.values())]
    return [difference(each, models[0]) for each in models[1:]]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--kept", type=Path, help="a file of what has been found, to go on with")
    args = parser.parse_args()
    kept = args.kept.read_text().splitlines() if args.kept is not None and args.kept.is_file() else []
    known = {(each["algorithm"], each["precision"]): each["apart"] for each in map(json.loads, kept)}
    for name in args.algorithms:
        for precision in PRECISIONS:
            if (name, precision) not in known:
                found = apart([*ALGORITHMS[name], *small(args.rounds), "--trainer.precision", precision])
                known[name, precision] = found
                line = json.dumps({"algorithm": name, "precision": precision, "apart": found})
                print(line, flush=True)
                if args.kept is not None:
                    args.kept.write_text("\n".join([*(kept := [*kept, line])]) + "\n")
            if met(known[name, precision]):
                break
    publish(table(known, args.algorithms, args.rounds), args.output)


def met(found: list[float]) -> bool:
    """Whether the differences are within the bar."""
    return all(each <= BAR for each in found)


def table(known: dict[tuple[str, str], list[float]], names: list[str], rounds: int) -> str:
    """A row for each algorithm and each precision that it was run in."""
    rows = []
    for name, bits in ((name, bits) for name in names for bits in PRECISIONS if (name, bits) in known):
        found = known[name, bits]
        rows.append([name, bits, *(f"{each:.1e}" if each else "0" for each in found), "yes" if met(found) else "no"])
    return markdown(
        "One configuration, the same model",
        ["algorithm", "precision", "four gloo ranks", "four sites, FLARE", f"at most {BAR:g}"],
        rows,
        f"The shipped configurations of the digits, and GRAFFL's of the toy: four clients, {rounds} rounds. The "
        "largest difference of an entry of the server's model from that of one process, relative to the largest "
        "absolute value of its tensor. 0: the same bits.",
    )


if __name__ == "__main__":
    main()
