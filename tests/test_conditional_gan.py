"""The conditional GAN: each row is judged by its own label's score, and labels keep their shares in a federation."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.errors import UserError
from lit_epgan.federated import EmbeddingSites, FedAvg, FedAvgGAN, GeneratorSites
from lit_epgan.federated.function_space.distilled_sites import DistilledSites
from lit_epgan.modules.conditional import ConditionalGAN
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
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


def conditional(**options: Any) -> ConditionalGAN:
    return ConditionalGAN(*networks(), labels=LABELS, **options)


def one_label_each(sizes: tuple[int, ...]) -> list[TensorDataset]:
    return [TensorDataset(torch.full((n, 1), float(k)), torch.full((n,), k)) for k, n in enumerate(sizes)]


def federation(sizes: tuple[int, ...] = (8, 16, 24), **options: Any) -> FederatedDataModule:
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


def test_a_steps_samples_have_the_batchs_labels_by_weight():
    module = ConditionalGAN(Told(), networks()[1], labels=LABELS, generated=4000)
    weight = torch.tensor([0.1, 0.2, 0.7])
    fake = module._generated(Batch(torch.zeros(3, 1), torch.tensor([0, 2, 2]), weight))
    assert torch.equal(fake.x.detach().round().flatten().long(), fake.labels)
    shares = torch.bincount(fake.labels, minlength=LABELS) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.9]), atol=0.02, rtol=0)


def test_shares_are_the_mean_over_batches_and_begin_anew_with_the_optimizer(tmp_path):
    module = conditional()
    module.label_shares.copy_(torch.tensor([9.0, 9.0, 9.0]))  # of before
    batches = [
        (torch.zeros(4, 1), torch.tensor([0, 0, 1, 1])),
        (torch.zeros(2, 1), torch.tensor([2, 1]), torch.tensor([0.9, 0.1])),
    ]
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

    def training_step(self, batch: Any, batch_idx: int) -> None:
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
    for union in draw.union:
        assert union.round().flatten().long().bincount().tolist() == [10, 20, 30]


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


def test_labels_of_a_later_client_are_looked_at():
    sets = [TensorDataset(torch.zeros(20, 1).double(), torch.full((20,), k)) for k in (0, LABELS)]
    module = FederatedDataModule.from_datasets(sets, batch_size=16, local_steps=2)
    assert_refused(f"between {LABELS} and {LABELS}", federations.fit, conditional(), module, rounds=1)


def test_a_discriminator_with_another_number_of_scores(tmp_path):
    module = ConditionalGAN(*networks(2), labels=LABELS)
    assert_refused("heads 3", fit_gan, module, [(torch.zeros(4, 1), torch.tensor([0, 1, 2, 0]))], tmp_path)


@pytest.mark.parametrize("algorithm", [FedAvgGAN(), EmbeddingSites(points=20, herding_steps=2)])
def test_algorithms_whose_rows_have_no_labels_say_so(algorithm):
    with pytest.raises(UserError, match="labels"):
        federations.fit(conditional().double(), federation(local_steps=2), rounds=2, algorithm=algorithm)
