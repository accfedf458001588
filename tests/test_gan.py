"""Training the GAN module in plain Lightning: a step bit by bit, the average, weights, schedules."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

import lit_epgan.modules.sampling
from lit_epgan.federated.function_space.embedding_release import sample_shape
from lit_epgan.lib.errors import UserError
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests.gans import Batches, Record, fit, gan
from tests.generative import Images, trainer
from tests.refusals import assert_refused


def plain_steps(module, batches, r1, every):
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
def test_steps_equal_plain_pytorch_bit_by_bit(r1, tmp_path):
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
def test_weights_are_replicated_rows(objective, tmp_path):
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
        module = SameNoise(*networks, objective=objective, r1=2.0, r1_every=1, gp=0.0, average=None)
        fit(module.double(), [_to_double(batch)], tmp_path)
        found.append([p.detach() for p in module.parameters()])
    for weighted, replicated in zip(*found, strict=True):
        torch.testing.assert_close(weighted, replicated, rtol=1e-9, atol=1e-9)


def _to_double(batch):
    return [entry.double() if isinstance(entry, Tensor) else entry for entry in batch]


def test_average_is_a_buffer_and_equals_a_hand_computed_one(tmp_path):
    module, trail = gan(average=0.9), []
    initial = module.generator.state_dict()["layers.0.weight"].clone()
    record = Record(lambda m: trail.append(m.generator.layers[0].weight.detach().clone()))
    fit(module, list(torch.randn(4, 8, 1, 8, 8)), tmp_path, record)
    expected = initial
    for weight in trail:
        expected = 0.9 * expected + 0.1 * weight
    torch.testing.assert_close(module.average.get_buffer("layers.0.weight"), expected)
    names = dict(module.named_buffers())
    assert {n for n in names if n.startswith("average.")} == {
        f"average.{n}" for n, _ in module.generator.named_parameters()
    }
    assert not any(n.startswith("average") for n, _ in module.named_parameters())


def test_average_starts_anew_with_a_fresh_optimizer(tmp_path):
    """Whoever clears the optimizers' state (a federation, for each client) also begins a new average."""
    module = gan(average=0.9)
    before: list[Tensor] = []

    class Reset(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
            if batch_idx == 3:
                for optimizer in trainer.optimizers:
                    optimizer.state.clear()
                before.append(pl_module.generator.layers[0].weight.detach().clone())

    fit(module, list(torch.randn(4, 8, 1, 8, 8)), tmp_path, Reset())
    after = module.generator.get_parameter("layers.0.weight").detach()
    torch.testing.assert_close(module.average.get_buffer("layers.0.weight"), 0.9 * before[0] + 0.1 * after)


def test_generator_step_leaves_the_discriminators_gradients_alone(tmp_path):
    """After a step D holds the gradients of its own loss: the generator's step computed none."""
    seen: list[Tensor | None] = []

    class Spy(Callback):
        def on_before_zero_grad(self, trainer: Trainer, pl_module, optimizer) -> None: ...

        def on_before_optimizer_step(self, trainer: Trainer, pl_module, optimizer) -> None:
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


def test_trains_in_plain_lightning(tmp_path):
    torch.manual_seed(1)
    points = torch.tensor([2.0, -1.0]) + 0.3 * torch.randn(512, 2)
    generator = MLPGenerator((2,), latent_dim=2, hidden=(32,), tanh=False)
    module = GAN(generator, MLPDiscriminator((2,), hidden=(32,)), lr=6e-3, r1=0.1)
    before = module.sample(500).mean(0)
    fit(module, list(points.split(64)), tmp_path, max_epochs=30)
    after = module.sample(500).mean(0)
    assert (before - points.mean(0)).norm() > 1
    assert (after - points.mean(0)).norm() < 0.3


def test_learning_rates_fall_linearly_from_epoch_to_epoch(tmp_path):
    rates: list[float] = []

    class Rates(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_) -> None:
            rates.extend(o.param_groups[0]["lr"] for o in trainer.optimizers)

    module = gan(lr=1e-3, lr_discriminator=4e-3, lr_decay=0.1)
    fit(module, list(torch.randn(2, 8, 1, 8, 8)), tmp_path, Rates(), max_epochs=4)
    factors = [1.0, 0.7, 0.4, 0.1]
    assert rates == pytest.approx([lr * f for f in factors for _ in range(2) for lr in (1e-3, 4e-3)])
    with pytest.raises(UserError, match="max_epochs"):
        fit(gan(lr_decay=0.1), list(torch.randn(2, 8, 1, 8, 8)), tmp_path, max_epochs=-1, max_steps=2)


def test_batch_norm_never_sees_real_and_generated_rows_together_and_predicts(tmp_path):
    sizes: list[int] = []
    module = GAN(MLPGenerator(hidden=(16,)), MLPDiscriminator(hidden=(16,), norm="batch"))
    module.discriminator.register_forward_hook(lambda net, args, out: sizes.append(len(args[0])))
    fit(module, [torch.randn(8, 1, 8, 8)], tmp_path)
    assert sizes == [8, 8, 8]
    trainer = Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    parts = trainer.predict(gan(), Batches([torch.zeros(3, 1, 8, 8), (torch.zeros(2, 1, 8, 8), torch.zeros(2))]))
    assert parts is not None
    assert [tuple(part.shape) for part in parts] == [(3, 1, 8, 8), (2, 1, 8, 8)]
    assert_refused("latent_dim", GAN, nn.Linear(4, 2), nn.Linear(2, 1))
    assert GAN(nn.Linear(4, 2), nn.Linear(2, 1), latent_dim=4).sample(3).shape == (3, 2)


def test_samples_depend_on_their_generator_alone():
    module = gan(average=0.9)
    stream = torch.get_rng_state()
    samples = module.sample(1200, torch.Generator().manual_seed(5))
    assert torch.equal(torch.get_rng_state(), stream)
    assert samples.shape == (1200, 1, 8, 8)
    assert not samples.requires_grad
    assert torch.equal(samples, module.sample(1200, torch.Generator().manual_seed(5)))
    noise = torch.randn(1200, 32, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(samples, module.average(noise))  # however many pass at a time


def test_sampling_trusts_no_running_statistics():
    """Averaged or stale statistics do not show in samples, and the global stream and modes stay as they were."""
    module = GAN(DCGANGenerator(28, 1, 8, 8, 2), DCGANDiscriminator(28, 1, 4, 2))
    good = module.sample(8, torch.Generator().manual_seed(5))
    for name, buffer in module.average.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.fill_(7.0)
    stream = torch.get_rng_state()
    torch.testing.assert_close(module.sample(8, torch.Generator().manual_seed(5)), good)
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(part.training for part in module.average.modules())


def test_statistics_are_recomputed_once_for_every_state(monkeypatch):
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


def test_the_start_of_a_fit_and_a_look_at_the_shape_leave_every_tensor_as_it_is(tmp_path):
    """Else a resumed run's statistics would be those of the moment at which it was resumed."""
    module = GAN(MLPGenerator(hidden=(16,), norm="batch"), MLPDiscriminator(hidden=(16,)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert any("running_mean" in name for name in before)
    trainer(tmp_path, max_epochs=0).fit(module, Images())
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    # embedding sites take it at the start of a fit, and so once more where a run is resumed
    module = GAN(MLPGenerator(hidden=(16,), norm="batch"), MLPDiscriminator(hidden=(16,)))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert sample_shape(module) == module._draw(1, None).shape[1:]
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    module.sample(1)
    assert not all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


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
def test_nonsense_is_refused_in_a_sentence(options, words):
    assert_refused(words, gan, **options)
