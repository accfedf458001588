"""Training the GAN module in plain Lightning: a step bit by bit, the average, weights, schedules."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lit_epgan.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests.gans import Record, fit, gan


def plain_steps(
    module: GAN, batches: list[Tensor], r1: float, every: int
) -> tuple[list[Tensor], list[tuple[float, float]]]:
    """The non-saturating step written out in PyTorch alone; parameters afterwards and the losses."""
    generator, discriminator = copy.deepcopy(module.generator), copy.deepcopy(module.discriminator)
    optimizers = [
        torch.optim.Adam(n.parameters(), lr=1e-3, betas=(0.5, 0.99), fused=True) for n in (generator, discriminator)
    ]
    losses = []
    for step, real in enumerate(batches):
        with torch.no_grad():
            fake = generator(torch.randn(len(real), 32))
        if r1 and step % every == 0:
            x = real.clone().requires_grad_()
            scores = discriminator(x)
            (gradient,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
            penalty = r1 * every * (gradient.square().flatten(1).sum(1).mean() * 0.5)
            loss = F.softplus(-scores).mean() + F.softplus(discriminator(fake)).mean() + penalty
        else:
            scores = discriminator(torch.cat([real, fake]))
            loss = F.softplus(-scores[: len(real)]).mean() + F.softplus(scores[len(real) :]).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        generator_loss = F.softplus(-discriminator(generator(torch.randn(len(real), 32)))).mean()
        optimizers[0].zero_grad()
        generator_loss.backward()
        optimizers[0].step()
        losses.append((loss.item(), generator_loss.item()))
    return [p.detach() for p in [*generator.parameters(), *discriminator.parameters()]], losses


@pytest.mark.parametrize("r1", [0.0, 0.5])
def test_steps_equal_plain_pytorch_bit_by_bit(r1: float, tmp_path: Path) -> None:
    module, batches = gan(r1=r1, r1_every=2), list(torch.randn(5, 8, 1, 8, 8))
    torch.manual_seed(7)
    expected, losses = plain_steps(module, batches, r1, every=2)
    trainer = fit(module, [(x, torch.zeros(8)) for x in batches], tmp_path, Record(seed=7))
    found = [p.detach() for p in [*module.generator.parameters(), *module.discriminator.parameters()]]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    means = torch.tensor(losses).mean(0)
    assert trainer.callback_metrics["loss/discriminator"].item() == pytest.approx(means[0].item(), rel=1e-5)
    assert trainer.callback_metrics["loss/generator"].item() == pytest.approx(means[1].item(), rel=1e-5)
    assert trainer.global_step == 10  # both optimizers count, so checkpoints and loggers see progress


@pytest.mark.parametrize("objective", ["wgan-gp", "lsgan", "non-saturating"])
def test_weights_are_replicated_rows(objective: str, tmp_path: Path) -> None:
    """A batch with weights k_i / n trains as the batch in which row i stands k_i times, if the noise is the same."""

    class SameNoise(GAN):
        def _noise(self, n: int, like: Tensor) -> Tensor:
            return torch.ones(n, 32, dtype=like.dtype)

    rows, copies = torch.randn(3, 1, 8, 8), torch.tensor([1, 2, 5])
    batches = [(rows, None, copies / 8), (rows.repeat_interleave(copies, 0), None)]
    found = []
    for batch in batches:
        torch.manual_seed(0)
        networks = MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,))
        # gp's mixtures draw a number per row, so its coefficient is left out here
        module = SameNoise(*networks, objective=objective, r1=2.0, r1_every=1, gp=0.0, average=None)  # type: ignore[arg-type]
        fit(module.double(), [_to_double(batch)], tmp_path)
        found.append([p.detach() for p in module.parameters()])
    for weighted, replicated in zip(*found, strict=True):
        torch.testing.assert_close(weighted, replicated, rtol=1e-9, atol=1e-9)


def _to_double(batch: tuple[Any, ...]) -> list[Any]:
    return [entry.double() if isinstance(entry, Tensor) else entry for entry in batch]


def test_average_is_a_buffer_and_equals_a_hand_computed_one(tmp_path: Path) -> None:
    module, trail = gan(average=0.9), []
    initial = module.generator.state_dict()["layers.0.weight"].clone()
    fit(
        module,
        list(torch.randn(4, 8, 1, 8, 8)),
        tmp_path,
        Record(lambda m: trail.append(m.generator.layers[0].weight.detach().clone())),
    )
    expected = initial
    for weight in trail:
        expected = 0.9 * expected + 0.1 * weight
    assert module.average is not None
    torch.testing.assert_close(module.average.get_buffer("layers.0.weight"), expected)
    names = dict(module.named_buffers())
    assert {n for n in names if n.startswith("average.")} == {
        f"average.{n}" for n, _ in module.generator.named_parameters()
    }
    assert not any(n.startswith("average") for n, _ in module.named_parameters())


def test_average_starts_anew_with_a_fresh_optimizer(tmp_path: Path) -> None:
    """Whoever clears the optimizers' state (a federation, for each client) also begins a new average."""
    module = gan(average=0.9)
    before: list[Tensor] = []

    class Reset(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                for optimizer in trainer.optimizers:
                    optimizer.state.clear()
                before.append(pl_module.generator.layers[0].weight.detach().clone())

    fit(module, list(torch.randn(4, 8, 1, 8, 8)), tmp_path, Reset())
    after = module.generator.get_parameter("layers.0.weight").detach()
    assert module.average is not None
    torch.testing.assert_close(module.average.get_buffer("layers.0.weight"), 0.9 * before[0] + 0.1 * after)


def test_generator_step_leaves_the_discriminators_gradients_alone(tmp_path: Path) -> None:
    """After a step D holds the gradients of its own loss: the generator's step computed none."""
    seen: list[Tensor | None] = []

    class Spy(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None: ...

        def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
            gradient = pl_module.discriminator.layers[0].weight.grad
            seen.append(None if gradient is None else gradient.clone())

    module = gan()
    module.discriminator.get_parameter("layers.2.bias").requires_grad_(False)
    fit(module, [torch.randn(8, 1, 8, 8)], tmp_path, Spy())
    assert seen[0] is not None
    assert seen[1] is not None
    assert torch.equal(seen[0], seen[1])
    trainable = {n for n, p in module.discriminator.named_parameters() if p.requires_grad}
    assert trainable == {"layers.0.weight", "layers.0.bias", "layers.2.weight"}  # what was frozen stays frozen


def test_trains_in_plain_lightning(tmp_path: Path) -> None:
    """Centralised, on points around (2, -1): the samples get there."""
    torch.manual_seed(1)
    points = torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(512, 2)
    generator = MLPGenerator((2,), latent_dim=2, hidden=(32,), tanh=False)
    module = GAN(generator, MLPDiscriminator((2,), hidden=(32,)), lr=3e-3, r1=0.1)
    loader = DataLoader(TensorDataset(points), batch_size=64, shuffle=True)
    trainer = Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        max_epochs=60,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    before = module.sample(500).mean(0)
    trainer.fit(module, loader)
    after = module.sample(500).mean(0)
    assert (before - points.mean(0)).norm() > 1
    assert (after - points.mean(0)).norm() < 0.3


@pytest.mark.parametrize("objective", ["wgan-gp", "lsgan", "non-saturating"])
def test_dcgan_with_batch_norm_trains_under_every_objective(objective: str, tmp_path: Path) -> None:
    generator, discriminator = DCGANGenerator(28, 1, 8, 4, 2), DCGANDiscriminator(28, 1, 4, 2, heads=2)
    module = GAN(generator, discriminator, objective=objective, r1=0.1, channels_last=True)  # type: ignore[arg-type]
    before = copy.deepcopy(module.state_dict())
    trainer = fit(module, list(torch.randn(3, 6, 1, 28, 28)), tmp_path)
    after = module.state_dict()
    assert all(not torch.equal(before[n], after[n]) for n, _ in module.named_parameters())
    assert all(value.isfinite() for value in trainer.callback_metrics.values())
    convolution = next(m for m in module.generator.modules() if isinstance(m, nn.ConvTranspose2d) and m.stride[0] == 2)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def test_learning_rates_fall_linearly_from_epoch_to_epoch(tmp_path: Path) -> None:
    rates: list[float] = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            rates.extend(o.param_groups[0]["lr"] for o in trainer.optimizers)

    module = gan(lr=1e-3, lr_discriminator=4e-3, lr_decay=0.1)
    fit(module, list(torch.randn(2, 8, 1, 8, 8)), tmp_path, Rates(), max_epochs=4)
    factors = [1.0, 0.7, 0.4, 0.1]
    assert rates == pytest.approx([lr * f for f in factors for _ in range(2) for lr in (1e-3, 4e-3)])


def test_a_decay_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="max_epochs"):
        fit(gan(lr_decay=0.1), list(torch.randn(2, 8, 1, 8, 8)), tmp_path, max_epochs=-1, max_steps=2)


def test_batch_norm_never_sees_real_and_generated_rows_together(tmp_path: Path) -> None:
    sizes: list[int] = []
    module = GAN(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,), norm="batch"))
    module.discriminator.register_forward_hook(lambda net, args, out: sizes.append(len(args[0])))
    fit(module, [torch.randn(8, 1, 8, 8)], tmp_path)
    assert sizes == [8, 8, 8]
