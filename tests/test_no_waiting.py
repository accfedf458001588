"""Within a local step nothing asks the device for a value: the host would have to wait for it."""

import contextlib
import traceback
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

import lit_epgan.modules.gan
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import Algorithm
from lit_epgan.federated import (
    SCAFFOLD,
    ExpectationPropagation,
    FedDyn,
    FedProx,
    GeneratorSites,
    TiltedExpectationPropagation,
)
from lit_epgan.modules.acoustic_model import AcousticModel
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.federations import fit

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


def _masks(name: str, args: Any) -> bool:
    """Whether rows are chosen by a boolean tensor, so that the host must know how many."""
    return name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])


def _refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("a tensor's values are fetched within a step")


class Watched(GAN):
    """A GAN whose steps are watched, and all that callbacks do within them."""

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


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
@pytest.mark.parametrize(
    "algorithm",
    [
        FedProx(0.1),
        SCAFFOLD(),
        FedDyn(),
        ExpectationPropagation(),
        TiltedExpectationPropagation("discriminator.layers.1", components=2, tilt_every=2),
        GeneratorSites(own_rows=4, pool=20),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_no_step_of_a_federated_gan_asks(
    options: dict[str, Any], algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an accelerator, whose Adam is not the fused one."""
    monkeypatch.setattr(lit_epgan.modules.gan, "adam", lambda network, lr, betas: torch.optim.Adam(network, lr, betas))
    torch.manual_seed(0)
    networks = MLPGenerator((3,), hidden=(8,), tanh=False, members=2), MLPDiscriminator((3,), hidden=(6, 5), heads=2)
    module = Watched(*networks, **options)
    monkeypatch.setattr(Watched, "questions", Questions())  # not the module's own, which clients keep apart
    data = FederatedDataModule.from_datasets([TensorDataset(torch.randn(20, 3)) for _ in range(2)], 8, local_steps=4)
    fit(module, data, rounds=3, algorithm=algorithm, precision="32-true")
    assert module.questions.asked == []


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_gan_steps_where_there_are_no_values(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert module.step_losses is not None
    assert module.step_losses.is_meta


def test_the_step_around_a_recognisers_network_asks_nothing() -> None:
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


def test_a_question_is_heard() -> None:
    with Questions() as questions:
        float(torch.ones(2).sum())
    assert questions.asked == ["test_a_question_is_heard"]
