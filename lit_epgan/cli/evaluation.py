"""``federate --evaluate``: one end of it. The server asks once, and each client tests the model on data of its own."""

import copy
import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_sum

from lit_epgan.callbacks.client_metrics import is_no_mean, rows_of
from lit_epgan.carriers.protocol import endpoint
from lit_epgan.cli.federate import EVALUATION, Described
from lit_epgan.cli.run_setup import hyperparameters, say
from lit_epgan.datamodules.elsewhere import Away
from lit_epgan.datamodules.rounds import ValidationLoader
from lit_epgan.engine import (
    Algorithm,
    Answer,
    Client,
    Exchange,
    Mechanism,
    Message,
    PlainFederation,
    Rounds,
    Server,
    merged,
)
from lit_epgan.engine.messages import Report, Term, tensor_of
from lit_epgan.engine.private import Private
from lit_epgan.engine.rounds import Round
from lit_epgan.engine.runner import LocalData
from lit_epgan.fit.ends import this_end
from lit_epgan.fit.loop import result_metrics
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.text import few

VALUES, STATE = "values", "state/"  # before names of what is measured, and of the model's tensors
OVERALL = "overall"


class Evaluated(Described):
    """What is configured, and under which settings."""

    def before_instantiate_classes(self) -> None:
        settings = hyperparameters(self.config[self.subcommand].as_dict())
        self.checkpoint = self.config[self.subcommand].ckpt_path
        super().before_instantiate_classes()
        self.settings = settings


class ModelEvaluation(Algorithm):
    """The server's model out, and back from each client sums over its own test data; nothing is trained.

    What ``test_step`` logs as a mean is (sum of w x, sum of w), w the rows of each batch. Of a torchmetrics object it
    is the states, where they sum. Others, as AUROC's, are those of single records: they do not leave.
    """

    class Report(Message):
        """Sums by name, and the number of test records."""

        values: Mapping[str, Tensor] = merged("sums")
        records: float = merged("records")

    def __init__(self, described: Described) -> None:
        self._described = described
        self.found: Mapping[str, Tensor] = {}
        self.records = 0.0

    def trains(self, round_: int) -> bool:
        return False

    def round(self, server: Server) -> Rounds:
        state = {STATE + name: t for name, t in server.module.state_dict().items() if isinstance(t, Tensor)}
        report = yield Exchange(state, question="evaluate", training=False)
        self.found, self.records = report.values, float(report.records)

    def evaluate(self, client: Client, sent: Mapping[str, Tensor]) -> Message:
        """Lightning's own test, of the model that was sent, on this client's data."""
        trainer, data, sums = self._described.trainer, self._described.datamodule, Sums()
        client.module.load_state_dict({n.removeprefix(STATE): t for n, t in sent.items() if n.startswith(STATE)})
        own = data.test_dataloader()
        if isinstance(own, ValidationLoader):  # of all clients, where all run on one machine
            held = {k: loader for k, loader in own.loaders.items() if k == client.index}
            data.test_dataloader = lambda: ValidationLoader(held, own.marks)
        elif client.clients > 1 and not any(isinstance(each, Away) for each in data.clients):
            raise UserError("the test data are nobody's own: give each client some, or take `test`")
        trainer.callbacks = [sums]  # type: ignore[attr-defined]
        trainer.test(client.module, datamodule=data, verbose=False)  # type: ignore[arg-type]
        if not sums.values:
            raise UserError(f"{client.name!r} has no test data, or test_step logs nothing of them that sums")
        return self.Report(
            values={n: torch.tensor(v, dtype=torch.float64) for n, v in sums.values.items()}, records=sums.rows
        )


class Sums(Callback):
    """What a test has logged, as numbers that sum over clients."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.rows = 0

    def on_test_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, *_: Any) -> None:
        self.rows += rows_of(batch)

    def on_test_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        left_out = []
        for result in result_metrics(trainer):
            name = result.meta.name
            if not result.meta.on_epoch:
                continue
            if result.is_tensor and result.meta.is_mean_reduction and not is_no_mean(name):
                self.values[name] = [float(result.value), float(result.cumulated_batch_size)]
            elif (states := None if result.is_tensor else summing(result.value)) is not None:
                path = next(path for path, each in module.named_modules() if each is result.value)
                self.values |= {f"{name}@{path}@{state}": value.tolist() for state, value in states.items()}
            else:
                left_out.append(name)
        if left_out:
            say(f"{few(left_out)} does not sum over clients, and does not leave")


def summing(metric: Metric) -> dict[str, Tensor] | None:
    """A metric's states; None unless all of them sum."""
    found = {name: state for name, state in metric.metric_state.items() if isinstance(state, Tensor)}
    alike = len(found) == len(metric.metric_state) and all(metric._reductions[name] is dim_zero_sum for name in found)
    return found if alike else None


def metrics(found: Mapping[str, Tensor], module: torch.nn.Module) -> dict[str, float]:
    """The metrics that sums tell of, by the names under which they are logged."""
    states: dict[tuple[str, str], dict[str, Tensor]] = {}
    told = {}
    for key, value in found.items():
        name, *where = key.split("@")
        if where:
            states.setdefault((name, where[0]), {})[where[1]] = value
        else:
            told[name] = float(value[0] / value[1])
    for (name, path), each in states.items():
        metric = copy.deepcopy(module.get_submodule(path))
        assert isinstance(metric, Metric)
        for state, value in each.items():
            setattr(metric, state, value.to(getattr(metric, state)))
        metric._update_count = 1
        told[name] = float(metric.compute())
    return dict(sorted(told.items()))


class Seen(Round):
    """A round whose reports the server keeps one by one, where it sees them."""

    each: dict[int, Report]

    def _take_in(self, client: int, answer: Answer, look: Any) -> None:
        super()._take_in(client, answer, look)
        if client not in self.why:
            self.__dict__.setdefault("each", {})[client] = dict(answer.report)


def refuse_private(mechanism: Mechanism | None, local: list[str]) -> None:
    """Refuse to evaluate what would tell more than was promised, or what the server does not have.

    Raises:
        UserError: naming it.
    """
    if mechanism is not None and (mechanism.private or mechanism.by_record):
        raise UserError(
            f"{type(mechanism).__name__} promises privacy, and an evaluation's numbers would leave without its noise: "
            "let each site test the model by itself (`test`), and keep the numbers there"
        )
    if local:
        raise UserError(
            f"{few(local)} stay with the clients, and the server's model is evaluated: let each site test its own"
        )


def take_part(words: list[str]) -> int:
    """This process's end, by a fit's words. UserError: it is no end, or the evaluation is not allowed."""
    where = endpoint()
    if where is None:
        raise UserError("evaluate is what `federate --evaluate` starts; one process evaluates by `test`")
    described = Evaluated(["fit", *words])
    described.datamodule.prepare_data()
    described.datamodule.setup("fit")
    federation, module, folder = described.federation, described.model, described.folder
    refuse_private(federation.mechanism, federation.local)
    module.configure_model()
    if where.role == "server":
        checkpoint = tensor_file.load(Path(described.checkpoint))
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
    folder.mkdir(parents=True, exist_ok=True)
    end = this_end(described.datamodule, folder, federation.policy, described.settings)
    names = [described.datamodule.client_names[k] for k in described.datamodule.active]
    algorithm = ModelEvaluation(described)
    end.check(type(algorithm).__name__, None)
    plain = PlainFederation(
        algorithm, module, lambda *_: torch.zeros(()), lambda p: torch.optim.SGD(p, lr=0.0), lambda *_: (),
        [1.0] * len(names), names=names,
    )  # fmt: skip

    def answers(round_: Any) -> Iterator[tuple[int, Answer]]:
        for k in list(round_.asked):
            yield k, plain.runner.run(round_.task(k), Private(), LocalData(records=1.0))

    end.begin(plain.federation, plain.runner, SimpleNamespace(max_epochs=1))  # type: ignore[arg-type]
    round_: Any = Seen(plain.federation, 0) if where.role == "server" else end.round(plain.federation, 0)
    end.run(round_, answers, lambda _: None)
    end.end()
    if where.role == "server":
        module.trainer = described.trainer
        module.on_test_start()  # which may make the metrics whose sums have come
        each = {names[k]: report for k, report in sorted(round_.__dict__.get("each", {}).items())}
        write(folder / EVALUATION, table(each, algorithm, module))
    return 0


def table(each: Mapping[str, Report], algorithm: ModelEvaluation, module: torch.nn.Module) -> list[dict[str, Any]]:
    """A row for each client whose report the server has seen, and one for all that have counted."""

    def of(values: Mapping[str, Term], records: float, name: str) -> dict[str, Any]:
        found = metrics({n.removeprefix(f"{VALUES}."): tensor_of(t) for n, t in values.items()}, module)
        return {"client": name, "records": int(records), **found}

    rows = []
    for name, report in each.items():
        values = {n: t for n, t in report.items() if n.startswith(f"{VALUES}.")}
        rows.append(of(values, float(tensor_of(report["records"])), name))
    return [*rows, of(algorithm.found, algorithm.records, OVERALL)]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """As CSV, and to whoever looks."""
    columns = list(rows[-1])
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.DictWriter(file, columns, extrasaction="ignore")
        lines.writeheader()
        lines.writerows(rows)
    shown = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in shown) for i in range(len(columns))]
    for line in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(f"The table is {os.fspath(path)}")


def _cell(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
