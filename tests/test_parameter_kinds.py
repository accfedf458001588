"""Parameters that are not dense, real and materialised: as in plain Lightning, or refused by name."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.engine import FlatParameters
from lit_epgan.federated import SCAFFOLD, Ditto, ExpectationPropagation, FedDyn, FedLA, FedPA, FedProx
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, federation, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop
from tests.refusals import assert_refused
from tests.test_federation import assert_same, plain_batches, sgd_steps
from tests.test_policies import Kept


class Words(LightningModule):
    def __init__(self, sparse: bool = True, optimizer: str = "sgd") -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 1)
        self.which = optimizer
        self.automatic_optimization = optimizer == "sgd"

    def loss(self, batch: Any) -> Tensor:
        words, y = batch
        return ((self.head(self.embedding(words).mean(1)) - y) ** 2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizers: Any = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in optimizers:
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        if self.which == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1)
        sparse = torch.optim.SparseAdam(list(self.embedding.parameters()), lr=0.1)
        return sparse, torch.optim.Adam(self.head.parameters(), lr=0.1)


def words():
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 3 + 2 * k, (n, 5), generator=generator) for k, n in enumerate(SIZES)]
    return [TensorDataset(t, t.double().mean(1, keepdim=True) - k) for k, t in enumerate(texts)]


def texts(**options):
    return FederatedDataModule.from_datasets(words(), batch_size=8, **options)


def word_batches(client, round_):
    return plain_batches(words()[client], None, round_, client)


def steps(local, batches):
    made = local.configure_optimizers()
    optimizers = made if isinstance(made, tuple) else (made,)
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        local.loss(batch).backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("optimizer", ["sgd", "sparse adam"])
@pytest.mark.parametrize("policy", ["reset", "keep"])
def test_sparse_gradients_are_the_plain_loops(optimizer, policy):
    module = Words(optimizer=optimizer)
    work = Kept(steps) if policy == "keep" else lambda local, batches, client, round_: steps(local, batches)
    reference = PlainLoop(work, batches=word_batches).run(module, 3)
    fit(module, texts(), rounds=3, optimizer_state=policy)
    assert_same(module, reference)


SMOOTH = [FedProx(0.1), SCAFFOLD("path"), SCAFFOLD("gradient"), FedDyn(), Ditto(), FedLA(), FedPA(every=1)]


@pytest.mark.parametrize("algorithm", [*SMOOTH, ExpectationPropagation()], ids=lambda a: type(a).__name__)
def test_sparse_gradients_give_what_dense_ones_do(algorithm):
    module, dense = Words(), Words(sparse=False)
    dense.load_state_dict(module.state_dict())
    fit(dense, texts(), rounds=3, algorithm=copy.deepcopy(algorithm))
    fit(module, texts(), rounds=3, algorithm=copy.deepcopy(algorithm))
    assert_same(module, dense)


@pytest.mark.parametrize("algorithm", [FedProx(0.1), SCAFFOLD(), FedLA()], ids=lambda a: type(a).__name__)
def test_an_optimizer_of_sparse_gradients_alone_is_named(algorithm):
    sentence = r"the gradient of 'embedding\.weight' is sparse.*SparseAdam takes no dense one.*such as Adam"
    assert_refused(sentence, fit, Words(optimizer="sparse adam"), texts(), rounds=1, algorithm=algorithm)


class Spectral(Regression):
    def __init__(self, real: bool = False) -> None:
        super().__init__()
        start = torch.randn(2, dtype=torch.complex128, generator=torch.Generator().manual_seed(1))
        self.real = real
        self.filter = nn.Parameter(torch.view_as_real(start).clone() if real else start)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        kernel = torch.view_as_complex(self.filter) if self.real else self.filter
        return super().loss((torch.fft.irfft(torch.fft.rfft(x) * kernel, n=3), y))


def test_complex_parameters_are_refused_and_the_advice_works():
    sentence = r"the parameter 'filter' is complex.*torch\.view_as_complex.*local=\['filter'\]"
    assert_refused(sentence, fit, Spectral(), federation(), rounds=1)
    module = Spectral(real=True)
    reference = PlainLoop(lambda local, batches, client, round_: sgd_steps(local, batches)).run(module, 2)
    fit(module, federation(), rounds=2)
    assert_same(module, reference)


def test_complex_parameters_may_stay_local():
    module = Spectral()
    loop = PlainLoop(
        lambda local, batches, client, round_: sgd_steps(local, batches),
        averaged=lambda name: name != "filter",
        kept=lambda name: name == "filter",
    )
    reference = loop.run(module, 3)
    fit(module, federation(), rounds=3, local=["filter"])
    assert_same(module, reference, skip=("filter",))


class Lazy(Regression):
    def __init__(self, ready: bool = False, norm: bool = False) -> None:
        super().__init__()
        first: list[nn.Module] = [nn.LazyBatchNorm1d(affine=False)] if norm else [nn.LazyLinear(8)]
        self.body = nn.Sequential(*first, nn.Tanh(), nn.Linear(3 if norm else 8, 1))
        self.ready = ready

    def configure_model(self) -> None:
        if self.ready:
            self.body.train()(torch.zeros(2, 3, dtype=next(self.body[2].parameters()).dtype))


@pytest.mark.parametrize(("norm", "name"), [(False, "body.0.weight"), (True, "body.0.running_mean")])
def test_lazy_layers_are_named_and_the_advice_works(norm, name):
    with pytest.raises(UserError, match=rf"'{name}' of Lazy has no shape yet.*run one batch.*configure_model"):
        fit(Lazy(norm=norm), federation(), rounds=1)
    fit(Lazy(ready=True, norm=norm), federation(), rounds=1)


def test_parameters_without_values_and_those_stored_sparsely_are_named():
    with pytest.raises(UserError, match=r"the parameter 'body\.0\.weight' is on the meta device.*configure_model"):
        FlatParameters.of(Regression().to("meta"))
    module = nn.Module()
    module.table = nn.Parameter(torch.eye(3).to_sparse())
    assert_refused(r"the parameter 'table' is stored sparsely.*local=\['table'\]", FlatParameters.of, module)
