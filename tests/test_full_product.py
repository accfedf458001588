"""EP without its cavity, which benchmarks/ablations.yaml compares: a client's own site is not left out."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from lit_epgan.engine import Algorithm
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, GeneratorSites
from lit_epgan.study.plan import read_studies
from lit_epgan.study.run import runs_of
from tests.federations import federation, fit
from tests.modules import Regression
from tests.test_embedding_sites import FAST, Cloud, data, nearest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def full_product(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("full_product")


def alone(algorithm: Algorithm) -> Tensor:
    """The parameters of a federation of one client."""
    torch.manual_seed(0)
    module = Regression()
    fit(module, federation(sizes=(40,)), rounds=3, algorithm=algorithm)
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_a_client_without_others_is_pulled_to_its_own_site(full_product: ModuleType) -> None:
    """The product of nobody's sites pulls nowhere; the product of all sites is the client's own."""
    free = alone(ExpectationPropagation(prior_scale=0.0))
    assert torch.equal(alone(ExpectationPropagation(prior_scale=300.0)), free)
    assert torch.equal(alone(full_product.FullExpectationPropagation(prior_scale=0.0)), free)
    assert not torch.allclose(alone(full_product.FullExpectationPropagation(prior_scale=300.0)), free, atol=1e-3)


def of_its_own(algorithm: Algorithm) -> list[float]:
    """By client, the share of the second round's rows, beside its own four of a batch, that lie in its own cloud."""
    module = Cloud()
    fit(module, data(), rounds=2, algorithm=algorithm)
    seen = [s for s in module.seen if s.round == 1]
    names = sorted({s.client for s in seen})
    rows = [nearest(torch.cat([s.x[4:] for s in seen if s.client == name])) for name in names]
    return [float((each == k).double().mean()) for k, each in enumerate(rows)]


def test_what_a_client_sees_of_itself(full_product: ModuleType) -> None:
    """Nothing, or as much as it has of all records: 40, 60 and 100 of 200."""
    shares = pytest.approx([0.2, 0.3, 0.5], abs=0.12)
    assert max(of_its_own(GeneratorSites("generator", own_rows=4))) < 0.02
    assert of_its_own(full_product.FullGeneratorSites("generator", own_rows=4)) == shares
    assert max(of_its_own(EmbeddingSites(own_rows=4, **FAST))) < 0.05  # weights of herded points
    assert of_its_own(full_product.FullEmbeddingSites(own_rows=4, **FAST)) == shares


def test_the_study_can_be_read(full_product: ModuleType, tmp_path: Path) -> None:
    plans = read_studies(ROOT / "benchmarks" / "ablations.yaml")
    assert [len(runs_of(plan, tmp_path)) for plan in plans] == [45, 25, 45]
