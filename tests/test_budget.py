"""What a round costs: local steps and bytes of a client, logged with every round."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from lit_epgan.federated import (
    F2A,
    DistilledSites,
    EmbeddingSites,
    ExpectationPropagation,
    FedAvg,
    FedAvgGAN,
    GeneratorSites,
)
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.runs.loggers import MetricsFile
from tests.federations import federation, fit
from tests.modules import Regression

NUMBER = 8  # bytes, in double precision
WEIGHT = NUMBER  # n_k, by which the federation merges what lies beside the algorithm's report


def budget(folder: Path, module: Any, algorithm: Any, **options: Any) -> pd.DataFrame:
    fit(module, federation(local_steps=3), 3, folder, algorithm=algorithm, logger=MetricsFile(folder), **options)
    rows = pd.read_csv(folder / "metrics.csv").filter(like="client/").dropna()
    return rows.rename(columns=lambda name: name.removeprefix("client/"))


def gan(average: float | None = None) -> GAN:
    return GAN(MLPGenerator((3,), hidden=(8,), tanh=False), MLPDiscriminator((3,), hidden=(6, 5)), average=average)


def count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_fedavg_sends_its_vector_and_its_weight(tmp_path: Path) -> None:
    module = Regression()
    rows = budget(tmp_path, module, FedAvg())
    assert rows["steps"].tolist() == [3, 3, 3]
    assert rows["bytes_down"].tolist() == [NUMBER * count(module)] * 3
    assert rows["bytes_up"].tolist() == [NUMBER * (count(module) + 1) + WEIGHT] * 3


def test_buffers_that_training_changes_count(tmp_path: Path) -> None:
    module = Regression(batch_norm=True)
    rows = budget(tmp_path, module, FedAvg())
    assert {name for name, _ in module.named_buffers()} == {
        f"body.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    numbers = count(module) + 8 + 8 + 1
    # everybody has the configuration's buffers: they travel when they have changed
    assert rows["bytes_down"].tolist() == [NUMBER * count(module), NUMBER * numbers, NUMBER * numbers]
    assert rows["bytes_up"].tolist() == [NUMBER * (numbers + 1) + WEIGHT] * 3


def test_buffers_that_nobody_changes_do_not_travel(tmp_path: Path) -> None:
    module = Regression()
    module.register_buffer("constant", torch.arange(100.0))
    rows = budget(tmp_path, module, FedAvg())
    assert rows["bytes_down"].tolist() == [NUMBER * count(module)] * 3
    assert rows["bytes_up"].tolist() == [NUMBER * (count(module) + 1) + WEIGHT] * 3


def test_expectation_propagation_sends_two_vectors_down(tmp_path: Path) -> None:
    """In the first round the model, and the sums of three normalisers by themselves; later they come with q."""
    module = Regression()
    rows = budget(tmp_path, module, ExpectationPropagation())
    model, sites, means = NUMBER * count(module), NUMBER, 2 * NUMBER
    assert rows["bytes_down"].tolist() == [model + sites + means, *[2 * model + sites + means] * 2]
    up = 3 * NUMBER + WEIGHT + 2 * model + sites
    assert rows["bytes_up"].tolist() == [up + NUMBER, up, up]  # the number of clients twice, in two exchanges


@pytest.mark.parametrize("average", [None, 0.99])
def test_discriminators_alone_travel_up(tmp_path: Path, average: float | None) -> None:
    module = gan(average)
    generator, discriminator = count(module.generator), count(module.discriminator)
    rows = budget(tmp_path / "a", module, FedAvgGAN())
    assert rows["bytes_down"].tolist() == [NUMBER * (generator + discriminator)] * 3
    assert rows["bytes_up"].tolist() == [NUMBER * (discriminator + 1) + WEIGHT] * 3
    rows = budget(tmp_path / "b", gan(average), F2A())
    # the discriminator that everybody begins with once
    assert rows["bytes_down"].tolist() == [NUMBER * (generator + discriminator), *[NUMBER * generator] * 2]
    assert rows["bytes_up"].tolist() == [NUMBER * discriminator + WEIGHT] * 3


@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_sites_travel_once_unless_they_are_refined(tmp_path: Path, refine: float) -> None:
    module = gan()
    site, model = NUMBER * count(module.generator), NUMBER * count(module)
    rows = budget(tmp_path, module, GeneratorSites("generator", pool=20, own_rows=2, refine=refine))
    others = 3 * (site + NUMBER)  # with their records
    assert rows["bytes_down"].tolist() == [model, model + others, model + (others if refine else 0)]
    alone = model + NUMBER + WEIGHT
    first = alone + site + NUMBER  # the site's records
    assert rows["bytes_up"].tolist() == [first, *([first] * 2 if refine else [alone] * 2)]


def test_a_round_of_the_server_alone_costs_clients_nothing(tmp_path: Path) -> None:
    module = gan()
    rows = budget(tmp_path, module, DistilledSites("generator", pool=20, server_steps=2, batch_size=4))
    assert rows["steps"].tolist() == [3, 0, 0]
    assert rows["bytes_down"].tolist() == [NUMBER * count(module), 0, 0]
    assert rows["bytes_up"].tolist() == [NUMBER * (count(module) + 1 + count(module.generator) + 1) + WEIGHT, 0, 0]


def test_embeddings_travel_once(tmp_path: Path) -> None:
    algorithm = EmbeddingSites(frequencies=16, points=10, herding_steps=2, own_rows=2)
    rows = budget(tmp_path, gan(), algorithm)
    down, up = rows["bytes_down"].tolist(), rows["bytes_up"].tolist()
    assert down[1] > down[2] == down[0] + NUMBER  # whose sum it is that the client has
    assert up[0] > up[1] == up[2]
