"""The conditional variational autoencoder: its bound against closed forms, and its decoder as a client's site."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal, kl_divergence
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.errors import UserError
from lit_epgan.federated import DistilledSites, EmbeddingSites, GeneratorSites
from lit_epgan.modules import CVAE
from lit_epgan.modules.conditional import divergence
from lit_epgan.modules.manual_optimization import Batch
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import RecordNoise
from tests import federations
from tests.gans import fit
from tests.refusals import assert_refused
from tests.test_generator_sites import Draw

LABELS, CODE = 3, 2
CENTRES = torch.tensor([-0.8, 0.0, 0.8])


def cvae(heads: int = 2 * CODE, members: int = 1, encoder_of: int = 1, **options: Any) -> CVAE:
    torch.manual_seed(0)
    encoder = MLPDiscriminator(data_shape=[encoder_of], hidden=[16], heads=heads)
    generator = MLPGenerator(data_shape=[1], latent_dim=CODE + LABELS, hidden=[16], tanh=False, members=members)
    return CVAE(encoder, generator, **({"labels": LABELS, "variance": 0.01, "lr": 1e-2} | options))


def rows_of_labels(labels: Tensor, seed: int = 1) -> Tensor:
    """Points (n, 1) about their labels' centres."""
    noise = torch.randn(len(labels), 1, generator=torch.Generator().manual_seed(seed))
    return CENTRES[labels][:, None] + 0.05 * noise


def test_the_divergence_is_that_of_torch():
    mean, log_variance = torch.randn(5, 4).double(), torch.randn(5, 4).double()
    expected = kl_divergence(Normal(mean, (log_variance / 2).exp()), Normal(0.0, 1.0)).sum(1)
    torch.testing.assert_close(divergence(mean, log_variance), expected)


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


def test_the_bound_is_the_likelihood_where_the_posterior_is_exact_and_above_it_elsewhere():
    model, likelihood = linear()
    x = torch.tensor([[0.5, -1.0, 2.0]]).double()
    rows = Batch(x.expand(200_000, 3), torch.ones(200_000, dtype=torch.int64))
    constant = 1.5 * math.log(2 * math.pi * 0.3)
    exact = -float(likelihood.log_prob(x))
    assert float(model.bound(rows).mean()) + constant == pytest.approx(exact, abs=0.01)
    model.of_label.weight.data[1] += 0.5
    assert float(model.bound(rows).mean()) + constant > exact + 0.1


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


def test_every_label_learns_its_own_data(tmp_path):
    model = cvae()
    labels = torch.randint(LABELS, (300, 32), generator=torch.Generator().manual_seed(2))
    fit(model, [(rows_of_labels(y, k), y) for k, y in enumerate(labels)], tmp_path)
    samples, drawn = model.sample_labelled(900, torch.Generator().manual_seed(1))
    for label, centre in enumerate(CENTRES):
        assert abs(float(samples[drawn == label].mean() - centre)) < 0.1
    shares = torch.bincount(labels.flatten(), minlength=LABELS) / labels.numel()
    torch.testing.assert_close(model.label_shares, shares)


def one_label_each(sizes: tuple[int, ...] = (60, 120, 180), **options: Any) -> FederatedDataModule:
    labels = [torch.full((n,), k) for k, n in enumerate(sizes)]
    sets = [TensorDataset(rows_of_labels(y).double(), y) for y in labels]
    return FederatedDataModule.from_datasets(sets, batch_size=16, **options)


def test_a_server_learns_from_decoders_of_clients_that_share_no_label():
    """FedCVAE: the union has each decoder's own label in proportion to its client's records; so has the server."""
    model, draw = cvae().double(), Draw(60)
    sites = DistilledSites("generator", pool=400, server_steps=300)
    federations.fit(model, one_label_each(local_steps=150), rounds=2, algorithm=sites, callbacks=[draw])
    near = (draw.union[0] - CENTRES).abs().argmin(1)
    assert near.bincount().tolist() == [10, 20, 30]
    samples, drawn = model.sample_labelled(900, torch.Generator().manual_seed(1))
    for label, centre in enumerate(CENTRES):
        assert abs(float(samples[drawn == label].mean() - centre)) < 0.1
    torch.testing.assert_close(model.label_shares, torch.tensor([1, 2, 3]).double() / 6, atol=0.03, rtol=0)


def test_rounds_go_on_with_the_others_samples(monkeypatch):
    """Alone in the first round; then a batch has its client's label and the labels of the others' samples."""
    model, labels = cvae().double(), list[set[int]]()
    see = model.see_labels

    def watched(rows: Any, steps: int) -> None:
        labels.append(set(rows.labels.tolist()))
        see(rows, steps)

    monkeypatch.setattr(model, "see_labels", watched)
    federations.fit(model, one_label_each(local_steps=5), rounds=2, algorithm=GeneratorSites("generator", pool=40))
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
    assert_refused(message, fit, model, [batch], tmp_path)


@pytest.mark.parametrize("records", [torch.zeros(4, 3), torch.zeros(4, 1, 1)])
def test_records_of_another_shape_than_the_decoders_are_refused(records):
    """The data module does not say its shape; the difference would be broadcast."""
    assert_refused("shape", cvae(encoder_of=records[0].numel()).bound, Batch(records, torch.zeros(4, dtype=torch.long)))


def test_labels_of_a_later_client_are_looked_at():
    labels = [torch.full((20,), k) for k in (0, LABELS)]
    sets = [TensorDataset(rows_of_labels(y.clamp_max(LABELS - 1)).double(), y) for y in labels]
    module = FederatedDataModule.from_datasets(sets, batch_size=16, local_steps=2)
    assert_refused(f"between {LABELS} and {LABELS}", federations.fit, cvae().double(), module, rounds=1)


def test_a_decoder_that_does_not_say_its_dimension_is_told():
    assert CVAE(nn.Linear(1, 4), nn.Linear(5, 1), labels=3, latent_dim=5).latent_dim == 5


def test_the_fit_starts_without_new_statistics(tmp_path):
    """A resumed run's would be those of another moment."""
    normed = MLPGenerator([1], 5, [8], norm="batch")
    model = CVAE(MLPDiscriminator([1], [8], heads=4), normed, labels=3)
    stream = torch.get_rng_state()
    before = [buffer.clone() for buffer in normed.buffers()]
    fit(model, [], tmp_path)
    assert all(map(torch.equal, before, normed.buffers()))
    assert torch.equal(torch.get_rng_state(), stream)


def test_what_looks_at_labels_elsewhere_is_refused(tmp_path, monkeypatch):
    """Embedding sites' points have no labels; under record noise the buffer of label shares would tell of records."""
    monkeypatch.chdir(tmp_path)  # where the private run's ledger is written
    sites = EmbeddingSites(points=20, herding_steps=2)
    assert_refused("labels", federations.fit, cvae().double(), one_label_each(local_steps=2), rounds=2, algorithm=sites)
    with pytest.raises(UserError, match="cannot be taken record by record"):
        federations.fit(cvae().double(), one_label_each(local_steps=2), rounds=1, mechanism=RecordNoise(1.0, 1.0))
