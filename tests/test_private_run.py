"""A private run: only the protected model leaves, and it is trained as it is said to be."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from lit_epgan.callbacks import PartitionReport
from lit_epgan.callbacks.round_evaluation import RoundEvaluation
from lit_epgan.engine import (
    Broadcast,
    Client,
    Exchange,
    Median,
    Message,
    NormClipping,
    Plan,
    Rounds,
    Server,
    merged,
)
from lit_epgan.engine.rounds import Round
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAvg, FedSeq
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import CentralNoise, RecordNoise
from tests.federations import client_sets, federation, fit
from tests.ledgers import the_ledger
from tests.modules import Regression, vector
from tests.plain_federation import descending

pytestmark = pytest.mark.usefixtures("folder")  # a working directory of their own


class Telling(Regression):
    """Logs in its training step and in validation."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"double": 2 * loss})
        self.last = float(loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", super().training_step(batch, batch_idx))


class Gathering(Regression):
    """Gathers its training losses, and logs them in validation and at the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.found: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.losses:
            self.log("gathered", torch.stack(self.losses).mean())

    def on_train_epoch_end(self) -> None:
        self.found.append(len(self.losses))


def test_what_training_gathered_is_found_by_the_modules_hooks_in_an_open_run_alone(caplog):
    """Four clients with two steps each."""
    for mechanism, found in ((None, 8), (CentralNoise(1.0, 1.0), 0)):
        module = Gathering()
        data = federation(local_steps=2)
        data.val_dataloader = lambda: torch.utils.data.DataLoader(client_sets()[0], batch_size=8)  # type: ignore[method-assign]
        trainer = fit(module, data, rounds=2, mechanism=mechanism)
        assert "val_loss" in trainer.callback_metrics
        assert ("gathered" in trainer.callback_metrics) == (mechanism is None)
        assert module.found[0] == found
    assert "what training changes in attributes of Gathering (losses) lasts for the client's round" in caplog.text


@pytest.mark.parametrize("algorithm", [FedAvg(), SCAFFOLD()], ids=lambda a: type(a).__name__)
def test_almost_no_noise_is_plain_clipping_by_equal_weights(algorithm):
    """The noise goes on the sum of clipped reports, and the mean is over the cohort."""
    models = []
    for mechanism in (CentralNoise(0.5, 1e-9), NormClipping(0.5)):
        torch.manual_seed(0)
        module = Regression().double()
        fit(module, federation(), algorithm=algorithm, mechanism=mechanism)
        models.append(vector(module))
    torch.testing.assert_close(models[0], models[1], rtol=1e-6, atol=1e-7)


def test_expectation_propagation_counts_its_second_exchange(tmp_path):
    noise = CentralNoise(1.0, 1e-3)
    fit(Regression(), federation(), folder=tmp_path, algorithm=ExpectationPropagation(), mechanism=noise)
    (account,) = the_ledger().read().accounts.values()
    assert (account.made, account.planned.count, account.ended) == (4, 4, True)


def test_a_client_with_poison_counts_as_zero_and_is_not_named(recwarn):
    class Poisoned(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return super().training_step(batch, batch_idx) * float("nan")

    module = Poisoned().double()
    before = vector(module)
    fit(module, federation(), rounds=1, mechanism=CentralNoise(0.1, 1e-6))
    after = vector(module)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-5)
    assert not [w for w in recwarn if "client" in str(w.message) and "finite" in str(w.message)]


def test_a_client_that_diverges_for_a_round_keeps_what_it_had_and_is_heard_again():
    """Its report counts as zero, so its control variate stays that of the round before, too."""

    def batches(client: int, round_: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * client + round_))
        return [(x, x.sum(1, keepdim=True) * (float("nan") if (client, round_) == (0, 1) else 1.0))]

    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return (module(batch[0]) - batch[1]).square().mean()

    noise = CentralNoise(1.0, 1e-9)
    plain = descending(SCAFFOLD(), nn.Linear(3, 1), loss, batches, [8.0, 8.0], 0.05, mechanism=noise)
    plain.federation.mechanism.begin(Plan(plain.federation.sampler, 2, 3))  # type: ignore[union-attr]
    kept = []
    for number in range(3):
        plain.round(number)
        kept.append(plain.federation.private.take_up("client-0").algorithm["control"])
    assert torch.equal(kept[1], kept[0])
    assert torch.isfinite(kept[2]).all()
    assert not torch.equal(kept[2], kept[1])


@pytest.mark.parametrize(("mechanism", "steps"), [(CentralNoise(1.0, 1.0), [0, 0]), (NormClipping(1.0), [1, 3])])
def test_an_answer_tells_no_steps_where_users_are_hidden(mechanism, steps):
    """Their sum would be exact beside the noised sum, also under secure aggregation."""

    def batches(client: int, round_: int) -> list[Any]:
        return [(torch.ones(8, 3),)] * (1 + 2 * client)

    squares = lambda module, batch: module(batch[0]).square().mean()  # noqa: E731
    plain = descending(FedAvg(), nn.Linear(3, 1), squares, batches, [8.0, 24.0], mechanism=mechanism)
    mechanism.begin(Plan(plain.federation.sampler, 2, 1))
    round_ = Round(plain.federation, 0)
    assert [answer.steps for _, answer in plain.answers(plain._asked(round_))] == steps


def test_training_logs_and_clients_own_metrics_are_left_out(tmp_path):
    data = federation(val_dataset=dict.fromkeys(("client-0", "client-3"), client_sets()[0]))
    options: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    trainer = fit(Telling(), data, mechanism=CentralNoise(0.5, 1.0), callbacks=[PartitionReport()], **options)
    names = set(trainer.logged_metrics) | set(trainer.callback_metrics) | set(trainer.progress_bar_metrics)
    assert "val_loss" in names
    assert not names & {"loss", "double", "client/steps"}
    assert not [name for name in names if "client-" in name or "worst" in name]
    header = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0].split(",")
    assert not set(header) & {"loss", "double", "loss_step", "client/steps"}
    assert not list(tmp_path.rglob("partition*"))


class Normalised(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.layers(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Look(RoundEvaluation):
    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("distance", 1.0)


def test_what_is_measured_of_the_servers_model_is_kept(tmp_path):
    """Without validation, too, where the round's own end is the time to look; the price of a round is public."""
    trainer = fit(Regression(), federation(), mechanism=CentralNoise(0.5, 1.0), callbacks=[Look()])
    assert {"distance", "client/bytes_up", "client/bytes_down"} <= set(trainer.callback_metrics)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"optimizer_state": "keep"}, "optimizer_state keep"),
        ({"local": ["*bias"]}, "personal layers"),
        ({"aggregator": Median()}, "Median looks at every client's report"),
        ({"algorithm": FedSeq(length=2)}, "Chains have no accountant"),
    ],
)
def test_settings_that_would_tell_more_are_refused(options, named):
    with pytest.raises(UserError, match=named):
        fit(Regression(), federation(), mechanism=CentralNoise(0.5, 1.0), **options)


def test_running_statistics_are_refused_with_the_remedy_and_counters_before_anything_is_released(tmp_path):
    with pytest.raises(UserError, match=r"layers\.1\.running_mean.*use GroupNorm"):
        fit(Normalised(), federation(), mechanism=CentralNoise(0.5, 1.0))
    fit(Normalised(), federation(), mechanism=CentralNoise(0.5, 1.0), buffers="exclude", rounds=1)
    with pytest.raises(UserError, match="clients have changed 'seen'"):
        fit(Counting(), federation(), mechanism=CentralNoise(0.5, 1.0), folder=tmp_path)
    *_, account = the_ledger().read().accounts.values()
    assert account.made == 0


class Counting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen += len(batch[0])
        return super().training_step(batch, batch_idx)


class Everybody(FedAvg):
    def round(self, server: Server) -> Rounds:
        yield Exchange({"parameters": server.parameters}, to=range(server.clients))


def test_clients_beside_the_cohort_are_not_asked_and_a_drawn_cohort_is_not_asked_again(tmp_path):
    """Whoever is asked more often than the sampler says pays for more than is said."""
    with pytest.raises(UserError, match="Everybody asks clients beside the round's cohort"):
        fit(Regression(), federation(clients_per_round=3), algorithm=Everybody(), mechanism=CentralNoise(0.5, 1.0))
    data, noise = federation(clients_per_round=3), CentralNoise(0.5, 1.0)
    with pytest.raises(UserError, match="asks a drawn cohort more than once a round"):
        fit(Regression(), data, folder=tmp_path, algorithm=Again(), mechanism=noise)
    *_, account = the_ledger().read().accounts.values()
    assert account.made == 1


class One(Message):
    one: torch.Tensor = merged("sum")


class Again(FedAvg):
    """Its ``exchanges`` does not know of the second."""

    def round(self, server: Server) -> Rounds:
        yield Exchange({"parameters": server.parameters})
        yield Exchange({}, question="one", training=False, answer=One)

    def one(self, client: Client, sent: Broadcast) -> Message:
        return One(one=torch.ones(1))


@pytest.mark.parametrize("mechanism", [CentralNoise(0.5, 1.0), RecordNoise(0.5, 1.0)])
def test_a_private_run_without_a_last_round_is_refused(mechanism):
    """No release would be planned, and an epsilon of 0 be promised."""
    stop = LambdaCallback(on_train_epoch_end=lambda trainer, module: setattr(trainer, "should_stop", True))
    with pytest.raises(UserError, match=r"how many rounds there will be.*set trainer\.max_epochs"):
        fit(Regression(), federation(), -1, mechanism=mechanism, callbacks=[stop])
    fit(Regression(), federation(), -1, mechanism=NormClipping(0.5), callbacks=[stop])


def test_the_budget_ends_a_run_before_any_data_are_read(tmp_path):
    class Unread(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            raise AssertionError("data are read")

    with pytest.raises(UserError, match="nothing was read"):
        fit(Unread(), federation(), folder=tmp_path, mechanism=CentralNoise(0.5, 1.0, budget=1.0))


def test_what_is_promised_is_said(caplog):
    with caplog.at_level("INFO"):
        fit(Regression(), federation(), mechanism=CentralNoise(0.5, 8.0))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "CentralNoise: the server's model after all rounds has (" in said
    assert "what the module logs in training is left out" in said


@pytest.mark.parametrize(("noise", "told"), [(4.4, True), (0.1, False)])
def test_noise_that_drowns_what_few_clients_say_is_told_before_the_run(noise, told):
    """With d numbers the noise is z sqrt(d) / 4 times as long as a sum of reports, over 4 rounds half of it."""
    module = Regression()
    numbers = sum(p.numel() for p in module.parameters())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(module, federation(), mechanism=CentralNoise(1.0, noise), rounds=4)
    said = [str(w.message) for w in seen if "expect nothing to be learnt" in str(w.message)]
    assert len(said) == told
    if told:
        once = noise * numbers**0.5 / 4
        assert (
            f"the noise is {once:.2g} times as long as the sum of 4 reports can be, over all rounds {once / 2:.2g}"
            in said[0]
        )
        assert "RecordNoise" in said[0]
