"""What a server sees of each institution's report, by algorithm, with and without secure aggregation; and the bytes.

Every algorithm works for two rounds, and each report is looked at on its way. Bytes are those of the notes that the
largest report goes to the server in: one without masks; with masks two, READY and the masked answer.

python -m evidence.what_the_server_sees --output evidence/results/what_the_server_sees.md
"""

import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import save
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.side_by_side import markdown, options, publish
from lit_epgan.bayes import GaussianMixture
from lit_epgan.callbacks import FederationCallback
from lit_epgan.carriers.protocol import Kind, answered
from lit_epgan.carriers.secure_aggregation import MASKED, Masking, layout_of, numbers_in
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, Answer, Median, Round, Task
from lit_epgan.engine.mechanisms import MASKS, refuse_single_reports
from lit_epgan.engine.wire import encode_answer
from lit_epgan.federated import (
    F2A,
    MDGAN,
    SCAFFOLD,
    DiscrepancySearch,
    EmbeddingSites,
    ExpectationPropagation,
    FedAdam,
    FedAvg,
    FedAvgGAN,
    FedNP,
    FedProx,
    FedSeq,
    GeneratorSites,
    TiltedExpectationPropagation,
)
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import GAN, Classifier, Posterior
from lit_epgan.networks import MLPBackbone, MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, DistributedNoise

CLIENTS = 4


def classifier() -> LightningModule:
    return Classifier(MLPBackbone((1, 8, 8), (64,)), nn.Linear(64, 10), partial(torch.optim.SGD, lr=0.1))


def gan() -> LightningModule:
    return GAN(MLPGenerator(), MLPDiscriminator(), average=None)


def posterior() -> LightningModule:
    return Posterior(GaussianMixture(1, 3), particles=40)


def size(module: LightningModule) -> int:
    """How many parameters a module has."""
    return sum(p.numel() for p in module.parameters())


def private(kind: Callable[..., Any]) -> dict[str, Any]:
    return {"mechanism": kind(1.0, 1.0), "buffers": "exclude"}


CASES: dict[str, tuple[Callable[[], LightningModule], Callable[[], Algorithm], dict[str, Any]]] = {
    "FedAvg": (classifier, FedAvg, {}),
    "FedProx": (classifier, partial(FedProx, 0.1), {}),
    "SCAFFOLD": (classifier, SCAFFOLD, {}),
    "FedAdam": (classifier, FedAdam, {}),
    "EP": (classifier, ExpectationPropagation, {}),
    "tied EP": (classifier, partial(ExpectationPropagation, tied=True), {}),
    "FedNP": (classifier, partial(FedNP, "backbone", "head", latent=2, hidden=8), {}),
    "FedAvg-GAN": (gan, partial(FedAvgGAN, server_steps=2, batch_size=4), {}),
    "tilted EP": (gan, partial(TiltedExpectationPropagation, "discriminator.layers.0", components=2, hidden=4), {}),
    "embedding sites": (gan, partial(EmbeddingSites, frequencies=64, points=20, herding_steps=2), {}),
    "DP-FedAvg, noise by the server": (classifier, FedAvg, private(CentralNoise)),
    "DP-FedAvg, noise by the clients": (classifier, FedAvg, private(DistributedNoise)),
    "GRAFFL's search": (posterior, partial(DiscrepancySearch, frequencies=6, moves=2), {}),
    "generator sites": (gan, partial(GeneratorSites, "generator", own_rows=3, pool=20), {}),
    "F2A": (gan, partial(F2A, server_steps=1), {}),
    "MD-GAN": (gan, partial(MDGAN, batch_size=4, swap_every=1), {}),
    "MD-GAN without swaps": (gan, partial(MDGAN, batch_size=4), {}),
    "FedSeq": (classifier, partial(FedSeq, length=2), {}),
    "FedAvg by a median": (classifier, FedAvg, {"aggregator": Median()}),
}


@dataclass
class Seen:
    """What is seen of an exchange's reports: entries by how they are combined, and bytes of the largest report."""

    sums: set[str] = field(default_factory=set)
    single: set[str] = field(default_factory=set)
    plain: int = 0
    masked: int = 0
    refused: bool = False

    def take(self, round_: Round, task: Task, answer: Answer) -> None:
        """One client's answer."""
        combined, federation = round_._combination, round_._federation
        for name, term in answer.report.items():
            changed = federation.aggregator is not None and not combined._sums(name, term)
            (self.single if name in combined._named or changed else self.sums).add(name)
        self.plain = max(self.plain, len(answered(task, encode_answer(answer)).written()))
        self.masked = max(self.masked, _masked(task, answer))
        try:
            refuse_single_reports(federation.algorithm, combined._named, federation.aggregator, MASKS)
        except UserError:
            self.refused = True


def _masked(task: Task, answer: Answer) -> int:
    """Bytes of a READY note and of the masked answer; the key is not signed, which takes two kilobytes more."""
    ready = answered(task, Masking("a", ["a"]).ready(task, answer, CLIENTS), Kind.READY)
    numbers = torch.zeros(numbers_in(layout_of(answer.report)) + 1, dtype=torch.int64)  # and the local steps
    return len(ready.written()) + len(answered(task, save({MASKED: numbers})).written())


def data(kind: Callable[[], LightningModule]) -> FederatedDataModule:
    """Random images and labels, or random points."""
    generator = torch.Generator().manual_seed(0)
    shape = (3,) if kind is posterior else (1, 8, 8)
    sets = [TensorDataset(torch.rand(20, *shape, generator=generator), torch.arange(20) % 10) for _ in range(CLIENTS)]
    return FederatedDataModule.from_datasets(sets, batch_size=8, local_steps=2)


def seen(name: str) -> dict[str, Seen]:
    """What is seen of an algorithm's reports, by its questions."""
    kind, algorithm, settings = CASES[name]
    found: dict[str, Seen] = {}
    original = Round.receive

    def receive(round_: Round, client: int, answer: Answer, *look: Any) -> None:
        assert round_.exchange is not None
        task = Task(client, round_.number, 0, round_.exchange.question, False, {})
        found.setdefault(task.question, Seen()).take(round_, task, answer)
        original(round_, client, answer, *look)

    torch.manual_seed(0)
    with mock.patch.object(Round, "receive", receive), tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            max_epochs=2,
            accelerator="cpu",
            callbacks=[FederationCallback(algorithm(), **settings)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(kind(), datamodule=data(kind))
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--algorithms", nargs="*", default=list(CASES))
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = []
    for name in args.algorithms:
        for question, each in seen(name).items():
            with_masks = "refused" if each.refused else "their sums"
            sizes = [f"{each.plain:,}", "" if each.refused else f"{each.masked:,}"]
            listed = [", ".join(sorted(entries)) for entries in (each.sums, each.single)]
            rows.append([name, question, *listed, with_masks, *sizes])
    header = ["algorithm", "question", "entries that sum", "entries looked at one by one", "with masks the server sees"]
    publish(
        markdown(
            "What the server sees of an institution's report",
            [*header, "bytes without masks", "bytes with masks"],
            rows,
            "Without secure aggregation the server sees every entry of every report, and each institution's local "
            "steps. With it, it sees who takes part, and the names and shapes of the entries; of the numbers the sums "
            "over all members. An algorithm that looks at entries one by one is refused. Networks in float32: a "
            f"classifier of {size(classifier()):,} parameters, a GAN of {size(gan()):,}, {size(posterior()):,} "
            "numbers for GRAFFL. A masked number takes 8 bytes.",
        ),
        args.output,
    )


if __name__ == "__main__":
    main()
