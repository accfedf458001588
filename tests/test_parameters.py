"""Flat parameters: one buffer, the same parameter objects, the same numbers and layouts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from lit_epgan.datamodules import Institutions
from lit_epgan.engine import Algorithm, Broadcast, Client, FlatParameters, Message, OptimizedParameters, Round
from lit_epgan.engine.private import Private
from lit_epgan.fit.loop import RoundLoop
from lit_epgan.fit.options import check_module, check_trainer
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression
from tests.notes import Notes
from tests.refusals import assert_refused
from tests.test_sealed_server import federation as plain_federation


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def convolution():
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1)).to(memory_format=torch.channels_last)


def concatenated(parameters):
    return torch.cat([p.detach().flatten() for p in parameters])


def test_one_live_buffer_in_the_order_of_the_parameters():
    module = network()
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    objects = list(module.parameters())
    flat = FlatParameters.of(module)
    assert flat.is_live
    assert flat.numel == sum(p.numel() for p in objects)
    assert torch.equal(flat.vector, concatenated(before.values()))
    assert all(a is b for a, b in zip(module.parameters(), objects, strict=True))  # optimizers hold these
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().data_ptr() == flat.vector.untyped_storage().data_ptr()
    module = network()
    flat = FlatParameters.of(module)
    flat.load(torch.arange(float(flat.numel)))
    assert torch.equal(module[0].weight, torch.arange(12.0).view(4, 3))
    with torch.no_grad():
        module[0].bias.fill_(-1)
    assert flat.vector[12:16].tolist() == [-1] * 4


def test_training_on_flat_parameters_is_the_same_training():
    torch.manual_seed(0)
    ours, plain = convolution(), convolution()
    plain.load_state_dict(ours.state_dict())
    flat = FlatParameters.of(ours)
    x = torch.randn(2, 3, 6, 6)
    for module in (ours, plain):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    assert torch.equal(concatenated(ours.parameters()), concatenated(plain.parameters()))
    in_memory = [p.permute(0, 2, 3, 1).flatten() if p.dim() == 4 else p for p in plain.parameters()]
    assert torch.equal(flat.vector, torch.cat(in_memory))


def test_channels_last_strides_survive():
    module = convolution()
    strides = [p.stride() for p in module.parameters()]
    assert strides[0] == (27, 1, 9, 3)
    flat = FlatParameters.of(module)
    assert [p.stride() for p in module.parameters()] == strides
    copied = flat.as_dict(flat.vector)
    assert copied["0.weight"].stride() == strides[0]
    assert torch.equal(copied["0.weight"], module[0].weight)
    copied["0.weight"].zero_()
    assert bool(module[0].weight.any())
    flat.restore()
    assert [p.stride() for p in module.parameters()] == strides


@given(st.lists(st.integers(1, 3), min_size=0, max_size=4), st.randoms())
def test_any_permutation_of_dimensions_keeps_values_and_strides(shape, random):
    order = list(range(len(shape)))
    random.shuffle(order)  # type: ignore[attr-defined]
    parameter = nn.Parameter(torch.randn(shape).permute(order))
    value, stride = parameter.detach().clone(), parameter.stride()
    flat = FlatParameters([("before", nn.Parameter(torch.ones(1))), ("it", parameter)])
    assert parameter.stride() == stride
    assert torch.equal(parameter, value)
    assert sorted(flat.vector[1:].tolist()) == sorted(value.flatten().tolist())  # no gap, no overlap


def test_parameters_with_gaps_become_contiguous_and_tied_ones_count_once():
    parameter = nn.Parameter(torch.arange(12.0).view(3, 4)[:, ::2])
    flat = FlatParameters([("it", parameter)])
    assert flat.vector.tolist() == [0, 2, 4, 6, 8, 10]
    assert parameter.tolist() == [[0, 2], [4, 6], [8, 10]]
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    module[1].weight = module[0].weight
    flat = FlatParameters.of(module)
    assert (flat.numel, flat.names) == (9 + 3 + 3, ["0.weight", "0.bias", "1.bias"])
    flat.load(torch.arange(15.0))
    assert module[1].weight is module[0].weight
    assert module[1].weight.flatten().tolist() == list(range(9))


def test_frozen_and_local_parameters_left_out_and_nothing_to_federate_is_an_error():
    module = network()
    module[0].bias.requires_grad_(False)
    frozen, head = module[0].bias.detach().clone(), module[2].weight.detach().clone()
    flat = FlatParameters.of(module, local=["2.*"])
    assert flat.names == ["0.weight"]
    assert module[0].weight in flat
    assert module[0].bias not in flat
    assert module[2].weight not in flat
    flat.load(torch.zeros(12))
    assert torch.equal(module[0].bias, frozen)
    assert torch.equal(module[2].weight, head)
    module = network()
    with pytest.raises(UserError, match=r"Sequential has no trainable parameters.*beside those kept local by \['\*'\]"):
        FlatParameters.of(module, local=["*"])
    assert_refused(r"no trainable parameters to federate$", FlatParameters.of, module.requires_grad_(False))


@pytest.fixture
def mixed():
    """float64, float32 and bfloat16 in one module, interleaved."""
    double, single = nn.Linear(2, 2).double(), nn.Linear(2, 3)
    module = nn.Sequential(double, single, nn.Linear(3, 1).double(), nn.Linear(1, 2).bfloat16())
    for parameter in module.parameters():
        nn.init.uniform_(parameter)
    return module


def test_several_dtypes_with_slices_and_views(mixed):
    values = {n: p.detach().clone() for n, p in mixed.named_parameters()}
    flat = FlatParameters.of(mixed)
    assert not flat.is_live
    assert (flat.dtype, flat.vector.dtype) == (torch.float64, torch.float64)
    assert flat.numel == sum(p.numel() for p in mixed.parameters())
    for name, value in flat.as_dict(flat.vector).items():
        assert value.dtype == values[name].dtype
        assert torch.equal(value, values[name])
    flat.load(flat.vector * 2)
    for name, parameter in mixed.named_parameters():
        assert torch.equal(parameter, values[name] * 2), name
    assert len({p.untyped_storage().data_ptr() for p in mixed.parameters()}) == 3
    flat = FlatParameters.of(mixed)
    vector = flat.vector
    for module in mixed:
        (place,) = flat.slices(module.parameters())
        assert torch.equal(vector[place], concatenated(module.parameters()).double())
    for view, parameter in zip(flat.views(vector, mixed.parameters()), mixed.parameters(), strict=True):
        assert view.shape == parameter.shape
        assert torch.equal(view, parameter.double())


def test_restore_gives_ordinary_storage():
    module = convolution()
    flat = FlatParameters.of(module)
    before = [p.detach().clone() for p in module.parameters()]
    flat.restore()
    for parameter, value in zip(module.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().nbytes() == 4 * parameter.numel()
    flat.vector.zero_()
    assert all(torch.equal(p, v) for p, v in zip(module.parameters(), before, strict=True))


def test_neighbours_merge_to_one_slice_and_prefixes_are_not_confused():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    flat = FlatParameters.of(module)
    assert flat.slices(module.parameters()) == [slice(0, 18)]
    assert flat.slices([*module[2].parameters(), *module[0].parameters()]) == [slice(0, 6), slice(12, 18)]
    assert flat.slices([module[1].bias]) == [slice(10, 12)]
    assert flat.slices([nn.Parameter(torch.ones(3))]) == []  # not federated
    module = nn.ModuleDict({"head": nn.Linear(1, 1), "header": nn.Linear(1, 1)})
    flat = FlatParameters.of(module)
    assert flat.named("head") == [slice(0, 2)]
    assert flat.named("header") == [slice(2, 4)]


def optimized(flat, index, parameters):
    return OptimizedParameters(index, torch.optim.SGD(parameters, lr=0.5), flat, parameters)


def test_one_parameter_in_two_optimizers_and_parts_in_step(mixed):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    flat = FlatParameters.of(module)
    both = optimized(flat, 0, list(module.parameters()))
    second = optimized(flat, 1, list(module[1].parameters()))
    second.live[0].fill_(7)
    assert both.live[0][6:].tolist() == [7] * 6
    assert both.live[0][:6].tolist() != [7] * 6
    assert [s.tolist() for s in second.parts(torch.arange(12))] == [list(range(6, 12))]
    flat = FlatParameters.of(mixed)
    some = optimized(flat, 0, [mixed[3].weight, mixed[0].bias])
    for part, live in zip(some.parts(flat.vector), some.live, strict=True):
        assert torch.equal(part, live.double())
    some.live[0].fill_(3)
    assert mixed[3].weight.tolist() == [[3], [3]]


def test_an_optimizers_parameters_may_lack_gradients_and_its_lr_is_the_one_before_any_schedule():
    module = network()
    flat = FlatParameters.of(module)
    own = optimized(flat, 0, list(module.parameters()))
    module[2](torch.ones(1, 4)).sum().backward()
    parameters, gradients = own.with_gradient()
    assert [id(p) for p in parameters] == [id(module[2].weight), id(module[2].bias)]
    assert gradients[1].tolist() == [1, 1]
    module = network()
    own = optimized(FlatParameters.of(module), 0, list(module.parameters()))
    assert own.lr == 0.5
    torch.optim.lr_scheduler.LambdaLR(own.optimizer, lambda _: 0.1)
    assert (own.optimizer.param_groups[0]["lr"], own.lr) == (pytest.approx(0.05), 0.5)


QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False}


class Teacher(Regression):
    seen = Notes()

    def __init__(self) -> None:
        super().__init__()
        self.teacher = torch.nn.Linear(3, 8).requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.teacher.weight.clone())

    def on_train_batch_end(self, *args: Any) -> None:
        self.teacher.weight.data = 0.5 * self.teacher.weight.data + 0.5 * self.body[0].weight.data

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), lr=self.lr)


def test_a_frozen_teacher_starts_from_the_servers_and_is_merged_by_records():
    """One step a client: after it client k's teacher is (t + w_k) / 2; the server's is their mean by n_k."""
    module = Teacher()
    start = module.teacher.weight.detach().clone().double()
    fit(module, federation(local_steps=1), rounds=1)
    assert len(module.seen) == len(SIZES)
    assert all(torch.equal(seen, start) for seen in module.seen)
    expected = 0.5 * start + 0.5 * module.body[0].weight  # the mean of the clients' layers is the server's layer
    torch.testing.assert_close(module.teacher.weight.detach(), expected.detach(), rtol=1e-12, atol=1e-12)


class Clamped(Regression):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            if self.in_place:
                parameter.data.clamp_(-0.3, 0.3)
            else:
                parameter.data = parameter.data.clamp(-0.3, 0.3)


def test_replaced_storage_is_taken_back():
    torch.manual_seed(0)
    replaced, in_place = Clamped(in_place=False), Clamped(in_place=True)
    in_place.load_state_dict(replaced.state_dict())
    fit(replaced, federation(), rounds=3)
    fit(in_place, federation(), rounds=3)
    for name, value in replaced.state_dict().items():
        assert torch.equal(value, in_place.state_dict()[name]), name


class Unfreezing(Regression):
    """The first layer is frozen in round 0 and trained afterwards."""

    starts = Notes()

    def __init__(self) -> None:
        super().__init__()
        self.body[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.body[0].requires_grad_(self.current_epoch > 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts.append(self.body[0].weight.detach().clone())


def test_a_layer_unfrozen_later_starts_from_the_servers_too():
    module = Unfreezing()
    fit(module, federation(local_steps=1), rounds=2)
    first, second = module.starts[: len(SIZES)], module.starts[len(SIZES) :]
    assert len(first) == len(second) == len(SIZES)
    assert all(torch.equal(start, first[0]) for start in first + second)
    assert not torch.equal(module.body[0].weight, first[0])


def test_what_a_federation_cannot_do_for_a_module_is_refused():
    trainer = Trainer(callbacks=[EMAWeightAveraging()], logger=False)
    assert_refused("EMAWeightAveraging would average one client's weights into the next one's", check_trainer, trainer)

    class Iterating(Regression):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return None

    assert_refused("reads past the end of a client", check_module, Iterating(), RoundLoop.of(Trainer(**QUIET)), ranks=1)
    module = Regression()
    loop = RoundLoop.of(Trainer(**QUIET))
    check_module(module, loop, ranks=2)
    loop.client_trains = True
    with pytest.raises(UserError, match=r"self\.log\('loss', sync_dist=True\) in a client's step would wait"):
        module.log("loss", 1.0, sync_dist=True)


@pytest.mark.parametrize(
    ("frequency", "second", "sentence"), [(2, None, "frequency 2"), (1, "epoch", "one of the two")]
)
def test_schedules_that_cannot_belong_to_a_client(frequency, second, sentence):
    class Scheduled(Regression):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            step = {"scheduler": StepLR(optimizer, 1), "interval": "step", "frequency": frequency}
            epoch = {"scheduler": LambdaLR(optimizer, lambda e: 1.0), "interval": "epoch"}
            return [optimizer], [step, epoch] if second else [step]

    assert_refused(sentence, fit, Scheduled(), federation(), rounds=1)


def test_several_loaders_of_one_institution_are_refused():
    from lightning.pytorch import LightningDataModule
    from torch.utils.data import DataLoader

    class Two(LightningDataModule):
        def train_dataloader(self) -> Any:
            return {k: DataLoader(s, batch_size=4) for k, s in zip("ab", client_sets(), strict=False)}

    assert_refused("several training loaders", fit, Regression(), Institutions({"one": Two()}), rounds=1)


def test_a_frozen_parameter_that_moved_before_a_restart_goes_back():
    """After a restart, and after a client that was given up, a teacher is the server's."""

    class Restarting(Algorithm):
        def train(self, client: Client, sent: Broadcast) -> Message:
            client.fit(sent["parameters"], steps=1, after_local_step=lambda: frozen.data.fill_(5.0))
            client.fit(sent["parameters"], steps=1, batch=lambda batch: seen.append(frozen.tolist()) or batch)
            frozen.data.fill_(7.0)
            if client.index == 0:
                raise RuntimeError("given up")
            return self.Report(change=client.change)

    seen: list[list[float]] = []
    plain = plain_federation(Restarting())
    frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    tensors = plain.model.tensors
    plain.module.register_parameter("teacher", frozen)
    tensors.frozen.append("teacher")
    tensors.server["teacher"] = torch.ones(3)
    round_ = Round(plain.federation, 0)
    with pytest.raises(RuntimeError, match="given up"):
        plain.answer(round_.task(0), Private())
    plain.answer(round_.task(1), Private())
    assert seen == [[1.0] * 3] * 2
    assert plain.runner.client is None
