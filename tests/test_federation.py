"""The callback against a plain loop that knows no Lightning hooks: the same numbers, bit by bit."""

import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Round
from lit_epgan.federated import (
    F2A,
    SCAFFOLD,
    DistilledSites,
    EmbeddingSites,
    ExpectationPropagation,
    FedAvg,
    FedAvgGAN,
    GeneratorSites,
)
from lit_epgan.fit.loop import result_metrics
from lit_epgan.lib.randomness import generator_for
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.runs.loggers import MetricsFile
from tests.federations import SIZES, federation, fit
from tests.modules import Regression, TwoOptimizers


def plain_batches(dataset, local_steps: int | None, round_: int, client: int, batch_size: int = 8):
    n = len(dataset)
    generator = generator_for(0, round_, client, "order")
    if local_steps is None:
        indices = list(torch.randperm(n, generator=generator).split(batch_size))
    else:
        size = min(n, batch_size)
        stream = torch.cat([torch.randperm(n, generator=generator) for _ in range(local_steps * size // n + 1)])
        indices = list(stream[: local_steps * size].split(size))
    return [dataset[i] for i in indices]


def plain_cohort(round_: int, clients: int, size: int | None) -> list[int]:
    if size is None:
        return list(range(clients))
    return sorted(torch.randperm(clients, generator=generator_for(0, round_, "cohort"))[:size].tolist())


def plain_fedavg(module, rounds, steps, local_steps=None, cohort_size=None):
    from tests.plain_loop import PlainLoop, own_batches  # which takes its batches and cohorts from here

    def cohort(round_):
        return plain_cohort(round_, len(SIZES), cohort_size)

    loop = PlainLoop(lambda local, batches, *_: steps(local, batches), cohort, own_batches(local_steps))
    return loop.run(module, rounds)


def sgd_steps(local: Regression, batches) -> None:
    optimizer = local.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        local.loss(batch).backward()
        optimizer.step()


def gan_steps(local: TwoOptimizers, batches) -> None:
    optimizers = local.configure_optimizers()
    for batch in batches:
        for which, optimizer in zip("dg", optimizers, strict=True):
            loss = local.losses(batch[0], which)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def assert_same(ours: nn.Module, reference: nn.Module, skip: tuple[str, ...] = (), tolerance: float = 1e-10) -> None:
    expected = reference.state_dict()
    for name, value in ours.state_dict().items():
        if not name.endswith(skip or ("\0",)):
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(value, expected[name], **close, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("local_steps", [None, 5])
@pytest.mark.parametrize("cohort", [None, 2])
def test_fedavg_equals_a_plain_loop(local_steps, cohort):
    """Unequal clients; with a cohort of 2 of 4, rounds differ in length, and a late long one must arrive whole."""
    module = Regression(dropout=0.2)
    reference = plain_fedavg(module, 5, sgd_steps, local_steps, cohort)
    fit(module, federation(local_steps=local_steps, clients_per_round=cohort), rounds=5)
    assert_same(module, reference)


def test_two_optimizers_and_batchnorm_equal_a_plain_loop():
    module = TwoOptimizers()
    reference = plain_fedavg(module, 3, gan_steps)
    fit(module, federation(), rounds=3)
    assert_same(module, reference, tolerance=1e-7)
    # 3 rounds of 3, 1, 5 and 2 steps, each with two passes through the generator
    assert module.state_dict()["generator.1.num_batches_tracked"] == 3 * (3 + 1 + 5 + 2) * 2


FEW, MANY = 4, 24


class Name(str):
    """A client's name that counts comparisons with other objects; finding itself in a dictionary takes none."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def many(clients: int) -> FederatedDataModule:
    x = torch.randn(clients, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sets = {f"ward-{k}": TensorDataset(own, own.sum(1, keepdim=True)) for k, own in enumerate(x)}
    data = FederatedDataModule.from_datasets(sets, batch_size=2, local_steps=1, val_dataset=sets)
    data.setup()
    data.client_names = [Name(name) for name in data.client_names]
    return data


class Held(Callback):
    """How many logged numbers Lightning holds at each validation batch: it looks through all of them."""

    def __init__(self) -> None:
        self.most: list[int] = []

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.most.append(0)

    def on_validation_batch_end(self, trainer: Trainer, *args) -> None:
        self.most[-1] = max(self.most[-1], len(result_metrics(trainer)))


@pytest.mark.parametrize("clients", [FEW, MANY])
def test_a_batch_of_validation_sees_none_of_the_clients_numbers_of_rounds_before(clients):
    held = Held()
    trainer = fit(Regression(), many(clients), rounds=3, callbacks=[held], num_sanity_val_steps=0)
    assert held.most == [1, 1, 1]  # val_loss
    assert sum("/client/ward-" in name for name in trainer.callback_metrics) == clients


def comparisons(clients: int) -> float:
    trainer = fit(Regression(), many(clients), rounds=1, algorithm=SCAFFOLD())
    Name.compared = 0
    assert len(trainer.callbacks[0].state_dict()["clients"]) == clients
    return Name.compared / clients


def test_no_client_is_searched_for_among_all_or_those_who_are_asked(monkeypatch):
    class Asked(list[int]):
        searches = 0

        def __contains__(self, client: object) -> bool:
            Asked.searches += 1
            return super().__contains__(client)

    ask = Round._ask

    def asked(self: Round) -> None:
        ask(self)
        self.asked = Asked(self.asked)

    monkeypatch.setattr(Round, "_ask", asked)
    fit(Regression(), many(FEW), rounds=2, num_sanity_val_steps=0)
    assert Asked.searches == 0
    assert comparisons(MANY) <= comparisons(FEW)


NUMBER = 8  # bytes, in double precision
WEIGHT = NUMBER  # n_k, by which the federation merges what lies beside the algorithm's report


def budget(folder, module, algorithm, **options) -> pd.DataFrame:
    fit(module, federation(local_steps=3), 3, folder, algorithm=algorithm, logger=MetricsFile(folder), **options)
    rows = pd.read_csv(folder / "metrics.csv").filter(like="client/").dropna()
    return rows.rename(columns=lambda name: name.removeprefix("client/"))


def gan(average: float | None = None) -> GAN:
    return GAN(MLPGenerator((3,), hidden=(8,), tanh=False), MLPDiscriminator((3,), hidden=(6, 5)), average=average)


def count(network: torch.nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def test_fedavg_sends_its_vector_and_its_weight(tmp_path):
    module = Regression()
    rows = budget(tmp_path, module, FedAvg())
    assert rows["steps"].tolist() == [3, 3, 3]
    assert rows["bytes_down"].tolist() == [NUMBER * count(module)] * 3
    assert rows["bytes_up"].tolist() == [NUMBER * (count(module) + 1) + WEIGHT] * 3


def test_buffers_that_training_changes_count(tmp_path):
    module = Regression(batch_norm=True)
    rows = budget(tmp_path, module, FedAvg())
    names = ("running_mean", "running_var", "num_batches_tracked")
    assert {name for name, _ in module.named_buffers()} == {f"body.1.{name}" for name in names}
    numbers = count(module) + 8 + 8 + 1
    # everybody has the configuration's buffers: they travel when they have changed
    assert rows["bytes_down"].tolist() == [NUMBER * count(module), NUMBER * numbers, NUMBER * numbers]
    assert rows["bytes_up"].tolist() == [NUMBER * (numbers + 1) + WEIGHT] * 3


def test_buffers_that_nobody_changes_do_not_travel(tmp_path):
    module = Regression()
    module.register_buffer("constant", torch.arange(100.0))
    rows = budget(tmp_path, module, FedAvg())
    assert rows["bytes_down"].tolist() == [NUMBER * count(module)] * 3
    assert rows["bytes_up"].tolist() == [NUMBER * (count(module) + 1) + WEIGHT] * 3


def test_expectation_propagation_sends_two_vectors_down(tmp_path):
    """In the first round the model, and the sums of three normalisers by themselves; later they come with q."""
    module = Regression()
    rows = budget(tmp_path, module, ExpectationPropagation())
    model, sites, means = NUMBER * count(module), NUMBER, 2 * NUMBER
    assert rows["bytes_down"].tolist() == [model + sites + means, *[2 * model + sites + means] * 2]
    up = 3 * NUMBER + WEIGHT + 2 * model + sites
    assert rows["bytes_up"].tolist() == [up + NUMBER, up, up]  # the number of clients twice, in two exchanges


@pytest.mark.parametrize("average", [None, 0.99])
def test_discriminators_alone_travel_up(tmp_path, average):
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
def test_sites_travel_once_unless_they_are_refined(tmp_path, refine):
    module = gan()
    site, model = NUMBER * count(module.generator), NUMBER * count(module)
    rows = budget(tmp_path, module, GeneratorSites("generator", pool=20, own_rows=2, refine=refine))
    others = 3 * (site + NUMBER)  # with their records
    assert rows["bytes_down"].tolist() == [model, model + others, model + (others if refine else 0)]
    alone = model + NUMBER + WEIGHT
    first = alone + site + NUMBER  # the site's records
    assert rows["bytes_up"].tolist() == [first, *([first] * 2 if refine else [alone] * 2)]


def test_a_round_of_the_server_alone_costs_clients_nothing(tmp_path):
    module = gan()
    rows = budget(tmp_path, module, DistilledSites("generator", pool=20, server_steps=2, batch_size=4))
    assert rows["steps"].tolist() == [3, 0, 0]
    assert rows["bytes_down"].tolist() == [NUMBER * count(module), 0, 0]
    assert rows["bytes_up"].tolist() == [NUMBER * (count(module) + 1 + count(module.generator) + 1) + WEIGHT, 0, 0]


def test_embeddings_travel_once(tmp_path):
    algorithm = EmbeddingSites(frequencies=16, points=10, herding_steps=2, own_rows=2)
    rows = budget(tmp_path, gan(), algorithm)
    down, up = rows["bytes_down"].tolist(), rows["bytes_up"].tolist()
    assert down[1] > down[2] == down[0] + NUMBER  # whose sum it is that the client has
    assert up[0] > up[1] == up[2]
