"""The conditional GAN and the conditional variational autoencoder: every label by itself, in a federation, too."""

import math

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import DistilledSites, EmbeddingSites, FedAvg, FedAvgGAN, FedAvgM, GeneratorSites
from lit_epgan.lib.errors import UserError
from lit_epgan.modules import CVAE
from lit_epgan.modules.conditional import ConditionalGAN, divergence
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import RecordNoise
from tests import federations
from tests.gans import Batches, Record
from tests.gans import fit as fit_gan
from tests.notes import Notes
from tests.refusals import assert_refused
from tests.test_generator_sites import Draw

LABELS, NOISE = 3, 4


class Told(nn.Module):
    latent_dim = NOISE + LABELS

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, noise: Tensor) -> Tensor:
        labels = noise[:, -LABELS:].argmax(1, keepdim=True).to(noise)
        return labels + 0.01 * noise[:, :1].tanh() + self.shift


def networks(labels: int = LABELS) -> tuple[MLPGenerator, MLPDiscriminator]:
    torch.manual_seed(0)
    generator = MLPGenerator(data_shape=[1], latent_dim=NOISE + LABELS, hidden=[8])
    return generator, MLPDiscriminator(data_shape=[1], hidden=[8], heads=labels)


def conditional(**options) -> ConditionalGAN:
    return ConditionalGAN(*networks(), labels=LABELS, **options)


def one_label_each(sizes: tuple[int, ...]) -> list[TensorDataset]:
    return [TensorDataset(torch.full((n, 1), float(k)), torch.full((n,), k)) for k, n in enumerate(sizes)]


def federation(sizes: tuple[int, ...] = (8, 16, 24), **options) -> FederatedDataModule:
    return FederatedDataModule.from_datasets(one_label_each(sizes), batch_size=8, **options)


@pytest.mark.parametrize("objective", ["wgan-gp", "lsgan", "non-saturating"])
def test_rows_of_one_label_meet_a_plain_discriminator_of_that_label(objective):
    """With every row of label 1 the loss and its gradient are those of a GAN that has head 1 alone."""
    module = conditional(objective=objective, r1=0.5)
    plain = GAN(networks()[0], networks(1)[1], objective=objective, r1=0.5)
    last, own = (list(m.discriminator.parameters())[-2:] for m in (plain, module))
    state = dict(zip(plain.discriminator.state_dict(), module.discriminator.state_dict().values(), strict=True))
    plain.discriminator.load_state_dict({n: v[1:2] if len(v) == LABELS else v for n, v in state.items()})
    rows = Batch(torch.randn(6, 1), torch.ones(6, dtype=torch.int64))
    fake = Batch(torch.randn(6, 1), rows.labels)
    found = []
    for each in (module, plain):
        each._generated = lambda _: fake
        torch.manual_seed(3)  # of the gradient penalty's mixtures
        loss = each._discriminator_loss(rows, steps=0) + each._discriminator_loss(rows, steps=1)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in list(each.discriminator.parameters())[:-2])])
    torch.testing.assert_close(*found)
    for theirs, ours in zip(last, own, strict=True):
        torch.testing.assert_close(ours.grad[1:2], theirs.grad)
        assert not ours.grad[[0, 2]].any()


def test_a_steps_samples_have_the_batchs_labels_and_shares_are_their_mean(tmp_path):
    module = ConditionalGAN(Told(), networks()[1], labels=LABELS, generated=4000)
    weight = torch.tensor([0.1, 0.2, 0.7])
    fake = module._generated(Batch(torch.zeros(3, 1), torch.tensor([0, 2, 2]), weight))
    assert torch.equal(fake.x.detach().round().flatten().long(), fake.labels)
    shares = torch.bincount(fake.labels, minlength=LABELS) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.9]), atol=0.02, rtol=0)
    module = conditional()
    module.label_shares.copy_(torch.tensor([9.0, 9.0, 9.0]))  # of before
    weighted = (torch.zeros(2, 1), torch.tensor([2, 1]), torch.tensor([0.9, 0.1]))
    batches = [(torch.zeros(4, 1), torch.tensor([0, 0, 1, 1])), weighted]
    fit_gan(module, batches, tmp_path)
    torch.testing.assert_close(module.label_shares, torch.tensor([0.25, 0.3, 0.45]))


def test_samples_have_labels_in_proportion_and_say_them():
    module = ConditionalGAN(Told(), networks()[1], labels=LABELS)
    assert module.sample_labelled(3000, torch.Generator().manual_seed(1))[1].bincount().min() > 900  # untrained
    module.label_shares.copy_(torch.tensor([0.5, 0.0, 0.5]))
    samples, labels = module.sample_labelled(3000, torch.Generator().manual_seed(1))
    assert torch.equal(samples.round().flatten().long(), labels)
    assert torch.equal(samples, module.sample(3000, torch.Generator().manual_seed(1)))
    counts = labels.bincount(minlength=LABELS)
    assert counts[1] == 0
    assert abs(int(counts[0]) - 1500) < 4 * 750**0.5


def test_every_label_learns_its_own_data(tmp_path):
    module = conditional(lr=1e-2, objective="lsgan", r1=0.5)
    centres = torch.tensor([-0.8, 0.0, 0.8])
    torch.manual_seed(1)
    labels = torch.randint(LABELS, (400, 32))
    batches = [((centres[y] + 0.05 * torch.randn(32))[:, None], y) for y in labels]
    fit_gan(module, batches, tmp_path, Record(seed=2))
    samples, drawn = module.sample_labelled(900, torch.Generator().manual_seed(1))
    for label, centre in enumerate(centres):
        assert abs(float(samples[drawn == label].mean() - centre)) < 0.15


def test_the_servers_samples_have_the_labels_of_all_records():
    """One label a client: under local epochs a client of twice the records takes twice the steps, too."""
    module = conditional().double()
    federations.fit(module, federation(), rounds=2, algorithm=FedAvg())
    torch.testing.assert_close(module.label_shares, torch.tensor([1, 2, 3]).to(module.label_shares) / 6)


class Seeing(ConditionalGAN):
    seen = Notes()

    def training_step(self, batch, batch_idx: int) -> None:
        progress = next(c for c in self.trainer.callbacks if isinstance(c, FederationCallback)).progress
        self.seen.append((progress.round, int(progress.client[-1:] or -1), Batch(*batch)))
        super().training_step(batch, batch_idx)


@pytest.mark.parametrize("refine", [0.0, 0.5])
def test_samples_of_the_others_sites_keep_their_labels(refine):
    module = Seeing(Told(), networks()[1], labels=LABELS, lr=1e-6).double()
    sites = GeneratorSites(own_rows=3, pool=40, refine=refine)
    federations.fit(module, federation(local_steps=20), rounds=3, algorithm=sites)
    tilted = [(k, rows) for round_, k, rows in module.seen if round_ > 0 and rows.weight is not None]
    assert tilted
    for k, rows in tilted:
        assert torch.equal(rows.x.round().flatten().long(), rows.labels)
        assert (rows.labels[:3] == k).all()
        assert (rows.labels[3:] != k).all()
    torch.testing.assert_close(
        module.label_shares, torch.tensor([1, 2, 3]).to(module.label_shares) / 6, atol=0.03, rtol=0
    )


def test_the_union_has_each_sites_own_label():
    """Drawing it leaves the module's own shares as they were, which ``Draw`` looks at."""
    module, draw = ConditionalGAN(Told(), networks()[1], labels=LABELS, lr=1e-6).double(), Draw(60)
    sites = GeneratorSites(own_rows=3, pool=40)
    federations.fit(module, federation(local_steps=5), rounds=2, algorithm=sites, callbacks=[draw])
    for union in draw.found:
        assert union.round().flatten().long().bincount().tolist() == [10, 20, 30]


@pytest.mark.parametrize("around", [lambda sites: sites, lambda sites: FedAvgM(inner=sites)], ids=["alone", "inside"])
def test_the_labels_of_the_unions_samples_are_known(around):
    labelled = []

    class Look(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
            labelled.append((callback.extra_labelled_samples(60), callback.extra_samples(60)))

    module = ConditionalGAN(Told(), networks()[1], labels=LABELS, lr=1e-6).double()
    algorithm = around(GeneratorSites(own_rows=3, pool=40))
    federations.fit(module, federation(local_steps=5), rounds=2, algorithm=algorithm, callbacks=[Look()])
    for sets, plain in labelled:
        x, y = sets["union"]
        assert torch.equal(x, plain["union"])
        assert torch.equal(x.round().flatten().long(), y)


def test_distilled_sites_train_the_server_by_label():
    module = Seeing(Told(), networks()[1], labels=LABELS, lr=1e-6).double()
    sites = DistilledSites(pool=40, server_steps=10, batch_size=32)
    federations.fit(module, federation(local_steps=5), rounds=2, algorithm=sites)
    rows = [rows for round_, _, rows in module.seen if round_ == 1 and len(rows.x) == 32]
    assert len(rows) == 10
    for x, labels, _ in rows:
        assert torch.equal(x.round().flatten().long(), labels)
    assert {int(label) for each in rows for label in each.labels} == {0, 1, 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": 1}, "labels are 1"),
        ({"labels": NOISE + LABELS}, "holds noise and label"),
        ({"labels": LABELS, "prior": HistoryPrior()}, "HistoryPrior asks the discriminator"),
    ],
)
def test_what_cannot_be_conditional(options, message):
    assert_refused(message, ConditionalGAN, *networks(), **options)
    ConditionalGAN(*networks(), labels=LABELS, prior=GaussianPrior())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.zeros(4, 1), "needs batches"),
        ((torch.zeros(4, 1), torch.zeros(4)), "needs batches"),
        ((torch.zeros(4, 1), torch.tensor([0, 1, 2, 3])), "between 0 and 3"),
        ((torch.zeros(4, 1), torch.tensor([0, 1, 2, -100])), "have none"),
    ],
)
def test_data_without_the_models_labels(batch, message, tmp_path):
    assert_refused(message, fit_gan, conditional(), Batches([batch]).batches, tmp_path)


def test_labels_and_scores_that_do_not_fit(tmp_path):
    sets = [TensorDataset(torch.zeros(20, 1).double(), torch.full((20,), k)) for k in (0, LABELS)]
    module = FederatedDataModule.from_datasets(sets, batch_size=16, local_steps=2)
    assert_refused(f"between {LABELS} and {LABELS}", federations.fit, conditional(), module, rounds=1)
    module = ConditionalGAN(*networks(2), labels=LABELS)
    assert_refused("heads 3", fit_gan, module, [(torch.zeros(4, 1), torch.tensor([0, 1, 2, 0]))], tmp_path)
    for algorithm in (FedAvgGAN(), EmbeddingSites(points=20, herding_steps=2)):
        assert_refused(
            "labels", federations.fit, conditional().double(), federation(local_steps=2), 2, algorithm=algorithm
        )


CODE = 2
CENTRES = torch.tensor([-0.8, 0.0, 0.8])


def cvae(heads: int = 2 * CODE, members: int = 1, encoder_of: int = 1, **options) -> CVAE:
    torch.manual_seed(0)
    encoder = MLPDiscriminator(data_shape=[encoder_of], hidden=[16], heads=heads)
    generator = MLPGenerator(data_shape=[1], latent_dim=CODE + LABELS, hidden=[16], tanh=False, members=members)
    return CVAE(encoder, generator, **({"labels": LABELS, "variance": 0.01, "lr": 1e-2} | options))


def rows_of_labels(labels: Tensor, seed: int = 1) -> Tensor:
    """Points (n, 1) about their labels' centres."""
    noise = torch.randn(len(labels), 1, generator=torch.Generator().manual_seed(seed))
    return CENTRES[labels][:, None] + 0.05 * noise


def test_the_divergence_and_the_bound_are_exact():
    mean, log_variance = torch.randn(5, 4).double(), torch.randn(5, 4).double()
    expected = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(divergence(mean, log_variance), expected)
    model, likelihood = linear()
    x = torch.tensor([[0.5, -1.0, 2.0]]).double()
    rows = Batch(x.expand(200_000, 3), torch.ones(200_000, dtype=torch.int64))
    constant = 1.5 * math.log(2 * math.pi * 0.3)
    exact = -float(likelihood.log_prob(x))
    assert float(model.bound(rows).mean()) + constant == pytest.approx(exact, abs=0.01)
    model.of_label.weight.data[1] += 0.5
    assert float(model.bound(rows).mean()) + constant > exact + 0.1


def linear() -> tuple[CVAE, MultivariateNormal]:
    """A linear decoder with orthogonal columns, the encoder that has its exact posterior, and p(x | y = 1).

    x = W z + b + c_y + N(0, s I); so p(x | y) = N(b + c_y, W W' + s I), and the posterior of z is diagonal: with
    a_j = |w_j|^2 / s its variance is 1 / (1 + a_j), its mean w_j'(x - b - c_y) / s / (1 + a_j).
    """
    s = 0.3
    decoder, encoder = nn.Linear(CODE + LABELS, 3).double(), nn.Linear(3, 2 * CODE).double()
    decoder.latent_dim = CODE + LABELS
    model = CVAE(encoder, decoder, LABELS, variance=s).double()
    w = torch.tensor([[1.0, 0.0], [0.0, 0.5], [1.0, 0.0]]).double()
    decoder.weight.data[:, :CODE] = w
    variance = 1 / (1 + w.square().sum(0) / s)
    slope = variance[:, None] * w.T / s
    encoder.weight.data = torch.cat([slope, torch.zeros(CODE, 3)])
    encoder.bias.data = torch.cat([-slope @ decoder.bias.data, variance.log()])
    shift = decoder.weight.data[:, CODE:]
    model.of_label.weight.data[:, :CODE] = -(slope @ shift).T
    centre = (decoder.bias + shift[:, 1]).detach()
    return model, MultivariateNormal(centre, w @ w.T + s * torch.eye(3).double())


def test_a_label_moves_the_code_as_a_one_hot_entry_beside_the_last_layers_input():
    model = cvae()
    nn.init.normal_(model.of_label.weight)
    x, labels = torch.randn(4, 1), torch.tensor([2, 0, 1, 2])
    *below, last = model.encoder.layers
    told = torch.cat([nn.Sequential(*below)(x), F.one_hot(labels, LABELS)], 1)
    expected = F.linear(told, torch.cat([last.weight, model.of_label.weight.T], 1), last.bias)
    torch.testing.assert_close(torch.cat(model._code(Batch(x, labels)), 1), expected)


def test_a_step_takes_the_weighted_mean_of_the_rows(tmp_path):
    model, labels = cvae(), torch.tensor([0, 2, 1])
    weight = torch.tensor([0.5, 0.5, 0.0])
    losses = []
    model.see_labels = lambda rows, steps: None
    model.optimizers = lambda: torch.optim.Adam(model.parameters())
    for last in (3.0, -7.0):
        torch.manual_seed(4)
        losses.append(float(model.training_step((torch.tensor([[1.0], [2.0], [last]]), labels, weight), 0)))
    assert losses[0] == losses[1]
    torch.manual_seed(4)
    each = model.bound(Batch(torch.tensor([[1.0], [2.0], [3.0]]), labels))
    assert losses[0] == pytest.approx(float(each[:2].mean()))


def test_every_label_of_the_decoder_learns_its_own_data(tmp_path):
    model = cvae(lr=2e-2)
    labels = torch.randint(LABELS, (150, 32), generator=torch.Generator().manual_seed(2))
    fit_gan(model, [(rows_of_labels(y, k), y) for k, y in enumerate(labels)], tmp_path)
    samples, drawn = model.sample_labelled(900, torch.Generator().manual_seed(1))
    for label, centre in enumerate(CENTRES):
        assert abs(float(samples[drawn == label].mean() - centre)) < 0.1
    shares = torch.bincount(labels.flatten(), minlength=LABELS) / labels.numel()
    torch.testing.assert_close(model.label_shares, shares)


def labelled_rows(sizes: tuple[int, ...] = (60, 120, 180), **options) -> FederatedDataModule:
    labels = [torch.full((n,), k) for k, n in enumerate(sizes)]
    sets = [TensorDataset(rows_of_labels(y).double(), y) for y in labels]
    return FederatedDataModule.from_datasets(sets, batch_size=16, **options)


def test_a_server_learns_from_decoders_of_clients_that_share_no_label():
    """FedCVAE: the union has each decoder's own label in proportion to its client's records; so has the server."""
    model, draw = cvae().double(), Draw(60)
    sites = DistilledSites("generator", pool=400, server_steps=300)
    federations.fit(model, labelled_rows(local_steps=150), rounds=2, algorithm=sites, callbacks=[draw])
    near = (draw.found[0] - CENTRES).abs().argmin(1)
    assert near.bincount().tolist() == [10, 20, 30]
    samples, drawn = model.sample_labelled(900, torch.Generator().manual_seed(1))
    for label, centre in enumerate(CENTRES):
        assert abs(float(samples[drawn == label].mean() - centre)) < 0.1
    torch.testing.assert_close(model.label_shares, torch.tensor([1, 2, 3]).double() / 6, atol=0.03, rtol=0)


def test_rounds_go_on_with_the_others_samples(monkeypatch):
    """Alone in the first round; then a batch has its client's label and the labels of the others' samples."""
    model, labels = cvae().double(), list[set[int]]()
    see = model.see_labels

    def watched(rows, steps: int) -> None:
        labels.append(set(rows.labels.tolist()))
        see(rows, steps)

    monkeypatch.setattr(model, "see_labels", watched)
    federations.fit(model, labelled_rows(local_steps=5), rounds=2, algorithm=GeneratorSites("generator", pool=40))
    first, then = labels[: len(labels) // 2], labels[len(labels) // 2 :]
    assert len(first) == len(then) == 15
    assert all(len(each) == 1 for each in first)
    assert all(len(each) > 1 for each in then)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variance": 0.0}, "variance is 0.0"),
        ({"lr": math.inf}, "lr is inf"),
        ({"labels": 1}, "labels are 1"),
        ({"members": 2}, "members=2"),
    ],
)
def test_what_cannot_be(options, message):
    assert_refused(message, cvae, **options)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (cvae(), torch.zeros(4, 1), r"CVAE needs batches \(x, labels\)"),
        (cvae(), (torch.zeros(4, 1), torch.tensor([0, 1, 2, 3])), "between 0 and 3"),
        (cvae(heads=3), (torch.zeros(4, 1), torch.tensor([0, 1, 2, 0])), "heads 4"),
    ],
)
def test_data_or_an_encoder_that_do_not_fit(model, batch, message, tmp_path):
    assert_refused(message, fit_gan, model, [batch], tmp_path)


def test_labels_of_a_later_client_and_shapes_are_looked_at():
    labels = [torch.full((20,), k) for k in (0, LABELS)]
    sets = [TensorDataset(rows_of_labels(y.clamp_max(LABELS - 1)).double(), y) for y in labels]
    module = FederatedDataModule.from_datasets(sets, batch_size=16, local_steps=2)
    assert_refused(f"between {LABELS} and {LABELS}", federations.fit, cvae().double(), module, rounds=1)
    # the data module does not say its shape; the difference would be broadcast
    for records in (torch.zeros(4, 3), torch.zeros(4, 1, 1)):
        model = cvae(encoder_of=records[0].numel())
        assert_refused("shape", model.bound, Batch(records, torch.zeros(4, dtype=torch.long)))


def test_the_fit_starts_without_new_statistics(tmp_path):
    """A resumed run's would be those of another moment."""
    normed = MLPGenerator([1], 5, [8], norm="batch")
    model = CVAE(MLPDiscriminator([1], [8], heads=4), normed, labels=3)
    stream = torch.get_rng_state()
    before = [buffer.clone() for buffer in normed.buffers()]
    fit_gan(model, [], tmp_path)
    assert all(map(torch.equal, before, normed.buffers()))
    assert torch.equal(torch.get_rng_state(), stream)
    assert CVAE(nn.Linear(1, 4), nn.Linear(5, 1), labels=3, latent_dim=5).latent_dim == 5


def test_what_looks_at_labels_elsewhere_is_refused(folder):
    """Embedding sites' points have no labels; under record noise the buffer of label shares would tell of records."""
    sites = EmbeddingSites(points=20, herding_steps=2)
    assert_refused("labels", federations.fit, cvae().double(), labelled_rows(local_steps=2), rounds=2, algorithm=sites)
    with pytest.raises(UserError, match="cannot be taken record by record"):
        federations.fit(cvae().double(), labelled_rows(local_steps=2), rounds=1, mechanism=RecordNoise(1.0, 1.0))
