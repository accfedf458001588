"""What belongs to a client and what to the server, each policy against a plain loop."""

import copy
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule, ImageDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.hardship import Hardship, mistaken
from lit_epgan.engine import Broadcast, Client, ComingAndGoing, EveryoneAtFirst, FixedSize, Message
from lit_epgan.federated import FedAvg
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.supervised import Classifier
from lit_epgan.networks.resnet import ResNet18
from lit_epgan.runs.config_files import find_config
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_loop import PlainLoop, two_of_four
from tests.refusals import assert_refused
from tests.test_federation import assert_same, gan_steps, sgd_steps


def sgd(local, batches, client, round_):
    sgd_steps(local, batches)


def names(state, part):
    return {client: private[part] for client, private in state["clients"].items() if private[part]}


class Kept:
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
def test_kept_momentum_is_the_clients_own(cohort):
    module = Regression(dropout=0.2)
    loop = PlainLoop(Kept(sgd_steps), **({"cohort": two_of_four} if cohort else {}))
    reference, reset = loop.run(module, 5), copy.deepcopy(module)
    fit(reset, federation(clients_per_round=cohort), rounds=5)
    fit(module, federation(clients_per_round=cohort), rounds=5, optimizer_state="keep")
    assert_same(module, reference)
    with pytest.raises(AssertionError):
        assert_same(reset, reference, tolerance=1e-3)


def test_kept_adam_of_two_optimizers_and_averaged_statistics_of_length_one():
    module = TwoOptimizers()
    reference = PlainLoop(Kept(gan_steps)).run(module, 4)
    fit(module, federation(), rounds=4, optimizer_state="keep")
    noise = ("generator.0.bias", "running_mean")  # a bias before BatchNorm moves by rounding
    assert_same(module, reference, skip=noise, tolerance=1e-6)
    # A module that has been trained before may hold such ones
    module = Regression(batch_norm=True).double()
    norm = module.body[1]
    norm.running_mean.copy_(nn.functional.normalize(torch.arange(8.0), dim=0))  # type: ignore[operator]
    reference = PlainLoop(sgd).run(module, 2)
    fit(module, federation(), rounds=2)
    assert_same(module, reference)


def test_unknown_policies_and_patterns_that_match_nothing_are_named():
    with pytest.raises(UserError, match=r"optimizer_state is 'remember'; choose reset or keep"):
        fit(Regression(), federation(), rounds=1, optimizer_state="remember")
    with pytest.raises(UserError, match=r"buffers is 'mean'; choose merge, local or exclude"):
        fit(Regression(), federation(), rounds=1, buffers="mean")
    with pytest.raises(UserError, match=r"no parameter or buffer matches the local name pattern tail\.\*"):
        fit(Regression(), federation(), rounds=1, local=["body.3.*", "tail.*"])


class Drifting(Regression):
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


def is_buffer(name):
    return name in ("offset", "seen") or "running" in name or "tracked" in name


@pytest.mark.parametrize("policy", ["merge", "local", "exclude"])
def test_buffers(policy):
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


def is_head(name):
    return name.startswith("body.3.")


@pytest.mark.parametrize("optimizer_state", ["reset", "keep"])
def test_personal_layers_are_never_merged(optimizer_state):
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


def test_a_client_is_validated_with_its_own_layers():
    module = Regression()
    loop = PlainLoop(sgd, kept=is_head)
    reference = loop.run(module, 3)
    held_out = dict(zip(["client-0", "client-2"], client_sets((5, 11)), strict=True))
    heads = []

    def look(trainer: Trainer, module: LightningModule) -> None:
        heads.append(module.get_parameter("body.3.weight").detach().clone())

    data = federation(val_dataset=held_out)
    trainer = fit(module, data, rounds=3, local=["body.3.*"], callbacks=[LambdaCallback(on_validation_end=look)])
    for client, dataset in held_out.items():
        own = copy.deepcopy(reference).eval()
        own.load_state_dict(loop.private[int(client[-1])], strict=False)
        expected = float(own.loss(dataset.tensors))
        assert float(trainer.callback_metrics[f"val_loss/client/{client}"]) == pytest.approx(expected, rel=1e-6)
    assert_same(module, reference)
    for head in heads:  # the server's model is the server's again
        assert torch.equal(head, reference.get_parameter("body.3.weight"))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_fedbn_merges_everything_but_the_norms(norm):
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


def test_a_restart_within_the_round_keeps_the_personal_layers():
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


def data(clients=4, n=30):
    """Client k holds n records k, k + .01, ... of the classes 0, 5 and 7 in turn."""
    labels = torch.tensor([0, 5, 7]).repeat(n // 3)
    values = [k + torch.arange(n) / 100 for k in range(clients)]
    train = {f"client-{k}": TensorDataset(value, labels) for k, value in enumerate(values)}
    return ClientData(train, labels=dict.fromkeys(train, labels))


class Listed(torch.utils.data.Dataset[Any]):
    """A data set that reads one record at a time."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def held(hard, name):
    module = FederatedDataModule.from_datasets(hard.train, batch_size=100)
    module.setup()
    (batch,) = module.clients[module.client_names.index(name)].batches(None, 1, 0, 0, 0)
    return list(batch)


def test_sizes_follow_the_power_of_ranks_and_most_records_what_is_kept():
    hard = Hardship(most_records=20).on(data(), seed=0)
    for k, name in enumerate(hard.train):
        values, labels = held(hard, name)
        assert len(values) == 20 == len(hard.labels[name])  # type: ignore[index]
        places = ((values - k) * 100).round().long()
        assert len(places.unique()) == 20
        assert torch.equal(labels, torch.tensor([0, 5, 7])[places % 3])
    other = Hardship(most_records=20).on(data(), seed=1)
    assert not torch.equal(other.train["client-0"].rows, hard.train["client-0"].rows)  # type: ignore[attr-defined]
    module = ImageDataModule(clients=10, seed=4, hardship=Hardship(most_records=20))
    module.setup()
    assert [client.records for client in module.clients] == [20] * 10
    assert len(module.data.test) > 300  # type: ignore[arg-type]
    hard = Hardship(size_power=1.5).on(data(6), seed=3)
    sizes = [len(dataset) for dataset in hard.train.values()]  # type: ignore[arg-type]
    assert sorted(sizes, reverse=True) == [round(30 * r**-1.5) for r in range(1, 7)]
    assert sizes != sorted(sizes, reverse=True)
    assert min(len(d) for d in Hardship(size_power=9).on(data(6), 0).train.values()) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("batched", [True, False])
def test_a_share_of_a_clients_labels_is_wrong(batched):
    clean = data()
    if not batched:
        clean.train = {name: Listed(dataset) for name, dataset in clean.train.items()}  # type: ignore[arg-type]
    hard = Hardship(wrong_labels={"client-2": 0.4}).on(clean, seed=0)
    for k, name in enumerate(hard.train):
        values, labels = held(hard, name)
        right = torch.tensor([0, 5, 7])[((values - k) * 100).round().long() % 3]
        assert (labels != right).sum() == (12 if k == 2 else 0)
        assert set(labels.tolist()) <= {0, 5, 7}
        assert sorted(hard.labels[name].tolist()) == sorted(labels.tolist())  # type: ignore[index]


@pytest.mark.parametrize(
    ("hardship", "said"),
    [
        (Hardship(most_records=0), "most_records is 0; it must be at least 1"),
        (Hardship(size_power=0.0), "size_power is 0.0; it must be above 0"),
        (Hardship(wrong_labels={"ward": 0.5}), "wrong_labels names ward, but the clients are client-0"),
        (Hardship(wrong_labels={"client-1": 1.5}), "wrong_labels.client-1 is 1.5; it must lie in"),
    ],
)
def test_settings_out_of_their_range_are_refused(hardship, said):
    assert_refused(said, hardship.on, data(), 0)


def test_wrong_labels_need_labels_and_a_wrong_one_is_any_other_with_the_same_probability():
    without = data()
    without.labels = None
    assert_refused("needs data whose labels are classes", Hardship(wrong_labels={"client-1": 0.5}).on, without, 0)
    labels, classes = torch.full((9000,), 5), torch.tensor([0, 5, 7, 9])
    wrong = mistaken(labels, 1.0, classes, torch.Generator().manual_seed(0))
    counts = [(wrong == c).sum().item() for c in (0, 5, 7, 9)]
    assert counts[1] == 0
    assert all(abs(count - 3000) < 5 * 45 for count in (counts[0], *counts[2:]))  # five standard deviations


def there(sampler, round_, clients=10):
    return {k for chain in sampler.draw(list(range(clients)), 0, round_) for k in chain}


def test_late_clients_join_others_leave_or_everyone_takes_part_at_first():
    sampler = ComingAndGoing(late=0.3, joins=2, leaving=0.2, leaves=4)
    rounds = [there(sampler, r) for r in range(6)]
    assert [len(each) for each in rounds] == [7, 7, 10, 10, 8, 8]
    late, gone = rounds[2] - rounds[1], rounds[3] - rounds[4]
    assert (rounds[0], rounds[4]) == (rounds[1], rounds[5])
    assert (len(late), len(gone), late & gone) == (3, 2, set())
    sampler, cohorts = EveryoneAtFirst(FixedSize(4)), FixedSize(4)
    assert there(sampler, 0) == set(range(10))
    assert [there(sampler, r) for r in range(1, 6)] == [there(cohorts, r) for r in range(1, 6)]


def test_a_cohort_is_drawn_among_those_who_are_there():
    sampler = ComingAndGoing(late=0.5, joins=3, of=FixedSize(4))
    present = there(ComingAndGoing(late=0.5, joins=3), 0)
    cohorts = [there(sampler, r) for r in range(3)]
    assert all(len(cohort) == 4 and cohort <= present for cohort in cohorts)
    assert len(set(map(frozenset, cohorts))) > 1
    assert any(not there(sampler, r) <= present for r in range(3, 9))
    ComingAndGoing(late=0.3, joins=2, leaving=0.3, leaves=5, of=FixedSize(7)).check(10)
    with pytest.raises(UserError, match="only 4 clients"):
        ComingAndGoing(late=0.3, joins=5, leaving=0.3, leaves=2, of=FixedSize(7)).check(10)


def test_shares_that_leave_nobody_are_refused_and_no_accountant_can_read_a_rate():
    assert_refused(r"late and leaving are 0.6 and 0.4", ComingAndGoing, late=0.6, leaving=0.4)
    assert_refused("has no rate that an accountant could read", ComingAndGoing(late=0.3).rate, 10)
    assert_refused("only 10 clients", EveryoneAtFirst(FixedSize(11)).check, 10)
    assert_refused("has no rate that an accountant could read", EveryoneAtFirst(FixedSize(4)).rate, 10)
