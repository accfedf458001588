"""A federation on a GPU ends where the processor's ends: pytest tests/test_gpu.py --accelerator gpu."""

import pytest
import torch
from torch import Tensor

from lit_epgan.cli.main import main
from lit_epgan.engine import NormClipping, PlainFederation
from lit_epgan.federated import ExpectationPropagation
from tests.test_vectorized import ALGORITHMS, CLIENTS, ROUNDS, Batch, Net, batches_of, cross_entropy, sgd

# untied, EP makes differences of 4e-4 of rounding's 1e-7
DRIVEN = {**ALGORITHMS, "EP": lambda: ExpectationPropagation(prior_scale=10.0, tied=True)}
CONFIGS = (
    *("fedavg", "ep_laplace", "fedprox", "scaffold", "feddyn", "fednova", "fedadam", "fedpa", "fedseq", "moon"),
    *("krum", "median", "norm_clipping", "ditto", "apfl"),
)
SHORT = ["--config", "digits_classifier.yaml", "--data.clients", "5"]


@pytest.fixture(scope="module", autouse=True)
def device(request):
    if request.config.getoption("accelerator") == "cpu":
        pytest.skip("compares a GPU with the processor: --accelerator gpu")
    return torch.device("cuda")


def apart(first: Tensor, second: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((first.cpu() - second.cpu()).abs().max() / second.abs().max())


def fitted(folder, accelerator: str, algorithm: str, *words: str) -> Tensor:
    on_top = [] if algorithm == "fedavg" else ["--config", f"algorithms/{algorithm}.yaml"]  # it is the configuration's
    where = ["--trainer.accelerator", accelerator, "--trainer.default_root_dir", str(folder)]
    assert main(["fit", *SHORT, *on_top, *words, *where]) == 0
    state = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return torch.cat([tensor.flatten().double().cpu() for tensor in state.values()])


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_a_run_ends_where_the_processors_ends(folder, algorithm, tmp_path):
    there = fitted(tmp_path / "gpu", "gpu", algorithm, "--trainer.max_epochs", "3")
    here = fitted(tmp_path / "cpu", "cpu", algorithm, "--trainer.max_epochs", "3")
    assert apart(there, here) < 1e-4


@pytest.mark.parametrize("algorithm", ["fedavg", "ep_laplace", "scaffold", "fedadam", "apfl"])
def test_a_resumed_run_ends_where_one_that_was_not_stopped_ends(folder, algorithm, tmp_path):
    whole = fitted(tmp_path / "whole", "gpu", algorithm, "--trainer.max_epochs", "4")
    fitted(tmp_path / "parts", "gpu", algorithm, "--trainer.max_epochs", "2")
    resumed = fitted(tmp_path / "parts", "gpu", algorithm, "--trainer.max_epochs", "4", "--ckpt_path", "last")
    assert apart(resumed, whole) < 1e-4


@pytest.mark.parametrize("vectorized", [False, True], ids=["one after another", "side by side"])
@pytest.mark.parametrize("algorithm", DRIVEN.values(), ids=DRIVEN)
def test_the_plain_driver_ends_where_it_ends_on_the_processor(algorithm, vectorized, device):
    def run(where: torch.device) -> Tensor:
        def batches(client: int, round_: int) -> list[Batch]:
            return [(x.to(where), y.to(where)) for x, y in batches_of(client, round_)]

        torch.manual_seed(0)
        net, records = Net().to(where), [10.0 * (k + 1) for k in range(CLIENTS)]
        parts = (algorithm(), net, cross_entropy, sgd, batches, records)
        options = {"vectorized": vectorized and where.type == device.type, "mechanism": NormClipping(0.5)}
        federation = PlainFederation(*parts, **options)
        federation.run(ROUNDS)
        return federation.server.parameters

    assert apart(run(device), run(torch.device("cpu"))) < 1e-5
