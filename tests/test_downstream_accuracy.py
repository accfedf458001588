"""A classifier trained on labelled samples, tested on real images, beside one of the clients' own images."""

import pytest
import torch
from lightning.pytorch import Callback

from lit_epgan.callbacks import DownstreamAccuracy, FederationCallback
from lit_epgan.datamodules import FederatedDataModule, ImageDataModule
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.randomness import generator_for
from lit_epgan.metrics.image_classifiers import DigitsClassifier
from lit_epgan.modules import GAN, ConditionalGAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.federations import plain_trainer


class Given(ConditionalGAN):
    """Its labelled samples are what it is given."""

    def sample_labelled(self, n, generator=None):
        self.asked = n
        return self.given[0][:n], self.given[1][:n]


@pytest.fixture(scope="module")
def data():
    module = ImageDataModule(partition="iid", clients=3, batch_size=16, local_steps=1)
    module.setup("fit")
    return module


def own_images(data):
    rows = [
        torch.cat(column)
        for column in zip(*(own.fetch(list(range(len(own)))) for own in data.data.train.values()), strict=True)
    ]
    order = torch.randperm(len(rows[1]), generator=generator_for("downstream accuracy", "real"))
    return rows[0][order], rows[1][order]


def given_model(given):
    generator = MLPGenerator(data_shape=[1, 8, 8], latent_dim=12, hidden=[4])
    model = Given(generator, MLPDiscriminator(data_shape=[1, 8, 8], hidden=[4], heads=10), labels=10)
    model.given = given
    return model


def scores(data, given, **options):
    model = given_model(given)
    trainer = plain_trainer(max_epochs=1, callbacks=[FederationCallback(), DownstreamAccuracy(**options)])
    trainer.fit(model, data)
    found = trainer.callback_metrics
    return model.asked, float(found["downstream_digits"]), float(found["downstream_real_digits"])


class Offers(Callback):
    """Labelled samples beside the module's, as the federation of generator sites does."""

    def __init__(self, given):
        self.given = given

    def extra_labelled_samples(self, n):
        return {"union": (self.given[0][:n], self.given[1][:n])}


def test_real_images_as_further_samples_are_worth_the_same_and_those_with_wrong_labels_nothing(data, monkeypatch):
    monkeypatch.setattr(DigitsClassifier, "epochs", 4)
    images, labels = own_images(data)
    trainer = plain_trainer(
        max_epochs=1, callbacks=[FederationCallback(), Offers((images, labels)), DownstreamAccuracy()]
    )
    trainer.fit(model := given_model((images, (labels + 1) % 10)), data)
    found = trainer.callback_metrics
    assert model.asked == len(labels)
    assert found["union/downstream_digits"] == found["downstream_real_digits"] > 0.8
    assert found["downstream_digits"] < 0.1


def test_so_many_images_as_are_asked_for_train_either(data, monkeypatch):
    monkeypatch.setattr(DigitsClassifier, "epochs", 1)
    images, labels = own_images(data)
    asked, of_samples, of_real = scores(data, (images[:50], labels[:50]), images=50)
    assert asked == 50
    assert of_samples == of_real < 0.5


def test_what_cannot_be_looked_at_is_refused_before_training(data):
    with pytest.raises(UserError, match="choose one of digits, fashion, emoji, typefaces"):
        DownstreamAccuracy("inception")
    trainer = plain_trainer(max_epochs=1, callbacks=[FederationCallback(), DownstreamAccuracy()])
    plain = GAN(MLPGenerator([1, 8, 8], 2, [4]), MLPDiscriminator([1, 8, 8], [4]))
    with pytest.raises(UserError, match=r"labelled samples, and GAN has none: take a model with labels"):
        trainer.fit(plain, data)
    without = FederatedDataModule.from_datasets([[torch.zeros(1, 8, 8)] * 4], batch_size=2)
    with pytest.raises(UserError, match="needs train images with labels"):
        scores(without, own_images(data))
