"""SuffiAE: its objective against closed forms, its codes, and how it trains alone and in a federation."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils.data import DataLoader, TensorDataset

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.federated import FedAvg
from lit_epgan.modules import SuffiAE
from lit_epgan.modules.posterior import divergence, objective
from lit_epgan.privacy import RecordNoise
from tests.federations import fit
from tests.refusals import assert_refused

D, CODE = 6, 2
OFF: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
OFF |= {"enable_model_summary": False, "accelerator": "cpu", "precision": "64-true"}


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def suffiae(seed=0, **options):
    torch.manual_seed(seed)
    return SuffiAE(**({"features": D, "dimensions": CODE, "hidden": [16], "optimizer": adam} | options)).double()


def records(n, seed, shift=0.0):
    """A line tells the two classes apart, with some errors; ``shift`` makes a site unlike the others."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, D, generator=generator, dtype=torch.float64)
    x[:, :2] += 2.0 * y[:, None] - 1
    x[:, 2] = x[:, 0] - x[:, 1] + shift
    return TensorDataset(x, y)


def sites():
    return {f"site-{k}": records(40 + 20 * k, k, shift=2.0 * k) for k in range(3)}


def federation(**options):
    held = {name: records(31, 10 + k, shift=2.0 * k) for k, name in enumerate(sites())}
    return FederatedDataModule.from_datasets(sites(), batch_size=16, val_dataset=held, **options)


def alone(module, data, epochs=10):
    trainer = Trainer(max_epochs=epochs, **OFF)
    trainer.fit(module, DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1)))
    return module


@pytest.mark.parametrize("alpha", [0.01, 0.5, 1.0, 3.0])
def test_the_divergence_is_that_of_torch(alpha):
    code = torch.randn(5, 3, dtype=torch.float64)
    own = Independent(Normal(code, math.sqrt(alpha)), 1)
    prior = Independent(Normal(torch.zeros_like(code), 1.0), 1)
    torch.testing.assert_close(divergence(code, alpha), kl_divergence(own, prior))


def test_the_objective_by_hand_and_of_two_classes_the_papers_logistic_classifiers():
    """x = (1, 2), f(z) = (0, 2), g(z) = (0, log 3), y = 1, q(x) = (1, 0), alpha = 1/2.

    -1/2 (1 + 0) + log(3/4) - 1/2 [1 + 2 (1/2 - 1 + log 2)] = -1/2 + log(3/4) - log 2
    """
    x, reconstruction = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 2.0]])
    logits, code = torch.tensor([[0.0, math.log(3)]]), torch.tensor([[1.0, 0.0]])
    value = objective(x, reconstruction, logits, torch.tensor([1]), code, 0.5)
    assert value.tolist() == pytest.approx([-0.5 + math.log(3 / 4) - math.log(2)])
    # y log g(z) + (1 - y) log(1 - g(z)), g the logistic function of the difference of the two logits
    logits, y = torch.randn(7, 2, dtype=torch.float64), torch.arange(7) % 2
    zero = torch.zeros(7, 1, dtype=torch.float64)
    own = objective(zero, zero, logits, y, zero, 1.0)
    g = torch.sigmoid(logits[:, 1] - logits[:, 0])
    torch.testing.assert_close(own, y * g.log() + (1 - y) * (1 - g).log())


def test_every_term_has_the_sign_that_makes_it_better():
    """A worse reconstruction, a less probable label and a code farther from zero each lower the objective."""
    x, code, logits, y = torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([[0.0, 1.0]]), torch.tensor([1])

    def value(error: float = 0.0, swapped: bool = False, scale: float = 1.0) -> float:
        return float(objective(x, x + error, logits.flip(1) if swapped else logits, y, scale * code, 0.3))

    assert value() > value(error=1.0) > value(error=-2.0)
    assert value() > value(swapped=True)
    assert value(scale=0.0) > value() > value(scale=-2.0)


def test_the_loss_is_the_expectation_over_the_noise():
    """With linear parts: E ||x - f(z)||^2 = ||x - f(q)||^2 + alpha ||W||^2, and g's term by Gauss and Hermite."""
    module, (x, y) = suffiae(hidden=[], alpha=0.7), records(3, 0).tensors
    torch.manual_seed(0)
    many = 40_000
    drawn = float(module.training_step((x.repeat(many, 1), y.repeat(many)), 0).detach())
    with torch.no_grad():
        code = module.backbone(x)
        (weight,) = (m.weight for m in module.decoder.modules() if isinstance(m, nn.Linear))
        fit = -0.5 * ((x - module.decoder(code)).square().sum(1) + 0.7 * weight.square().sum())
        difference = module.head.weight[1] - module.head.weight[0]
        margin = (2 * y - 1) * (code @ difference + module.head.bias[1] - module.head.bias[0])
        nodes, weights = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(40))
        spread = nodes * math.sqrt(0.7) * difference.norm()
        told = (torch.nn.functional.logsigmoid(margin[:, None] + spread) * weights).sum(1) / math.sqrt(2 * math.pi)
        expected = -(fit + told - divergence(code, 0.7)).mean()
    assert drawn == pytest.approx(float(expected), rel=3e-3)


def test_a_summary_is_the_encoders_output_without_noise_in_evaluation_mode():
    module, (x, _) = suffiae(), records(9, 0).tensors
    module.backbone = nn.Sequential(nn.Dropout(0.9), module.backbone)
    module.train()
    expected = module.backbone[1](x)
    torch.testing.assert_close(module.summarise(x), expected)
    assert module.summarise(x).shape == (9, CODE)
    assert not module.summarise(x).requires_grad
    assert module.backbone[0].training  # as it was


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dimensions": 7}, "dimensions are 7 of 6 features"),
        ({"dimensions": 0}, "dimensions are 0 of 6 features"),
        ({"classes": 1}, "classes are 1"),
        ({"alpha": 0.0}, r"alpha is 0\.0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"hidden": [0]}, "every width must be at least 1"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    assert_refused(message, suffiae, **options)


def test_what_evaluation_logs():
    """Over all held-out records, whatever their batches: 31 of each site in batches of 16."""
    module = suffiae()
    trainer = fit(module, federation(), 4, algorithm=FedAvg())
    held = [records(31, 10 + k, shift=2.0 * k).tensors for k in range(3)]
    x, y = torch.cat([x for x, _ in held]), torch.cat([y for _, y in held])
    with torch.no_grad():
        code = module.summarise(x)
        probability = module.head(code).softmax(1)[:, 1]
        error = float((x - module.decoder(code)).square().mean())
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert logged["reconstruction"] == pytest.approx(error, rel=1e-6)
    assert logged["accuracy"] == pytest.approx(float(((probability > 0.5) == y).double().mean()), rel=1e-6)
    assert logged["auc"] == pytest.approx(roc_auc_score(y, probability), rel=1e-6)
    assert "reconstruction/client/site-1" in logged


def test_codes_are_learned_of_several_classes_too():
    module = suffiae()
    first = fit(module, federation(), 1, algorithm=FedAvg()).callback_metrics
    last = fit(module, federation(), 15, algorithm=FedAvg()).callback_metrics
    assert float(last["auc"]) > 0.9  # 0.98 is the best possible
    assert float(last["reconstruction"]) < 0.8 * float(first["reconstruction"])
    module = suffiae(classes=3)
    x, y = torch.randn(9, D, dtype=torch.float64), torch.arange(9) % 3
    loss = float(module.training_step((x, y), 0).detach())
    assert math.isfinite(loss)
    assert module.auc is None
    assert module(x).shape == (9, 3)


def test_one_step_of_one_client_under_fedavg_is_a_plain_step():
    """The callback changes nothing: the server's parameters after a full-batch step of SGD, by hand."""
    data = {"only": records(20, 0)}
    sgd = lambda p: torch.optim.SGD(p, lr=0.1)  # noqa: E731
    module, other = suffiae(optimizer=sgd, alpha=1e-20), suffiae(alpha=1e-20)  # no noise to speak of
    fit(module, FederatedDataModule.from_datasets(data, batch_size=20), 1, algorithm=FedAvg())
    other.training_step(data["only"].tensors, 0).backward()
    for own, expected in zip(module.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), (expected - 0.1 * expected.grad).detach(), rtol=1e-6, atol=1e-8)


def test_codes_of_encoders_trained_apart_cannot_be_compared_and_a_shared_encoders_can():
    """The same records, summarised at three sites: by each one's own encoder, and by the federation's."""

    class Codes(FederationCallback):
        def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
            super().on_validation_start(trainer, pl_module)
            self.exchange_personal()
            self.seen = []
            for client in range(3):
                self.load_personal(client)
                self.seen.append((pl_module.summarise(x), pl_module.decoder(pl_module.summarise(x))))
            self.load_server()

    x = records(30, 99).tensors[0]
    apart = [alone(suffiae(seed=k), data).summarise(x) for k, data in enumerate(sites().values())]
    spread = float(torch.stack(apart).std(1).mean())
    assert min(float((a - b).norm(dim=1).mean()) for a, b in pairwise(apart)) > spread

    callback = Codes(FedAvg(), local=["decoder.*"])
    trainer = Trainer(max_epochs=3, num_sanity_val_steps=0, callbacks=[callback], **OFF)
    trainer.fit(suffiae(), datamodule=federation())
    (shared, *others), (decoded, *others_decoded) = zip(*callback.seen, strict=True)
    assert all(torch.equal(shared, other) for other in others)
    assert not any(torch.allclose(decoded, other, rtol=0.05) for other in others_decoded)  # the decoders are their own


@pytest.mark.slow
def test_it_trains_record_by_record_under_noise(tmp_path):
    module = suffiae().float()
    data = FederatedDataModule.from_datasets(
        {k: TensorDataset(d.tensors[0].float(), d.tensors[1]) for k, d in sites().items()}, batch_size=16
    )
    before = module.head.weight.detach().clone()
    fit(module, data, 1, tmp_path, algorithm=FedAvg(), mechanism=RecordNoise(1.0, 0.1), precision="32-true")
    assert not torch.equal(module.head.weight, before)
