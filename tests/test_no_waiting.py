"""Within a local step nothing asks the device for a value: the host would have to wait for it."""

import contextlib
import copy
import functools
import itertools
import shutil
import traceback
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import lit_epgan.modules.gan
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm, Broadcast, Client, Message
from lit_epgan.federated import (
    MOON,
    SCAFFOLD,
    ExpectationPropagation,
    FedAvg,
    FedDyn,
    FedNP,
    FedProx,
    GeneratorSites,
    TiltedExpectationPropagation,
)
from lit_epgan.federated.drift.moon import contrast
from lit_epgan.modules.acoustic_model import AcousticModel
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.modules.objectives import OBJECTIVES
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior, Prior, UniformPrior
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests.federations import federation, fit

ASKING = {
    "_local_scalar_dense",
    "_unique2",
    "allclose",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
}
FETCHING = ("tolist", "cpu", "numpy")  # these dispatch nothing on a CPU
ON_THE_HOST = {
    "_get_value",  # Adam's step count, which torch keeps there on every device
    "steps_taken",  # the same
    "_moments",  # lit_epgan.bayes.tilted looks how deep a tail is on a CPU only
}


class Questions(TorchDispatchMode):
    """Notes which functions do something whose result the host needs, but for those that ask the host itself."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ASKING or _masks(func.overloadpacket.__name__, args):
            frames = traceback.extract_stack(limit=6)[:-1]
            asking = [
                frame.name for frame in frames if "_dynamo" not in frame.filename and "_compile" not in frame.filename
            ]
            if not ON_THE_HOST & set(asking[-2:]):
                self.asked.append(asking[-1])
        return func(*args, **(kwargs or {}))


def _masks(name, args):
    """Whether rows are chosen by a boolean tensor, so that the host must know how many."""
    return name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])


def _refuse(*_, **__):
    raise AssertionError("a tensor's values are fetched within a step")


class Watched(GAN):
    questions = Questions()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.questions, pytest.MonkeyPatch.context() as patch:
            for name in FETCHING:
                patch.setattr(Tensor, name, _refuse)
            super().training_step(batch, batch_idx)


OPTIONS: list[dict[str, Any]] = [
    {"objective": "wgan-gp"},
    {"objective": "lsgan", "r1": 0.5, "r1_every": 2},
    {"objective": "non-saturating", "noise": 1e-3, "average": 0.9},
    {"objective": "lsgan", "prior": HistoryPrior(size=2, every=2)},
]


TILTED = TiltedExpectationPropagation("discriminator.layers.1", components=2, tilt_every=2)
PULLING = [FedProx(0.1), SCAFFOLD(), FedDyn(), ExpectationPropagation(), TILTED]  # after the loss, whichever it is
ASKED = [*zip(PULLING, itertools.cycle(OPTIONS)), *((GeneratorSites(own_rows=4, pool=20), each) for each in OPTIONS)]


@pytest.mark.parametrize(("algorithm", "options"), ASKED)
def test_no_step_of_a_federated_gan_asks(algorithm, options, monkeypatch):
    """As on an accelerator, whose Adam is not the fused one."""
    monkeypatch.setattr(lit_epgan.modules.gan, "adam", lambda network, lr, betas: torch.optim.Adam(network, lr, betas))
    torch.manual_seed(0)
    networks = MLPGenerator((3,), hidden=(8,), tanh=False, members=2), MLPDiscriminator((3,), hidden=(6, 5), heads=2)
    module = Watched(*networks, **options)
    monkeypatch.setattr(Watched, "questions", Questions())  # not the module's own, which clients keep apart
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(20, 3)) for _ in range(2)], 8, local_steps=4)
    fit(module, data, rounds=2, algorithm=algorithm, precision="32-true")
    assert module.questions.asked == []


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_gan_steps_where_there_are_no_values(options, monkeypatch):
    """Tensors of the meta device have none, and whoever asks for one gets an error."""
    with torch.device("meta"):
        generator = MLPGenerator((3,), hidden=(8,), tanh=False, members=2)
        module = GAN(generator, MLPDiscriminator((3,), hidden=(6, 5), heads=2), **options)
    players = [torch.optim.Adam(network.parameters()) for network in (module.generator, module.discriminator)]
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # knows no such device
    monkeypatch.setattr(module, "optimizers", lambda: players)
    monkeypatch.setattr(module, "manual_backward", lambda loss: loss.backward())
    for step in range(5):
        module.training_step((torch.empty(8, 3, device="meta"),), step)
    assert module.step_losses.is_meta


def test_the_step_around_a_recognisers_network_asks_nothing_and_a_question_is_heard():
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4, device="meta")

        def forward(self, frames: Tensor) -> Tensor:
            return self.layer(frames)

    module = AcousticModel(Linear())
    states = torch.empty(2, 6, dtype=torch.long, device="meta")
    loss = module.training_step((torch.empty(2, 6, 5, device="meta"), states), 0)
    assert isinstance(loss, Tensor)
    assert loss.is_meta
    with Questions() as questions:
        float(torch.ones(2).sum())
    assert questions.asked == ["test_the_step_around_a_recognisers_network_asks_nothing_and_a_question_is_heard"]


FEATURES = "discriminator.layers.4"
CASES: dict[str, tuple[Prior, Algorithm, dict[str, Any]]] = {
    "vanilla": (UniformPrior(), FedAvg(), {"objective": "non-saturating", "r1": 0.5, "r1_every": 2}),
    "bayesgan": (GaussianPrior(1e-4), ExpectationPropagation(), {"objective": "lsgan"}),
    "probgan": (HistoryPrior(size=2, every=1), FedAvg(), {"objective": "wgan-gp", "channels_last": True}),
    "gma": (HistoryPrior(size=2, every=1, approximation="gma"), FedAvg(), {"objective": "lsgan"}),
    "ep_probgan": (HistoryPrior(size=2, every=1), TiltedExpectationPropagation(FEATURES), {"objective": "wgan-gp"}),
}


def convolutions(members):
    torch.manual_seed(0)
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4, members=members)
    return generator, DCGANDiscriminator(image_size=8, channels=1, width=4, heads=members)


@pytest.mark.parametrize("case", CASES)
def test_every_prior_and_objective(case):
    prior, algorithm, options = CASES[case]
    generator, discriminator = convolutions(2)
    module = GAN(generator, discriminator, prior=prior, noise=1e-3, **options)
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(8, 1, 8, 8)) for _ in range(2)], batch_size=4)
    fit(module, data, rounds=2, algorithm=algorithm, precision="bf16-mixed")
    for name, value in module.state_dict().items():
        assert value.dtype in (torch.float32, torch.int64), name
        assert torch.isfinite(value).all(), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_losses_and_contrasts_of_half_precision_are_those_in_single(name):
    real, fake = (torch.randn(64, 2).to(torch.bfloat16) for _ in range(2))
    weight, objective = torch.rand(64).softmax(0), OBJECTIVES[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [objective.discriminator_loss(real, fake, weight), objective.generator_loss(fake)]
    wide = [objective.discriminator_loss(real.float(), fake.float(), weight), objective.generator_loss(fake.float())]
    for loss, expected in zip(losses, wide, strict=True):
        assert loss.dtype == torch.float32
        assert torch.equal(loss, expected)
    z = torch.randn(3, 8, 6).to(torch.bfloat16)
    assert torch.equal(contrast(*z, 0.5), contrast(*z.float(), 0.5))


def test_the_past_of_a_history_prior_is_not_halved_by_autocast():
    """gma's distances are differences of large sums."""
    generator, discriminator = convolutions(2)
    for approximation in ("gma", "psa"):
        prior = HistoryPrior(size=2, every=1, approximation=approximation)
        prior.build(generator, discriminator, OBJECTIVES["lsgan"])
        prior.before_step(0, generator, discriminator)
        fake = generator(torch.randn(4, 4)).detach()
        with torch.no_grad():
            for parameter in generator.parameters():
                parameter.add_(0.01)
        expected = prior.generator_loss(generator, discriminator, fake)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = prior.generator_loss(generator, discriminator, fake)
        assert torch.equal(loss, expected), approximation


class Observer(FedAvg):
    def __init__(self) -> None:
        self.autocast: dict[str, bool] = {}

    def note(self, hook: str) -> None:
        self.autocast[hook] = self.autocast.get(hook, False) or torch.is_autocast_enabled("cpu")

    def train(self, client: Client, sent: Broadcast) -> Message:
        client.fit(
            sent["parameters"],
            loss=lambda: self.note("loss"),
            gradient=lambda _: self.note("gradient"),
            after_step=lambda _: self.note("after_step"),
        )
        return self.Report(change=client.change)


def test_algorithms_compute_without_autocast_while_the_module_trains_under_it():
    module = GAN(*convolutions(1))
    trained: list[bool] = []
    module.discriminator.register_forward_hook(lambda *_: trained.append(torch.is_autocast_enabled("cpu")))
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(8, 1, 8, 8)) for _ in range(2)], batch_size=4)
    algorithm = Observer()
    fit(module, data, rounds=1, algorithm=algorithm, precision="bf16-mixed")
    assert all(trained)
    assert algorithm.autocast == {"loss": False, "gradient": False, "after_step": False}
    assert module.losses.last[0].dtype == torch.float32


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(3, 6), nn.Tanh())
        self.head = nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    "algorithm", [MOON("backbone"), MOON("head"), FedNP("backbone", "head"), TiltedExpectationPropagation("backbone.0")]
)
def test_algorithms_that_look_at_features_take_halved_ones(algorithm):
    torch.manual_seed(0)
    module = Regression()
    sets = [TensorDataset(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(2)]
    data = FederatedDataModule.from_datasets(sets, batch_size=4)
    fit(module, data, rounds=3, algorithm=algorithm, precision="bf16-mixed")
    for name, value in module.state_dict().items():
        assert value.dtype == torch.float32, name
        assert torch.isfinite(value).all(), name


NOISY = {"objective": "lsgan", "noise": 1e-3, "prior": HistoryPrior(size=2, every=2)}
COMPILED: list[tuple[dict[str, Any], Algorithm]] = [
    ({"objective": "wgan-gp"}, FedAvg()),
    ({"objective": "lsgan", "r1": 0.5, "r1_every": 2}, FedAvg()),
    ({"objective": "non-saturating", "prior": HistoryPrior(size=2, every=2)}, FedAvg()),
    (NOISY, ExpectationPropagation()),
    (NOISY, TiltedExpectationPropagation("discriminator.layers.1", tilt_every=2)),  # reads features
]


def compiler(test):
    """Marks what needs one."""
    there = shutil.which("g++") is not None
    return pytest.mark.slow(pytest.mark.skipif(not there, reason="torch.compile needs a C++ compiler")(test))


@compiler
@pytest.mark.parametrize(("options", "algorithm"), COMPILED, ids=["gp", "r1", "history", "ep", "tilted"])
def test_compiled_and_eager_training_agree(options, algorithm, monkeypatch):
    """Three rounds of two clients, whose parameters are swapped under the compiled networks; with EP's sites."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))  # no C++, in seconds
    torch.manual_seed(0)
    generator = MLPGenerator((3,), hidden=(8,), tanh=False, members=2)
    discriminator = MLPDiscriminator((3,), hidden=(6, 5), heads=2)
    ends = []
    for compiled in (False, True):
        module = GAN(copy.deepcopy(generator), copy.deepcopy(discriminator), compiled=compiled, **options)
        fit(module, federation(sizes=(20, 12), local_steps=4), rounds=3, algorithm=copy.deepcopy(algorithm))
        ends.append(module.state_dict())
    torch.testing.assert_close(ends[1], ends[0])


@compiler
def test_a_hook_that_is_put_on_later_is_called(monkeypatch):
    """As an algorithm puts one on a network that has been compiled without."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    module = GAN(MLPGenerator((3,), hidden=(8,)), MLPDiscriminator((3,), hidden=(6, 5)), compiled=True)
    called: list[int] = []
    module._faster("discriminator")(torch.randn(4, 3))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # it was compiled indeed
    module.discriminator.get_submodule("layers.1").register_forward_hook(lambda *_: called.append(1))
    module._faster("discriminator")(torch.randn(4, 3))
    assert called == [1]


@compiler
def test_compiled_convolutions_agree():
    """Both networks' losses and gradients in one step, stacked ensembles, channels last, with BatchNorm."""
    torch.manual_seed(0)
    generator = DCGANGenerator(image_size=8, channels=1, latent_dim=4, width=4, upsamplings=2, members=2)
    discriminator = DCGANDiscriminator(image_size=8, channels=1, width=4, downsamplings=2, heads=2)
    found = []
    for compiled in (False, True):
        networks = copy.deepcopy(generator).double(), copy.deepcopy(discriminator).double()
        module = GAN(*networks, compiled=compiled, channels_last=True)
        torch.manual_seed(1)
        real = torch.randn(6, 1, 8, 8, dtype=torch.double).contiguous(memory_format=torch.channels_last)
        loss = module._discriminator_loss(Batch(real), 0)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.discriminator.parameters())])
        images = module._faster("generator")(torch.randn(6, 4, dtype=torch.double))
        loss = module.objective.generator_loss(module._faster("discriminator")(images))
        loss.backward()
        found[-1] += [loss.detach(), *(p.grad for p in module.generator.parameters())]
    for eager, compiled_ in zip(*found, strict=True):
        torch.testing.assert_close(compiled_, eager)
