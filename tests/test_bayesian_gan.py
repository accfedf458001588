"""GANs of several generators and discriminators: a training step written out, samples, checkpoints, federations."""

import copy
import itertools

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn

from lit_epgan.bayes.sghmc import SGHMC
from lit_epgan.callbacks import FederationCallback
from lit_epgan.callbacks.sample_grid import SampleGrid
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import ExpectationPropagation
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.objectives import OBJECTIVES, objective
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import DCGANDiscriminator, DCGANGenerator, MLPDiscriminator, MLPGenerator
from tests import federations
from tests.federations import client_sets
from tests.gans import HEADS, MEMBERS, PRIORS, Batches, Record, bayesian_gan, fit
from tests.refusals import assert_refused


def tensors(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def plain_steps(module: GAN, batches: list[Tensor], rows: int, prior: str) -> list[Tensor]:
    generator, discriminator = copy.deepcopy(module.generator), copy.deepcopy(module.discriminator)
    decay = 0.01 if prior == "gaussian" else 0.0
    optimizers = [
        torch.optim.Adam(n.parameters(), lr=1e-3, betas=(0.5, 0.99), weight_decay=decay)
        for n in (generator, discriminator)
    ]
    past: list[nn.Module] = []

    def generators_loss(critic: nn.Module, fake: Tensor):
        scores = [critic(block)[:, head] for block in fake.split(rows) for head in range(HEADS)]
        return sum(((s - 1) ** 2).mean() / 2 for s in scores) / (MEMBERS * HEADS)

    for step, real in enumerate(batches):
        if prior == "psa" and step % 2 == 0:
            past = [copy.deepcopy(discriminator), *past][:2]
        with torch.no_grad():
            fake = generator(torch.randn(rows * MEMBERS, 5, dtype=torch.double))
        pairs = [
            ((discriminator(real)[:, head] - 1) ** 2).mean() / 2 + (discriminator(block)[:, head] ** 2).mean() / 2
            for block in fake.split(rows)
            for head in range(HEADS)
        ]
        optimizers[1].zero_grad()
        torch.stack(pairs).mean().backward()
        optimizers[1].step()
        fake = generator(torch.randn(rows * MEMBERS, 5, dtype=torch.double))
        loss = generators_loss(discriminator, fake)
        if past:
            loss = loss + sum(generators_loss(critic, fake) for critic in past) / len(past)
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
    return tensors(generator) + tensors(discriminator)


@pytest.mark.parametrize("prior", ["uniform", "gaussian", "psa"])
def test_steps_equal_loops_over_generators_and_discriminators(prior, tmp_path):
    """10 real rows; ceil(10 / 4) = 3 rows of each generator."""
    module = bayesian_gan(norm="layer", objective="lsgan", prior=PRIORS[prior]).double()
    batches = list(torch.randn(6, 10, 3, dtype=torch.double))
    torch.manual_seed(7)
    expected = plain_steps(module, batches, 3, prior)
    fit(module, batches, tmp_path, Record(seed=7))
    torch.testing.assert_close(tensors(module), expected)


@pytest.mark.parametrize(
    ("batch", "generated", "rows"), [(10, None, 3), (12, None, 3), (3, None, 2), (10, 5, 5), (10, 1, 1)]
)
def test_generated_rows_of_each_generator(batch, generated, rows, tmp_path):
    seen: list[int] = []
    module = bayesian_gan(norm="layer", objective="wgan-gp", generated=generated)
    module.generator.register_forward_hook(lambda net, args, out: seen.append(len(args[0])))
    fit(module, [torch.randn(batch, 3)], tmp_path, Record(lambda m: seen.append(0)))
    assert seen[seen.index(0) - 2 :] == [MEMBERS * rows] * 2 + [0]


def test_noise_is_on_every_gradient_after_callbacks_have_seen_it(tmp_path):
    clean: dict[int, list[Tensor]] = {}
    noisy: list[Tensor] = []

    class Before(Callback):
        def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer) -> None:
            clean[id(optimizer)] = [p.grad.clone() for p in optimizer.param_groups[0]["params"]]

    class Noisy(GAN):
        def _optimizer(self, network: nn.Module, lr: float) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(network.parameters(), lr=lr)

            def collect(optimizer, *_) -> None:
                given = [p.grad for p in optimizer.param_groups[0]["params"]]
                noisy.extend((a - b).flatten() for a, b in zip(given, clean[id(optimizer)], strict=True))

            optimizer.register_step_post_hook(collect)
            return optimizer

    torch.manual_seed(0)
    networks = MLPGenerator((3,), 5, (64, 64), members=2), MLPDiscriminator((3,), (64, 64))
    module = Noisy(*networks, noise=0.05, average=None)
    fit(module, [torch.randn(8, 3)], tmp_path, Before())
    assert len(noisy) == len(list(module.parameters()))
    added = torch.cat(noisy)
    assert added.std().item() == pytest.approx(0.05, rel=0.05)
    assert added.mean().abs().item() < 0.05 * 4 / len(added) ** 0.5
    assert all(part.std().item() == pytest.approx(0.05, rel=0.5) for part in noisy if len(part) > 30)


def test_sghmc_trains_as_the_optimizer_by_itself(tmp_path):
    module, batches = bayesian_gan(optimizer="sghmc", friction=0.2, temperature=1e-4, lr=0.01), [torch.randn(8, 3)] * 3
    copied = copy.deepcopy(module)
    torch.manual_seed(7)
    optimizers = [
        SGHMC(n.parameters(), lr=0.01, friction=0.2, temperature=1e-4) for n in (copied.generator, copied.discriminator)
    ]
    losses = objective("non-saturating")
    for real in batches:
        with torch.no_grad():
            fake = copied.generator(torch.randn(8, 5))
        scores = copied.discriminator(torch.cat([real, fake]))
        optimizers[1].zero_grad()
        losses.discriminator_loss(scores[:8], scores[8:]).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        losses.generator_loss(copied.discriminator(copied.generator(torch.randn(8, 5)))).backward()
        optimizers[0].step()
    fit(module, batches, tmp_path, Record(seed=7))
    torch.testing.assert_close(tensors(module), tensors(copied))


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_dcgans_train_under_every_prior(prior, name, tmp_path):
    networks = DCGANGenerator(28, 1, 8, 4, 2, members=2), DCGANDiscriminator(28, 1, 4, 2, heads=2)
    options = {"prior": PRIORS[prior], "r1": 0.1, "noise": 0.00424, "average": 0.9}
    module = GAN(*networks, objective=name, channels_last=True, **options)
    before = copy.deepcopy(module.state_dict())
    trainer = fit(module, list(torch.randn(3, 5, 1, 28, 28)), tmp_path)
    assert all(not torch.equal(before[n], p) for n, p in module.named_parameters())
    assert all(value.isfinite() for value in trainer.callback_metrics.values())
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert module.sample(5).shape == (5, 1, 28, 28)
    convolution = next(m for m in module.generator.modules() if isinstance(m, nn.ConvTranspose2d) and m.stride[0] == 2)
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


def labelled(n: int = MEMBERS) -> GAN:
    """Generator i gives samples around 10 i: what its own first layer adds, passed on."""
    module = bayesian_gan(norm="none")
    with torch.no_grad():
        for layer in module.generator.layers[2::2]:
            torch.nn.init.eye_(layer.weight)
            layer.bias.zero_()
        first = module.generator.layers[0]
        first.weight.mul_(0.01)
        first.bias.copy_(10 * torch.arange(n, dtype=torch.float)[:, None, None].expand_as(first.bias))
    return module


@pytest.mark.parametrize("n", [1, 3, 4, 10, 1201])
def test_samples_are_the_generators_in_turn(n):
    whose = (labelled().sample(n, torch.Generator().manual_seed(1)).mean(1) / 10).round()
    assert torch.equal(whose, torch.arange(n, dtype=torch.float) % MEMBERS)


def test_samples_of_each_generator():
    module = labelled()
    each = module.sample_each(300, torch.Generator().manual_seed(1))
    assert each.shape == (MEMBERS, 300, 3)
    assert torch.equal((each.mean(2) / 10).round(), torch.arange(4.0)[:, None].expand(4, 300))
    mixture = module.sample(1200, torch.Generator().manual_seed(1))
    torch.testing.assert_close(mixture, each.transpose(0, 1).flatten(0, 1))  # the same noise


def test_memory_divides_the_work_without_a_trace():
    module, sizes = bayesian_gan(average=0.9), []
    handle = module.average.register_forward_hook(lambda net, args, out: sizes.append(len(args[0])))
    samples = module.sample(2000, torch.Generator().manual_seed(5))
    handle.remove()
    assert max(sizes) <= 500
    noise = torch.randn(2000, 5, generator=torch.Generator().manual_seed(5)).unflatten(0, (500, MEMBERS))
    module.average.eval()
    whole = module.average(noise.transpose(0, 1).flatten(0, 1)).unflatten(0, (MEMBERS, 500))
    torch.testing.assert_close(samples, whole.transpose(0, 1).flatten(0, 1))


def test_a_grid_has_a_row_for_each_generator_only_if_there_are_several(tmp_path, monkeypatch):
    shown: list[Tensor] = []
    monkeypatch.setattr("lit_epgan.callbacks.sample_grid.publish", lambda trainer, name, sheet: None)
    monkeypatch.setattr("lit_epgan.callbacks.sample_grid.tile", lambda images, columns: shown.append(images))
    trainer = Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path)
    one = GAN(MLPGenerator(hidden=(8,)), MLPDiscriminator(hidden=(8,)))
    several = GAN(MLPGenerator(hidden=(8,), members=3), MLPDiscriminator(hidden=(8,)))
    for module in (one, several):
        SampleGrid(rows=2, columns=5).evaluate(trainer, module)
    assert [len(images) for images in shown] == [10, 15]


@pytest.mark.parametrize("prior", PRIORS)
def test_a_resumed_fit_is_the_uninterrupted_one(prior, tmp_path):
    """Two epochs of three steps, or one and then another from its checkpoint: the same bits, history included."""
    batches, options = list(torch.randn(3, 8, 3)), {"prior": PRIORS[prior], "average": 0.9, "noise": 0.01}
    whole = bayesian_gan(**options)
    fit(whole, batches, tmp_path, Record(seed=7), max_epochs=2)
    first = bayesian_gan(**options)
    fit(first, batches, tmp_path, Record(seed=7), max_epochs=1).save_checkpoint(tmp_path / "one.ckpt")
    second = bayesian_gan(**options)
    trainer = federations.plain_trainer(max_epochs=2, precision="32-true", callbacks=[Record(seed=7)])
    trainer.fit(second, Batches(batches), ckpt_path=tmp_path / "one.ckpt", weights_only=True)
    assert set(whole.state_dict()) == set(second.state_dict())
    for name, value in whole.state_dict().items():
        recomputed = name.startswith("average.") and ("running" in name or "tracked" in name)  # whenever it is sampled
        assert recomputed or torch.equal(value, second.state_dict()[name]), name
    if prior == "psa":
        assert whole.state_dict()["prior.snapshots.filled"].tolist() == [1, 1]


def test_checkpoint_round_trip(tmp_path):
    module = bayesian_gan(prior=HistoryPrior(every=1, size=2), noise=0.01, generated=3)
    fit(module, list(torch.randn(3, 8, 3)), tmp_path).save_checkpoint(tmp_path / "gan.ckpt")
    networks = {"generator": module.generator, "discriminator": module.discriminator}
    again = {name: copy.deepcopy(network) for name, network in networks.items()}
    prior = HistoryPrior(every=1, size=2)
    loaded = GAN.load_from_checkpoint(tmp_path / "gan.ckpt", weights_only=True, prior=prior, **again)
    assert (loaded.noise, loaded.generated) == (0.01, 3)
    states = [m.state_dict().values() for m in (loaded, module)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert torch.equal(*(m.sample(7, torch.Generator().manual_seed(3)) for m in (module, loaded)))
    assert not hasattr(prior, "snapshots")  # the module has a copy


def test_a_command_lines_checkpoint_rebuilds_the_prior(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fit"])
    networks = {
        "generator": {"class_path": "lit_epgan.networks.MLPGenerator", "init_args": {"hidden": [8], "members": 3}},
        "discriminator": {"class_path": "lit_epgan.networks.MLPDiscriminator", "init_args": {"hidden": [8]}},
        "prior": {"class_path": "lit_epgan.modules.HistoryPrior", "init_args": {"size": 2, "every": 1}},
    }
    model = {"class_path": "lit_epgan.modules.GAN", "init_args": networks}
    options = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "default_root_dir": str(tmp_path)}
    command_line = LightningCLI(run=False, save_config_callback=None, args={"model": model, "trainer": options})
    command_line.trainer.fit_loop.max_epochs = 1
    command_line.trainer.fit(command_line.model, Batches([torch.randn(8, 1, 8, 8)] * 2))
    command_line.trainer.save_checkpoint(tmp_path / "gan.ckpt")
    generator, discriminator = MLPGenerator(hidden=[8], members=3), MLPDiscriminator(hidden=[8])
    prior = HistoryPrior(size=2, every=1)
    given = {"generator": generator, "discriminator": discriminator, "prior": prior}
    loaded = GAN.load_from_checkpoint(tmp_path / "gan.ckpt", **given)
    assert loaded.prior.snapshots.filled.tolist() == [1, 1]
    assert torch.equal(*(m.prior.snapshots.vectors for m in (command_line.model, loaded)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"generated": 1}, "generated is 1, but must be at least 2"),
        ({"generated": 0}, "generated is 0"),
        ({"noise": -1.0}, "noise is -1"),
        ({"noise": float("nan")}, "noise is nan"),
        ({"optimizer": "rmsprop"}, "adam, sghmc or sgd"),
        ({"friction": 0.0}, "friction is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
    ],
)
def test_nonsense_is_refused_in_a_sentence(options, words):
    assert_refused(words, bayesian_gan, **options)


SIZES = (20, 7, 34, 12)  # 3, 1, 5 and 2 steps of 8 rows


@pytest.mark.parametrize(("name", "prior"), zip(itertools.cycle(OBJECTIVES), PRIORS))
def test_federations_train_under_every_objective_and_prior(name, prior):
    module = bayesian_gan(heads=4, objective=name, prior=PRIORS[prior], average=0.9, noise=0.00424)
    data = FederatedDataModule.from_datasets(client_sets(SIZES), batch_size=8, local_steps=2)
    before = copy.deepcopy(module.state_dict())
    trainer = federations.fit(module, data, rounds=2, algorithm=ExpectationPropagation(prior_scale=1.0))
    assert all(not torch.equal(before[n], p.float()) for n, p in module.named_parameters())
    assert all(value.isfinite().all() for value in module.state_dict().values())
    assert all(value.isfinite() for value in trainer.callback_metrics.values())


class Histories(Callback):
    def __init__(self) -> None:
        self.rounds: list[dict[int, tuple[float, Tensor, Tensor]]] = []
        self.starts: list[Tensor] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.rounds.append({})
        parts = [p.detach().flatten() for p in pl_module.discriminator.parameters()]
        self.starts.append(torch.cat(parts))

    def on_train_batch_end(self, trainer: Trainer, pl_module, *_) -> None:
        federation = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
        client, snapshots = federation._driver.runner.client, pl_module.prior.snapshots
        self.rounds[-1][client.index] = client.records, snapshots.read().clone(), snapshots.filled.clone()


def federated_history(rounds: int, size: int = 3, **options) -> tuple[GAN, Histories]:
    module, histories = bayesian_gan(prior=HistoryPrior(size=size, every=2)), Histories()
    data = FederatedDataModule.from_datasets(client_sets(SIZES), batch_size=8)
    federations.fit(module, data, rounds=rounds, callbacks=[histories], **options)
    return module, histories


def test_averaged_buffers_are_a_history_that_all_clients_share():
    """Snapshots before steps 0, 2, 4: clients with 3, 1, 5 and 2 steps have two, one, three and one of them."""
    module, histories = federated_history(1)
    taken = {k: int(filled.sum()) for k, (_, _, filled) in histories.rounds[0].items()}
    assert taken == {0: 2, 1: 1, 2: 3, 3: 1}
    shared = module.prior.snapshots.read()
    for place, among in ((0, (0, 1, 2, 3)), (1, (0, 2)), (2, (2,))):
        own = [(weight, vectors[place]) for k, (weight, vectors, _) in histories.rounds[0].items() if k in among]
        mean = sum(w * v for w, v in own) / sum(w for w, _ in own)
        torch.testing.assert_close(shared[place], mean)


def test_a_short_rounds_history_reaches_back_over_the_servers_models():
    """One snapshot per client and round (one step each): the history is the server's last discriminators."""
    module, histories = bayesian_gan(prior=HistoryPrior(size=3, every=100)), Histories()
    data = FederatedDataModule.from_datasets(client_sets(SIZES), batch_size=8, local_steps=1)
    federations.fit(module, data, rounds=4, callbacks=[histories])
    torch.testing.assert_close(module.prior.snapshots.read(), torch.stack(histories.starts[:0:-1]))
    assert module.prior.snapshots.filled.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("policy", "filled"), [("local", [1, 1, 0]), ("exclude", [1, 0, 0])])
def test_other_policies_keep_a_history_to_its_client(policy, filled):
    module, histories = federated_history(2, buffers=policy)
    _, vectors, found = histories.rounds[1][1]  # one step and one snapshot a round
    assert found.tolist() == filled
    torch.testing.assert_close(vectors[0], histories.starts[1])
    assert not module.prior.snapshots.filled.any()
