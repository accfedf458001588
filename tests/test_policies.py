"""What belongs to a client and what to the server, each policy against a plain loop."""

import copy
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Broadcast, Client, Message
from lit_epgan.errors import UserError
from lit_epgan.federated import FedAvg
from lit_epgan.modules.supervised import Classifier
from lit_epgan.networks.resnet import ResNet18
from lit_epgan.runs.config_files import find_config
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_loop import PlainLoop, two_of_four
from tests.test_federation import assert_same, gan_steps, sgd_steps


def sgd(local: Any, batches: list[Any], client: int, round_: int) -> None:
    sgd_steps(local, batches)


def names(state: dict[str, Any], part: str) -> dict[str, Any]:
    return {client: private[part] for client, private in state["clients"].items() if private[part]}


# Optimizers -----------------------------------------------------------------------------------------------------------


class Kept:
    """Local work whose optimizers go on from the client's last round."""

    def __init__(self, steps: Any) -> None:
        self.steps, self.states = steps, dict[int, list[Any]]()

    def __call__(self, local: Any, batches: list[Any], client: int, round_: int) -> None:
        created = local.configure_optimizers()
        optimizers = list(created) if isinstance(created, tuple) else [created]
        for optimizer, state in zip(optimizers, self.states.get(client, []), strict=False):
            optimizer.load_state_dict(copy.deepcopy(state))
        local.configure_optimizers = lambda: created
        self.steps(local, batches)
        self.states[client] = [copy.deepcopy(o.state_dict()) for o in optimizers]


@pytest.mark.parametrize("cohort", [None, 2])
def test_kept_momentum_is_the_clients_own(cohort: int | None) -> None:
    module = Regression(dropout=0.2)
    loop = PlainLoop(Kept(sgd_steps), **({"cohort": two_of_four} if cohort else {}))
    reference, reset = loop.run(module, 5), copy.deepcopy(module)
    fit(reset, federation(clients_per_round=cohort), rounds=5)
    fit(module, federation(clients_per_round=cohort), rounds=5, optimizer_state="keep")
    assert_same(module, reference)
    with pytest.raises(AssertionError):
        assert_same(reset, reference, tolerance=1e-3)


def test_kept_adam_of_two_optimizers() -> None:
    module = TwoOptimizers()
    reference = PlainLoop(Kept(gan_steps)).run(module, 4)
    fit(module, federation(), rounds=4, optimizer_state="keep")
    noise = ("generator.0.bias", "running_mean")  # a bias before BatchNorm moves by rounding
    assert_same(module, reference, skip=noise, tolerance=1e-6)


def test_unknown_policies_are_named() -> None:
    with pytest.raises(UserError, match=r"optimizer_state is 'remember'; choose reset or keep"):
        fit(Regression(), federation(), rounds=1, optimizer_state="remember")
    with pytest.raises(UserError, match=r"buffers is 'mean'; choose merge, local or exclude"):
        fit(Regression(), federation(), rounds=1, buffers="mean")


# Buffers --------------------------------------------------------------------------------------------------------------


class Drifting(Regression):
    """A buffer that training changes and that changes training, beside an integer one and BatchNorm's."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.register_buffer("offset", torch.zeros(1))
        self.register_buffer("seen", torch.tensor(0))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        if self.training:
            self.offset = self.offset + 0.1 * y.mean()  # assigned anew, as modules may
            self.seen += len(x)
        return super().loss((x, y - self.offset + 1e-3 * self.seen))


def is_buffer(name: str) -> bool:
    return name in ("offset", "seen") or "running" in name or "tracked" in name


@pytest.mark.parametrize("policy", ["merge", "local", "exclude"])
def test_buffers(policy: str) -> None:
    module = Drifting()
    initial = {n: b.clone() for n, b in module.named_buffers()}
    options: dict[str, Any] = {
        "merge": {},
        "local": {"kept": is_buffer},
        "exclude": {"averaged": lambda name: not is_buffer(name)},
    }[policy]
    loop = PlainLoop(sgd, **options)
    reference = loop.run(module, 4)
    trainer = fit(module, federation(), rounds=4, buffers=policy)
    assert_same(module, reference, tolerance=1e-7)
    for name, value in module.named_buffers():
        assert torch.equal(value, initial[name].to(value.dtype)) != (policy == "merge"), name
    if policy == "merge":  # integers count what all clients have counted
        assert int(module.seen) == 4 * sum(SIZES)
        assert int(module.body[1].num_batches_tracked) == 4 * (3 + 1 + 5 + 2)
    personal = names(trainer.callbacks[0].state_dict(), "personal")  # type: ignore[attr-defined]
    assert len(personal) == (4 if policy == "local" else 0)
    for client, state in personal.items():
        for name, value in state.items():
            torch.testing.assert_close(value, loop.private[int(client[-1])][name], rtol=1e-7, atol=1e-7)


def test_statistics_that_happen_to_be_of_length_one_are_averaged() -> None:
    """A module that has been trained before may hold such ones."""
    module = Regression(batch_norm=True).double()
    norm = module.body[1]
    norm.running_mean.copy_(nn.functional.normalize(torch.arange(8.0), dim=0))  # type: ignore[operator]
    reference = PlainLoop(sgd).run(module, 2)
    fit(module, federation(), rounds=2)
    assert_same(module, reference)


# Personal layers ------------------------------------------------------------------------------------------------------


def is_head(name: str) -> bool:
    return name.startswith("body.3.")


@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
def test_personal_layers_are_never_merged(optimizer_state: str) -> None:
    module = Regression(dropout=0.1)
    head = {n: p.detach().double() for n, p in module.named_parameters() if is_head(n)}
    loop = PlainLoop(Kept(sgd_steps) if optimizer_state == "keep" else sgd, cohort=two_of_four, kept=is_head)
    reference = loop.run(module, 5)
    data = federation(clients_per_round=2)
    trainer = fit(module, data, rounds=5, local=["body.3.*"], optimizer_state=optimizer_state)
    assert_same(module, reference)
    for name, value in head.items():
        assert torch.equal(module.get_parameter(name), value)  # the server's copy stays initial
    personal = names(trainer.callbacks[0].state_dict(), "personal")  # type: ignore[attr-defined]
    assert {int(client[-1]) for client in personal} == set(loop.private)
    for client, state in personal.items():
        for name, value in state.items():
            torch.testing.assert_close(value, loop.private[int(client[-1])][name], rtol=1e-10, atol=1e-10)


def test_a_client_is_validated_with_its_own_layers() -> None:
    module = Regression()
    loop = PlainLoop(sgd, kept=is_head)
    reference = loop.run(module, 3)
    held_out = dict(zip(["client-0", "client-2"], client_sets((5, 11)), strict=True))
    heads = []

    class Watch(Callback):
        def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            heads.append(pl_module.get_parameter("body.3.weight").detach().clone())

    data = federation(val_dataset=held_out)
    trainer = fit(module, data, rounds=3, local=["body.3.*"], callbacks=[Watch()])
    for client, dataset in held_out.items():
        own = copy.deepcopy(reference).eval()
        own.load_state_dict(loop.private[int(client[-1])], strict=False)
        expected = float(own.loss(dataset.tensors))
        assert float(trainer.callback_metrics[f"val_loss/client/{client}"]) == pytest.approx(expected, rel=1e-6)
    assert_same(module, reference)
    for head in heads:  # the server's model is the server's again
        assert torch.equal(head, reference.get_parameter("body.3.weight"))


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(UserError, match=r"no parameter or buffer matches the local name pattern tail\.\*"):
        fit(Regression(), federation(), rounds=1, local=["body.3.*", "tail.*"])


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fedbn_merges_everything_but_the_norms(norm: Any) -> None:
    """With the settings of algorithms/fedbn.yaml, which are the same for both of ResNet-18's norms."""
    config = yaml.safe_load(find_config("algorithms/fedbn.yaml").read_text())
    options = config["federation"]["init_args"]
    torch.manual_seed(0)
    module = Classifier(ResNet18(width=4, norm=norm), nn.Linear(32, 3), lambda p: torch.optim.SGD(p, lr=0.1))
    initial = {name: value.clone().double() for name, value in module.state_dict().items()}
    kinds = (nn.BatchNorm2d, nn.GroupNorm)
    layers = [name for name, layer in module.named_modules() if isinstance(layer, kinds)]
    norms = {name for name in initial if name.rpartition(".")[0] in layers}
    assert len(layers) == 20
    sets = [TensorDataset(torch.randn(6, 3, 16, 16).double(), torch.arange(6) % 3) for _ in range(2)]
    data = FederatedDataModule.from_datasets(sets, batch_size=6)
    trainer = fit(module, data, 1, local=options["local"], buffers=options["buffers"])
    same = {name for name, value in module.state_dict().items() if torch.equal(value.double(), initial[name])}
    assert same == norms
    personal = names(trainer.callbacks[0].state_dict(), "personal")  # type: ignore[attr-defined]
    assert [set(own) for own in personal.values()] == [norms, norms]


def test_a_restart_within_the_round_keeps_the_personal_layers() -> None:
    class Restarting(FedAvg):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"], steps=1)
            if client.steps != 1:
                client.fit(sent["parameters"])
            return self.Report(change=client.change)

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        start = copy.deepcopy(local.state_dict())
        sgd_steps(local, batches[:1])
        if len(batches) > 1:
            local.load_state_dict(start)
            sgd_steps(local, batches[1:])

    module = Regression()
    loop = PlainLoop(work, kept=is_head)
    reference = loop.run(module, 3)
    trainer = fit(module, federation(), rounds=3, algorithm=Restarting(), local=["body.3.*"])
    assert_same(module, reference)
    personal = names(trainer.callbacks[0].state_dict(), "personal")  # type: ignore[attr-defined]
    torch.testing.assert_close(personal["client-2"]["body.3.bias"], loop.private[2]["body.3.bias"])
