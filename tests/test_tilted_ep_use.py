"""The EP-GAN paper's prior in use: where f comes from, resuming, and a user's mistakes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lit_epgan.cli.main import main
from lit_epgan.engine import Broadcast, Client
from lit_epgan.errors import UserError
from lit_epgan.federated import TiltedExpectationPropagation
from lit_epgan.modules.gan import GAN
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from tests.federations import federation, fit
from tests.modules import TwoOptimizers
from tests.test_federation import assert_same
from tests.test_tilted_ep import FEATURES, state_of


def test_f_sees_the_real_rows_and_costs_no_further_pass() -> None:
    seen: list[Tensor] = []
    passes = {"discriminator": 0}

    class Watched(TiltedExpectationPropagation):
        def train(self, client: Client, sent: Broadcast) -> TiltedExpectationPropagation.Report:
            fit = client.fit

            def watched(start: Tensor, *, loss: Any, **told: Any) -> None:
                def extra() -> Tensor | None:
                    if self.caught._caught is not None:
                        seen.append(self.caught._caught.detach().clone())
                    found = loss()
                    assert found is None or float(found) == 0  # what the module logs stays its own
                    return found

                fit(start, loss=extra, **told)
                passes["steps"] = passes["discriminator"]

            client.fit = watched  # type: ignore[method-assign, assignment]
            return super().train(client, sent)

    expected: list[Tensor] = []

    class Batches(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                expected.append(pl_module.discriminator[1](pl_module.discriminator[0](batch[0])))

    module = TwoOptimizers()
    module.discriminator.register_forward_pre_hook(lambda *_: passes.update(discriminator=passes["discriminator"] + 1))
    fit(module, federation(sizes=(20,), local_steps=4), rounds=1, callbacks=[Batches()],
        algorithm=Watched(FEATURES, components=2, tilt_every=1))  # fmt: skip
    assert len(seen) == 4
    for ours, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert passes["steps"] == 4 * 3
    assert not module.discriminator[1]._forward_hooks


class Watched(TiltedExpectationPropagation):
    """Keeps what it catches."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[Tensor] = []

    def train(self, client: Client, sent: Broadcast) -> TiltedExpectationPropagation.Report:
        def look() -> None:
            if self.caught._caught is not None:
                self.seen.append(self.caught._caught.detach().clone())

        return super().train(client.told(loss=look), sent)


@pytest.mark.parametrize("options", [{}, {"objective": "wgan-gp"}, {"r1": 0.5}, {"average": None}], ids=str)
def test_a_gan_shows_its_real_rows_first(options: dict[str, Any]) -> None:
    """In one pass with the generated ones, or alone ahead of them."""
    networks = MLPGenerator((3,), hidden=(8,), tanh=False), MLPDiscriminator((3,), hidden=(6, 5))
    module = GAN(*networks, **options)
    algorithm, expected = Watched("discriminator.layers.3", tilt_every=1), []

    class Batches(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                expected.append(pl_module.discriminator.layers[:4](batch[0]))

    fit(module, federation(sizes=(20, 7)), rounds=2, algorithm=algorithm, callbacks=[Batches()])
    assert len(algorithm.seen) == len(expected) == 8
    for ours, theirs in zip(algorithm.seen, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_command_line_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    name = "--federation.algorithm"
    words = [name, "lit_epgan.federated.TiltedExpectationPropagation", f"{name}.features", "discriminator.layers.3",
             f"{name}.components", "10", f"{name}.variant", "corrected"]  # fmt: skip
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "digits.yaml", *words, "--print_config"])
    printed = capsys.readouterr().out
    assert "variant: corrected" in printed
    assert "features: discriminator.layers.3" in printed


@pytest.mark.parametrize("options", [{}, {"components": 2, "recentre": True}, {"step": "proximal"}], ids=str)
def test_resumed_it_goes_on_bit_by_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    def algorithm() -> TiltedExpectationPropagation:
        return TiltedExpectationPropagation(FEATURES, hidden=4, weight=0.01, tilt_every=2, **options)

    module = TwoOptimizers()
    halfway, whole = copy.deepcopy(module), copy.deepcopy(module)
    fit(halfway, federation(clients_per_round=3), rounds=2, algorithm=algorithm()).save_checkpoint(tmp_path / "half")
    expected = fit(whole, federation(clients_per_round=3), rounds=4, algorithm=algorithm())
    trainer = fit(module, federation(clients_per_round=3), rounds=4, algorithm=algorithm(),
                  ckpt_path=tmp_path / "half")  # fmt: skip
    assert_same(module, whole, tolerance=0.0)
    for name, value in state_of(expected)["server"].items():
        assert torch.equal(state_of(trainer)["server"][name], value)
    assert torch.equal(state_of(trainer)["networks"], state_of(expected)["networks"])


def test_moments_that_are_none_are_counted_and_said_once() -> None:
    algorithm = TiltedExpectationPropagation(FEATURES, variant="printed", lr=0.1)
    with pytest.warns(UserWarning, match=r"% of the tilted coordinates have no printed moments: not tilted") as said:
        state = state_of(fit(TwoOptimizers(), federation(), rounds=2, algorithm=algorithm))
    assert len([w for w in said if "moments" in str(w.message)]) == 1
    assert 0 < float(state["server"]["tilted.left_out"]) <= 1


@pytest.mark.parametrize("argument", [
    {"components": 0}, {"hidden": -1}, {"weight": -1.0}, {"step": "adam"}, {"tilt_every": 0}, {"variant": "right"},
    {"terms": 7}, {"prior_variance": float("inf")}, {"spread": -1.0}, {"temperature": 0.0}, {"lr": float("nan")},
])  # fmt: skip
def test_arguments_out_of_range(argument: dict[str, Any]) -> None:
    name = next(iter(argument))
    with pytest.raises(UserError, match=f"TiltedExpectationPropagation's {name} is .*; it must (be|lie in)"):
        TiltedExpectationPropagation(FEATURES, **argument)


def test_features_that_do_not_exist_are_named() -> None:
    with pytest.raises(UserError, match=r"TwoOptimizers has no submodule 'discriminator\.9'.*discriminator\.0, "):
        fit(TwoOptimizers(), federation(), algorithm=TiltedExpectationPropagation("discriminator.9"))


def test_a_step_that_does_not_pass_through_the_features_is_an_error() -> None:
    module = TwoOptimizers()
    module.spare = nn.Linear(3, 2)
    with pytest.raises(UserError, match="makes no pass through the features 'spare'"):
        fit(module, federation(), rounds=1, algorithm=TiltedExpectationPropagation("spare"))
