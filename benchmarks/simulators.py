"""The simulators that simulations.py compares: each runs FedAvg on the task, and notes when rounds end."""

import itertools
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from simulation_task import BATCH, RATE, RECORDS, SEED, STEPS, Task, Watch, loss, order, rank, ranks
from torch import Tensor, nn
from torch.utils.data import TensorDataset

Simulator = Callable[[Task, int, Watch], nn.Module]  # (task, rounds, watch) -> the last model


def sgd(parameters: Any) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=RATE)


def meet() -> None:
    """Join the other processes of this simulation, if there are any."""
    if ranks() > 1:
        dist.init_process_group("gloo")


def bare(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """FedAvg as one would write it down with no library: the least that this arithmetic takes."""
    meet()
    network = task.network()
    optimizer = sgd(network.parameters())
    parameters = list(network.parameters())
    server = nn.utils.parameters_to_vector(parameters).detach().clone()
    for number in range(rounds):
        total = torch.zeros_like(server, dtype=torch.float64)
        for client in range(rank(), task.clients, ranks()):
            nn.utils.vector_to_parameters(server.clone(), parameters)
            for batch in task.batches(client, number):
                optimizer.zero_grad()
                loss(network, batch).backward()
                optimizer.step()
            total += nn.utils.parameters_to_vector(parameters).detach()
        if ranks() > 1:
            dist.all_reduce(total)
        server = (total / task.clients).float()
        nn.utils.vector_to_parameters(server.clone(), parameters)
        watch.round_ended(parameters)
    return network


def _driven(task: Task, rounds: int, watch: Watch, vectorized: bool) -> nn.Module:
    from lit_epgan.engine import PlainFederation
    from lit_epgan.federated import FedAvg

    meet()
    network = task.network()
    records = [float(RECORDS)] * task.clients
    parts = (FedAvg(), network, loss, sgd, task.batches, records, SEED)
    federation = PlainFederation(*parts, vectorized=vectorized)
    for number in range(rounds):
        federation.round(number)
        watch.round_ended([federation.server.parameters])
    return network


def sequential(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """The engine's own loop, client after client."""
    return _driven(task, rounds, watch, vectorized=False)


def vectorized(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """The engine's own loop, clients side by side where it finds that quicker."""
    return _driven(task, rounds, watch, vectorized=True)


def _lightning(task: Task, rounds: int, data: dict[str, Any], callbacks: list[Any], watch: Watch) -> nn.Module:
    from lightning.pytorch import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = task.network()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss(self.network, batch)

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    class Noted(Callback):
        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            watch.round_ended(list(pl_module.parameters()))

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    off: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    several: dict[str, Any] = {"strategy": "federated", "devices": ranks()} if ranks() > 1 else {}
    trainer = Trainer(accelerator="cpu", max_epochs=rounds, callbacks=[*callbacks, Noted()], **several, **off)
    module = Module()
    trainer.fit(module, **data)
    return module.network


def _federated(task: Task, rounds: int, watch: Watch, side_by_side: bool) -> nn.Module:
    from lit_epgan.callbacks import FederationCallback
    from lit_epgan.datamodules import FederatedDataModule

    sets = [TensorDataset(*each) for each in zip(*task.records, strict=True)]
    data = FederatedDataModule.from_datasets(sets, batch_size=BATCH, local_steps=STEPS, seed=SEED)
    return _lightning(task, rounds, {"datamodule": data}, [FederationCallback(side_by_side=side_by_side)], watch)


def trainer(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """A Trainer with the FederationCallback."""
    return _federated(task, rounds, watch, side_by_side=False)


def trainer_side_by_side(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """The same with clients side by side where the module admits it."""
    return _federated(task, rounds, watch, side_by_side=True)


class OneAfterAnother:
    """All clients' batches of a round, for a Trainer that federates nothing."""

    def __init__(self, task: Task) -> None:
        self.task, self.round = task, itertools.count()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        number = next(self.round)
        return itertools.chain.from_iterable(self.task.batches(k, number) for k in range(self.task.clients))


def trainer_alone(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """Lightning's own loop over as many steps, with no federation: another model, the floor of what a Trainer takes."""
    return _lightning(task, rounds, {"train_dataloaders": OneAfterAnother(task)}, [], watch)


class ForPfl(nn.Module):
    """The model as pfl wants it."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.network = task.network()

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return loss(self.network, (x, y))

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
        return {}


def pfl(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """Apple's pfl; several processes as under torchrun."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    logging.getLogger("pfl").setLevel(logging.ERROR)
    taken = Counter[int]()
    x, y = task.records

    def client(user: int) -> Dataset:
        drawn = order(user, taken[user])
        taken[user] += 1
        return Dataset([x[user][drawn], y[user][drawn]], user_id=str(user))

    class Noted(TrainingProcessCallback):
        def after_central_iteration(self, aggregate_metrics: Any, model: Any, *, central_iteration: int) -> Any:
            watch.round_ended(list(module.parameters()))
            return False, Metrics()

    module = ForPfl(task)
    users = itertools.cycle(range(task.clients))
    train = FederatedDataset(client, lambda: next(users))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**9, task.clients, 0),
        SimulatedBackend(train, train),
        PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        NNTrainHyperParams(
            local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE, local_max_grad_norm=None
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Noted()],
        send_metrics_to_platform=False,
    )
    return module.network


def flower(task: Task, rounds: int, watch: Watch) -> nn.Module:
    """Flower's simulation runtime: two actors of Ray, one core each."""
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    network = task.network()
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        local, here = held(task)
        local.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        k, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]) - 1  # type: ignore
        optimizer = sgd(local.parameters())
        for batch in here.batches(k, number):
            optimizer.zero_grad()
            loss(local, batch).backward()
            optimizer.step()
        told = {"arrays": ArrayRecord(local.state_dict()), "metrics": MetricRecord({"num-examples": RECORDS})}
        return Message(content=RecordDict(told), reply_to=message)

    class Noted(FedAvg):
        def aggregate_train(self, server_round: int, replies: Any) -> Any:
            arrays, metrics = super().aggregate_train(server_round, replies)
            assert arrays is not None
            network.load_state_dict(arrays.to_torch_state_dict())
            watch.round_ended(list(network.parameters()))
            return arrays, metrics

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Noted(
            fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=task.clients, min_available_nodes=task.clients
        )
        strategy.start(grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=rounds)

    backend = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, task.clients, backend_config=backend)
    return network


HELD: dict[Task, tuple[nn.Module, Task]] = {}


def held(task: Task) -> tuple[nn.Module, Task]:
    """The model, and the task with its data, made once in each of Flower's actors."""
    if task not in HELD:
        torch.set_num_threads(1)
        HELD[task] = task.network(), task
    return HELD[task]


SIMULATORS: dict[str, Simulator] = {
    "bare loop": bare,
    "plain driver": sequential,
    "plain driver, vectorized": vectorized,
    "Trainer": trainer,
    "Trainer, side_by_side": trainer_side_by_side,
    "Trainer alone": trainer_alone,
    "pfl": pfl,
    "Flower": flower,
}
