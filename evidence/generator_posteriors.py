"""Ten generators drawn from EP's posterior against its mean alone: distance, precision, recall and classes covered.

OMP_NUM_THREADS=1 python -m evidence.generator_posteriors --output evidence/results/generator_posteriors.md

scikit-learn's digits, ten clients with one digit each, configs/digits.yaml: EP in parameter space, whose server keeps
q(theta), a diagonal Gaussian over both networks' parameters. Ten generators theta_j ~ N(mean, T / precision) give
samples in turn, of the same noise as the mean's. q's precisions are relative to one client's mean precision, so that T
has no value of its own: it is chosen on the seed ``--tuning``, which no result uses. The control has one precision for
all parameters, and the same sum of variances. A client takes 650 steps, as in studies/digits_table1.yaml; with ``--fit
data.warmup_steps=500 data.local_steps=20`` the configuration's 2,500. ``--kept FILE`` keeps what is finished.
"""

import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from benchmarks.side_by_side import markdown, options, publish
from evidence.attacked_sites import QUIET, Watched
from lit_epgan.bayes.gaussian import factor_of
from lit_epgan.callbacks import FederationCallback
from lit_epgan.callbacks.generative_metrics import real_images
from lit_epgan.cli.significance import paired
from lit_epgan.lib.randomness import generator_for
from lit_epgan.metrics import feature_extractor
from lit_epgan.metrics.image_scores import ImageScores, reference

BUDGET = ["--data.warmup_steps", "150", "--data.local_steps", "5"]  # of configs/studies/digits_table1.yaml
MEAN, AVERAGE = "the mean", "moving average, which a run evaluates"
MEASURES = {"fid": "Frechet distance", "precision": "precision", "recall": "recall", "classes": "classes"}
CHOICES = (("fid_digits", -1), ("recall_digits", 1))
Scores = dict[str, float]


class Judged(Callback):
    """When training ends, the scores of the mean's samples, of the moving average's and of the draws' by row.

    Args:
        temperatures: of the draws.
        members: generators in a draw.
        n: samples of each row.
    """

    def __init__(self, temperatures: list[float], members: int, n: int) -> None:
        self.temperatures, self.members, self.n = temperatures, members, n
        self.found: dict[str, Scores] = {}

    @torch.no_grad()
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        server = next(c for c in trainer.callbacks if isinstance(c, FederationCallback)).server  # type: ignore[attr-defined]
        network, size = module.generator, sum(p.numel() for p in module.generator.parameters())
        mean, variance = (moment[:size] for moment in factor_of(server.state).moments)  # the generator's are the first
        assert torch.equal(nn.utils.parameters_to_vector(network.parameters()), mean.float())
        noise = torch.randn(self.n, module.latent_dim, generator=generator_for("latent", server.seed))
        z = torch.randn(self.members, size, generator=generator_for("draws", server.seed), dtype=mean.dtype)
        extractor = feature_extractor("digits", Path("data"))
        real = reference(extractor, partial(real_images, trainer.datamodule, "test"))  # type: ignore[attr-defined]

        def judge(name: str, images: Tensor) -> None:
            scores = ImageScores(extractor, self.n)
            scores.add(images)
            self.found[name] = scores.of_samples() | scores.against(real)

        def in_turn(parameters: Tensor) -> Tensor:
            """Samples (n, ...), row i by the generator with the parameters (members, d) of i modulo members."""
            images = torch.empty(self.n, *module.evaluated_generator(noise[:1]).shape[1:])
            for j, own in enumerate(parameters):
                nn.utils.vector_to_parameters(own.float(), network.parameters())
                images[j :: len(parameters)] = network(noise[j :: len(parameters)])
            return images

        network.eval()
        judge(AVERAGE, module.average.eval()(noise))
        judge(MEAN, in_turn(mean[None]))
        for t in self.temperatures:
            judge(f"posterior, T = {t:g}", in_turn(mean + (t * variance).sqrt() * z))
            judge(f"one precision, T = {t:g}", in_turn(mean + (t * variance.mean()).sqrt() * z))


def trained(seed: int, args: Any) -> dict[str, Scores]:
    judged = Judged(args.temperatures, args.members, args.samples)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--config", "digits.yaml", *QUIET, *BUDGET, *args.fit, "--trainer.default_root_dir", folder]
        Watched([*words, "--seed_everything", str(seed)], judged)  # type: ignore[arg-type]
    return judged.found


def all_trained(args: Any) -> dict[int, dict[str, Scores]]:
    """By seed: from the file what it has, the others now."""
    known = dict(map(json.loads, args.kept.open())) if args.kept and args.kept.is_file() else {}
    sizes = f"{args.temperatures} {args.members} {args.samples} {args.fit}"
    keys = {seed: f"{seed} {sizes}" for seed in [args.tuning, *args.seeds]}
    for seed, key in keys.items():
        if key not in known:
            known[key] = trained(seed, args)
            if args.kept:
                with args.kept.open("a") as file:
                    file.write(json.dumps([key, known[key]]) + "\n")
    return {seed: known[key] for seed, key in keys.items()}


def told(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3g}{spread}"


def p(first: list[float], second: list[float]) -> str:
    value = paired(first, second)
    return "none" if value is None else f"{value:.2g}"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[300, 301, 302, 303, 304])
    parser.add_argument("--tuning", type=int, default=600, help="the seed that T is chosen on")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    parser.add_argument("--members", type=int, default=10, help="generators that are drawn")
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--kept", type=Path, help="keep what is found in this file, and go on from it")
    parser.add_argument("--fit", nargs="+", default=[], help="further words of the trainings, without --: a.b=1")
    args = parser.parse_args()
    args.fit = [f"--{word}" for word in args.fit]
    found = all_trained(args)

    def column(row: str, measure: str) -> list[float]:
        return [found[seed][row][f"{measure}_digits"] for seed in args.seeds]

    tuned = found[args.tuning]
    kinds = [[row for row in tuned if row.startswith(kind)] for kind in ("posterior", "one precision")]
    chosen = [max(rows, key=lambda row: sign * tuned[row][m]) for rows in kinds for m, sign in CHOICES]
    rows = [
        [
            row,
            *(f"{tuned[row][f'{m}_digits']:.3g}" for m in ("fid", "recall")),
            *(told(column(row, m)) for m in MEASURES),
        ]
        for row in tuned
    ]
    tests = [
        f"{row}: {', '.join(f'{MEASURES[m]} {p(column(row, m), column(MEAN, m))}' for m in MEASURES)}"
        for row in dict.fromkeys(chosen)
    ]
    notes = (
        f"{args.samples} samples, {args.members} generators in a draw, the digits classifier's features, the seed's "
        f"test images; mean and standard deviation over seeds {', '.join(map(str, args.seeds))}. Seed {args.tuning} "
        "chose each kind's T, once by distance and once by recall. p against the mean, paired by seed, uncorrected: "
        f"{'; '.join(tests)}."
    )
    heads = ["", *(f"{MEASURES[m]}, seed {args.tuning}" for m in ("fid", "recall")), *MEASURES.values()]
    publish(markdown("Ten generators from EP's posterior", heads, rows, notes), args.output)


if __name__ == "__main__":
    main()
