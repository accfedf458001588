"""Using a GAN module: samples, predictions, checkpoints, and what it refuses."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningCLI
from torch import nn

import lit_epgan.modules.sampling
from lit_epgan.errors import UserError
from lit_epgan.federated.function_space.embedding_release import sample_shape
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests.gans import Batches, fit, gan
from tests.generative import Images, trainer


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    """A checkpoint loads with weights_only, into given networks, and samples are the same bits."""
    module = gan(average=0.9, lr=2e-3)
    trainer = fit(module, list(torch.randn(3, 8, 1, 8, 8)), tmp_path)
    trainer.save_checkpoint(tmp_path / "gan.ckpt")
    networks = {"generator": MLPGenerator(hidden=(16,)), "discriminator": MLPDiscriminator(hidden=(16,))}
    loaded = GAN.load_from_checkpoint(tmp_path / "gan.ckpt", weights_only=True, **networks)
    assert loaded.lr == 2e-3
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), module.state_dict().values(), strict=True)
    )
    first, second = (m.sample(5, torch.Generator().manual_seed(3)) for m in (module, loaded))
    assert torch.equal(first, second)


def test_samples_depend_on_their_generator_alone() -> None:
    module = gan(average=0.9)
    stream = torch.get_rng_state()
    samples = module.sample(1200, torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), stream)
    assert samples.shape == (1200, 1, 8, 8)
    assert not samples.requires_grad
    assert torch.equal(samples, module.sample(1200, torch.Generator().manual_seed(5)))
    noise = torch.randn(1200, 32, generator=torch.Generator().manual_seed(5))
    assert module.average is not None
    torch.testing.assert_close(samples, module.average(noise))  # however many pass at a time


def test_sampling_trusts_no_running_statistics() -> None:
    """Averaged or stale statistics do not show in samples, and the global stream and modes stay as they were."""
    module = GAN(DCGANGenerator(28, 1, 8, 8, 2), DCGANDiscriminator(28, 1, 4, 2))
    assert module.average is not None
    good = module.sample(8, torch.Generator().manual_seed(5))
    for name, buffer in module.average.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.fill_(7.0)
    stream = torch.get_rng_state()
    torch.testing.assert_close(module.sample(8, torch.Generator().manual_seed(5)), good)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(part.training for part in module.average.modules())


def test_statistics_are_recomputed_once_for_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever changes a parameter or a statistic, even past autograd's version counters, is noticed."""
    calls: list[int] = []
    recompute = lit_epgan.modules.sampling.recompute_batch_norm
    monkeypatch.setattr(
        "lit_epgan.modules.sampling.recompute_batch_norm", lambda *arguments: (calls.append(1), recompute(*arguments))
    )
    generator = MLPGenerator((3,), hidden=(8,), norm="batch", tanh=False)
    module = GAN(generator, MLPDiscriminator((3,), hidden=(8,)), average=None)
    first = module.sample(5, torch.Generator().manual_seed(3))
    assert torch.equal(first, module.sample(5, torch.Generator().manual_seed(3)))
    assert len(calls) == 1
    next(generator.parameters()).data.mul_(1.5)
    moved = module.sample(5, torch.Generator().manual_seed(3))
    assert len(calls) == 2
    running = next(buffer for name, buffer in generator.named_buffers() if "running_mean" in name)
    running += 1
    assert torch.equal(moved, module.sample(5, torch.Generator().manual_seed(3)))
    assert len(calls) == 3
    module.double().sample(5)
    assert len(calls) == 4


def test_the_start_of_a_fit_leaves_every_tensor_as_it_is(tmp_path: Path) -> None:
    """Else a resumed run's statistics would be those of the moment at which it was resumed."""
    module = GAN(MLPGenerator(hidden=(16,), norm="batch"), MLPDiscriminator(hidden=(16,)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert any("running_mean" in name for name in before)
    trainer(tmp_path, max_epochs=0).fit(module, Images())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_look_at_the_shape_of_samples_leaves_every_tensor_as_it_is() -> None:
    """Embedding sites take it at the start of a fit, and so once more where a run is resumed."""
    module = GAN(MLPGenerator(hidden=(16,), norm="batch"), MLPDiscriminator(hidden=(16,)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert sample_shape(module) == module._draw(1, None).shape[1:]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    module.sample(1)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_predict_gives_a_sample_for_every_row(tmp_path: Path) -> None:
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    parts = trainer.predict(gan(), Batches([torch.zeros(3, 1, 8, 8), (torch.zeros(2, 1, 8, 8), torch.zeros(2))]))
    assert parts is not None
    assert [tuple(part.shape) for part in parts] == [(3, 1, 8, 8), (2, 1, 8, 8)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": 0.0}, "lr is 0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"lr_discriminator": -1.0}, "lr_discriminator is -1"),
        ({"betas": (0.5, 1.0)}, "betas"),
        ({"r1": math.nan}, "r1 is nan"),
        ({"r1_every": 0}, "r1_every is 0"),
        ({"gp": -1.0, "objective": "wgan-gp"}, "gp is -1"),
        ({"average": 1.0}, "average is 1"),
        ({"lr_decay": 2.0}, "lr_decay is 2"),
        ({"latent_dim": 5}, "its generator takes 32"),
        ({"objective": "hinge"}, "wgan-gp, lsgan"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        gan(**options)


def test_a_generator_without_latent_dim_needs_one() -> None:
    with pytest.raises(UserError, match="latent_dim"):
        GAN(nn.Linear(4, 2), nn.Linear(2, 1))
    assert GAN(nn.Linear(4, 2), nn.Linear(2, 1), latent_dim=4).sample(3).shape == (3, 2)


def test_a_command_lines_checkpoint_rebuilds_the_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CLI trained loads without naming the networks again."""
    monkeypatch.setattr("sys.argv", ["fit"])
    model = {
        "class_path": "lit_epgan.modules.GAN",
        "init_args": {
            "generator": {"class_path": "lit_epgan.networks.MLPGenerator", "init_args": {"hidden": [16]}},
            "discriminator": {"class_path": "lit_epgan.networks.MLPDiscriminator", "init_args": {"hidden": [16]}},
            "lr": 0.002,
        },
    }
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": str(tmp_path)}
    command_line = LightningCLI(run=False, save_config_callback=None, args={"model": model, "trainer": options})
    command_line.trainer.fit_loop.max_epochs = 1
    command_line.trainer.fit(command_line.model, Batches([torch.randn(8, 1, 8, 8)]))
    command_line.trainer.save_checkpoint(tmp_path / "gan.ckpt")
    loaded = GAN.load_from_checkpoint(tmp_path / "gan.ckpt")
    assert loaded.lr == 0.002
    assert torch.equal(*(m.sample(5, torch.Generator().manual_seed(3)) for m in (command_line.model, loaded)))
