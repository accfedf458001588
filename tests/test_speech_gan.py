"""Figure 11's module: whose gradient goes where, in which order, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import EmbeddingSites, FedAvg, GeneratorSites, PriorOn, TiltedExpectationPropagation
from lit_epgan.modules.acoustic_model import SpeechGAN, cross_entropy
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.modules.priors import HistoryPrior
from lit_epgan.networks import ChunkGenerator, MLPDiscriminator, MLPGenerator, SRUDiscriminator
from lit_epgan.networks.speech_networks import SRUAcousticNetwork
from tests.federations import fit
from tests.notes import Notes
from tests.refusals import assert_refused
from tests.speech_gans import FRAMES, INPUTS, STATES, batch, speech_gan


class Recorder:
    def __init__(self, network):
        self.network, self.gradients = network, []
        self.zero_grad = network.zero_grad

    def step(self):
        self.gradients.append([p.grad.clone() for p in self.network.parameters() if p.grad is not None])


def test_cross_entropy_weighs_ten_times_the_gan_in_the_discriminator(monkeypatch):
    module = speech_gan(gan_weight=0.1)
    monkeypatch.setattr(module, "manual_backward", lambda loss: loss.backward())
    monkeypatch.setattr(module, "log", lambda *_, **__: None)
    acoustic, discriminator = Recorder(module.network), Recorder(module.discriminator)
    x, states = batch()
    module._acoustic_turn(acoustic, discriminator, Batch(x, states))
    features = module.discriminator.features(x)
    loss = cross_entropy(module.network(torch.cat([x, features], -1)), states)
    encoder = [p for name, p in module.discriminator.named_parameters() if not name.startswith("heads")]
    wanted = torch.autograd.grad(loss, [*module.network.parameters(), *encoder])
    split = len(list(module.network.parameters()))
    torch.testing.assert_close(acoustic.gradients[0], list(wanted[:split]))
    torch.testing.assert_close(discriminator.gradients[0], [10 * gradient for gradient in wanted[split:]])


class Watched(SpeechGAN):
    """Notes whose steps it takes, which are a sampler's, and what the discriminator counts."""

    took, counted = Notes(), Notes()

    def player(self, optimizer):
        first = optimizer.param_groups[0]["params"][0]
        return next(name.split(".")[0] for name, p in self.named_parameters() if p is first)

    def on_before_optimizer_step(self, optimizer):
        gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        super().on_before_optimizer_step(optimizer)
        noisy = any(not torch.equal(a, b) for a, b in zip(before, gradients, strict=True))
        self.took.append((self.player(optimizer), noisy))

    def _discriminator_loss(self, real, steps):
        self.counted.append(steps)
        return super()._discriminator_loss(real, steps)


def chunks_of_two_clients():
    x, states = batch(24, torch.float64)
    sets = [torch.utils.data.TensorDataset(x[i::2], states[i::2]) for i in range(2)]
    return FederatedDataModule.from_datasets(sets, batch_size=4, local_steps=3)


@pytest.mark.parametrize("sampled", [False, True])
def test_the_gan_first_then_the_recogniser_and_the_discriminator(sampled):
    """The sampler's noise is in the GAN's steps, and in the recogniser's if it is sampled; batches are counted once."""
    module = speech_gan(kind=Watched, noise=1.0, sample_acoustic=sampled)
    fit(module, chunks_of_two_clients(), rounds=1)
    iteration = [("discriminator", True), ("generator", True), ("network", sampled), ("discriminator", False)]
    assert (module.took, module.counted) == (iteration * 6, [0, 1, 2] * 2)


TILTED = {"features": "discriminator.bottleneck", "components": 2, "hidden": 4, "weight": 1.0}
BOTH = {"discriminator", "generator"}
LOSSES = {  # EP-GAN, appendix F.4.3
    "SRU w/ ProbGAN": (lambda: FedAvg(), set()),
    "SRU w/ EP-ProbGAN": (lambda: PriorOn(TiltedExpectationPropagation(**TILTED), sorted(BOTH)), BOTH),
    "SRU (EP) w/ EP-ProbGAN": (lambda: TiltedExpectationPropagation(**TILTED), {*BOTH, "network"}),
}


class Pulls(FederationCallback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [p.grad for p in optimizer.param_groups[0]["params"] if p.grad is not None]
        before = [gradient.clone() for gradient in gradients]
        super().on_before_optimizer_step(trainer, module, optimizer)
        if any(not torch.equal(a, b) for a, b in zip(before, gradients, strict=True)):
            pulled.add(module.player(optimizer))


pulled: set[str] = set()


@pytest.mark.parametrize("loss", LOSSES)
def test_whose_parameters_have_the_ep_prior(loss):
    algorithm, with_prior = LOSSES[loss]
    pulled.clear()
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(max_epochs=2, callbacks=[Pulls(algorithm())], accelerator="cpu", precision="64-true", **off)
    trainer.fit(speech_gan(kind=Watched, prior=HistoryPrior(size=2, every=2)), datamodule=chunks_of_two_clients())
    assert pulled == with_prior


def test_rows_of_the_others_weigh_in_the_gan_and_not_in_the_recogniser(monkeypatch):
    """Sites in function space add rows without states: they do not change what the recogniser learns."""
    gradients = []
    x, states = batch()
    others = torch.cat([x, torch.ones(3, FRAMES, INPUTS)]), torch.cat([states, torch.full((3, FRAMES), -100)])
    for rows in ((x, states), others):
        module = speech_gan()
        monkeypatch.setattr(module, "manual_backward", lambda loss: loss.backward())
        monkeypatch.setattr(module, "log", lambda *_, **__: None)
        acoustic = Recorder(module.network)
        module._acoustic_turn(acoustic, Recorder(module.discriminator), Batch(*rows))
        gradients += acoustic.gradients
    torch.testing.assert_close(*gradients)
    seen = []
    monkeypatch.setattr(module, "optimizers", lambda: (None, None, None))
    monkeypatch.setattr("lit_epgan.modules.acoustic_model.steps_taken", lambda _: 0)
    monkeypatch.setattr(module, "_discriminator_turn", lambda _, rows, steps: seen.append((rows.x, rows.weight)))
    monkeypatch.setattr(module, "_generator_turn", lambda *_: None)
    monkeypatch.setattr(module, "_acoustic_turn", lambda *_: None)
    weight = torch.full((9,), 1 / 9)
    module.training_step((*others, weight), 0)
    module.training_step((x, states), 0)
    assert seen[0][0] is others[0]
    assert seen[0][1] is weight
    assert seen[1][1] is None


def batches_of_the_second_round(sets, sites, kind=SpeechGAN):
    """Batches once there are sites: 8 own rows with states, 4 of the other without; and the sign of the own."""
    seen = []

    class Watching(kind):
        def training_step(self, batch, batch_idx):
            seen.append((self.current_epoch, batch))
            super().training_step(batch, batch_idx)

    data = FederatedDataModule.from_datasets(sets, batch_size=8)
    fit(speech_gan(kind=Watching), data, rounds=2, algorithm=sites, precision="32-true")
    later = [batch for round_, batch in seen if round_ == 1]
    assert len(later) == 8
    for k, (x, states, weight) in enumerate(later):
        assert (states[:8] >= 0).all()
        assert (states[8:] == -100).all()
        assert len(x) == len(states) == len(weight) == 12
        yield x, -1 if k < 4 else 1


def test_generator_sites_of_chunks():
    """Chunks lie around -8 or 8: batches are own ones with states, and samples of the other site without."""

    class Averaging(SpeechGAN):
        """Its generator gives the mean of the last batch."""

        @torch.no_grad()
        def _generator_turn(self, optimizer, discriminator_optimizer, real):
            *_, weight, bias = self.generator.parameters()
            weight.zero_()
            bias.copy_(real.x.mean(0).flatten())

    sets = [torch.utils.data.TensorDataset(batch(32)[0] + shift, batch(32)[1]) for shift in (-8, 8)]
    sites = GeneratorSites("generator", own_rows=8, other_rows=4, pool=50)
    for x, sign in batches_of_the_second_round(sets, sites, Averaging):
        assert (x[:8].mean((1, 2)) * sign > 6).all()
        assert (x[8:].mean((1, 2)) * sign < -6).all()


def test_embedding_sites_of_chunks():
    """Chunks of stacked frames around -1 or 1: herded ones look like the other client's, and are stacked."""
    frames = 0.3 * torch.randn(2, 32, FRAMES + INPUTS - 1, generator=torch.Generator().manual_seed(2))
    chunks = [(own + sign).unfold(1, INPUTS, 1) for own, sign in zip(frames, (-1, 1), strict=True)]
    sets = [torch.utils.data.TensorDataset(own, torch.zeros(32, FRAMES).long()) for own in chunks]
    release = {"stacked": INPUTS, "frequencies": 128, "points": 20, "herding_steps": 60, "dimensions": 4}
    for x, sign in batches_of_the_second_round(sets, EmbeddingSites(own_rows=8, other_rows=4, **release)):
        assert (x[:8].mean((1, 2)) * sign > 0.5).all()
        assert float(x[8:].mean()) * sign < -0.5
        torch.testing.assert_close(x[8:, 1:, :-1], x[8:, :-1, 1:])  # row t: frames t, ..., t + 4


def test_a_federation_trains_all_three_networks_and_the_recogniser_learns():
    x, states = batch(96, torch.float64)
    sets = [torch.utils.data.TensorDataset(x[i::2], states[i::2]) for i in range(2)]
    data = FederatedDataModule.from_datasets(sets, batch_size=16, local_epochs=6)
    module = speech_gan(lr=1e-3, lr_acoustic=1e-2, prior=HistoryPrior(size=2, every=5), noise=1e-3, lr_decay=0.5)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    fit(module, data, rounds=6)
    same = [name for name, p in module.named_parameters() if torch.equal(p.double(), before[name].double())]
    assert {name.split(".")[0] for name in before if name not in same} >= {"network", "generator", "discriminator"}
    module.eval()
    with torch.no_grad():
        assert (module(x).argmax(-1) == states).float().mean() > 0.9


def test_what_is_evaluated_does_not_depend_on_later_frames():
    module = speech_gan().eval()
    x, _ = batch()
    posteriors = module(x)
    later = x.clone()
    later[:, 3:] += 1
    torch.testing.assert_close(module(later)[:, :3], posteriors[:, :3])
    assert posteriors.shape == (6, FRAMES, STATES)


def test_data_of_another_shape_or_with_other_states_and_what_cannot_be_are_refused():
    module = speech_gan()
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(shape=(FRAMES, INPUTS), pdfs=STATES))
    module.on_fit_start()
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(shape=(FRAMES, INPUTS + 1), pdfs=STATES))
    assert_refused(r"shape|samples", module.on_fit_start)
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(shape=(FRAMES, INPUTS), pdfs=STATES + 1))
    assert_refused("3 HMM states", module.on_fit_start)
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(shape=(FRAMES, INPUTS), inputs=INPUTS))
    module.on_fit_start()
    module.trainer = SimpleNamespace(datamodule=SimpleNamespace(shape=(FRAMES, INPUTS), inputs=INPUTS + 1))
    assert_refused(r"6 columns and 3 of features beside it, the network takes 8: .* to 9", module.on_fit_start)
    assert_refused("gan_weight", speech_gan, gan_weight=0.0)
    assert_refused("has no features", SpeechGAN, SRUAcousticNetwork(), MLPGenerator((4, 5)), MLPDiscriminator((4, 5)))
    assert_refused("bottleneck", SRUDiscriminator, bottleneck=0)


def test_a_drawn_chunk_is_cut_from_a_spectrogram():
    """Each row is the row before moved on by a frame, as ``with_future`` cuts real chunks."""
    torch.manual_seed(0)
    generator = ChunkGenerator(frames=4, bins=3, stacked=2, latent_dim=2, hidden=(8,), members=2)
    noise = torch.randn(6, 2)
    chunks = generator(noise)
    assert chunks.shape == (6, *generator.data_shape)
    spectrogram = generator.spectrogram(noise)
    for t in range(4):
        assert torch.equal(chunks[:, t], spectrogram[:, t : t + 2].flatten(1))
    assert_refused("stacked", ChunkGenerator, stacked=0)
