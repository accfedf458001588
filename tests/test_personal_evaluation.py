"""Personal layers in ``validate`` and ``test``: every client's own, from the checkpoint, against a plain loop's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lit_epgan.callbacks import FederationCallback, RoundCheckpoint
from lit_epgan.lib.errors import UserError
from tests.federations import SIZES, client_sets, federation, fit
from tests.modules import Regression
from tests.plain_loop import PlainLoop
from tests.test_client_metrics import evaluator
from tests.test_policies import is_head, sgd

HEAD = ["body.3.*"]


class HeldOut(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch))


def saved():
    return {"callbacks": [RoundCheckpoint()], "enable_checkpointing": True}


def held_out():
    return dict(zip(["client-0", "client-2"], client_sets((5, 11)), strict=True))


def data():
    return federation(val_dataset=held_out(), test_dataset=held_out())


def expected(module, rounds=3):
    """The loss of each client's own model on its own held-out data."""
    loop = PlainLoop(sgd, kept=is_head)
    reference, losses = loop.run(module, rounds), {}
    for client, dataset in held_out().items():
        own = copy.deepcopy(reference).eval()
        own.load_state_dict(loop.private[int(client[-1])], strict=False)
        losses[client] = float(own.loss(dataset.tensors))
    return losses


def evaluated(stage, trainer, module, **options):
    getattr(trainer, stage)(module, datamodule=data(), verbose=False, **options)
    name = "test_loss" if stage == "test" else "val_loss"
    return {c: float(trainer.callback_metrics[f"{name}/client/{c}"]) for c in held_out()}


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_every_client_is_evaluated_with_its_own_layers_from_the_checkpoint(stage, tmp_path):
    """In a process of its own, so to speak: another module, data module, callback and trainer."""
    module = HeldOut()
    losses = expected(module)
    fit(copy.deepcopy(module), data(), 3, tmp_path, local=HEAD, **saved())
    last, fresh = tmp_path / "checkpoints" / "last.ckpt", HeldOut()
    found = evaluated(stage, evaluator(FederationCallback(local=HEAD)), fresh, ckpt_path=last)
    assert found == pytest.approx(losses, rel=1e-6)
    written = torch.load(last)["state_dict"]  # the module is the server's again
    assert all(torch.equal(value.float(), written[name].float()) for name, value in fresh.state_dict().items())


def test_right_after_the_fit_no_checkpoint_is_needed():
    module = HeldOut()
    losses = expected(module)
    trainer = fit(module, data(), rounds=3, local=HEAD)
    assert evaluated("test", trainer, module) == pytest.approx(losses, rel=1e-6)


def test_local_buffers_are_evaluated_too(tmp_path):
    """Batch norm's statistics: the clients' data differ, and so do the losses under the server's."""
    module = HeldOut(batch_norm=True)
    trainer = fit(module, data(), 2, tmp_path, buffers="local", **saved())
    fitted = {c: float(trainer.callback_metrics[f"val_loss/client/{c}"]) for c in held_out()}
    last = tmp_path / "checkpoints" / "last.ckpt"
    found = evaluated("test", evaluator(FederationCallback(buffers="local")), HeldOut(batch_norm=True), ckpt_path=last)
    assert found == pytest.approx(fitted, rel=1e-6)
    merged = evaluated("test", evaluator(FederationCallback()), HeldOut(batch_norm=True), ckpt_path=last)
    assert found != pytest.approx(merged, rel=0.1)


def test_personal_layers_that_are_missing_are_said(tmp_path):
    with pytest.raises(UserError, match="personal layers stand in a run's checkpoint: give it, as ckpt_path="):
        evaluated("test", evaluator(FederationCallback(local=HEAD)), HeldOut())
    module = HeldOut()
    trainer = evaluator()
    trainer.validate(module, datamodule=data(), verbose=False)
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(UserError, match=r"plain\.ckpt holds no personal layers, as federation\.local asks for"):
        evaluated("test", evaluator(FederationCallback(local=HEAD)), module, ckpt_path=tmp_path / "plain.ckpt")
    few = federation(clients_per_round=1, test_dataset=held_out(), seed=1)  # client 0 or 2 is not drawn
    assert set(few.sampler.draw([0, 1, 2, 3], 1, 0)[0]) != {0}
    fit(HeldOut(), few, 1, tmp_path, local=HEAD, **saved())
    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.warns(UserWarning, match="no personal layers of client-0.* in the checkpoint: they are evaluated with"):
        evaluated("test", evaluator(FederationCallback(local=HEAD)), HeldOut(), ckpt_path=last)
    common = federation(test_dataset=client_sets(SIZES)[0])
    with pytest.warns(
        UserWarning, match="data are nobody's, so personal layers are evaluated with their initial values"
    ):
        evaluator(FederationCallback(local=HEAD)).test(HeldOut(), datamodule=common, ckpt_path=last, verbose=False)


@pytest.mark.parametrize("first", [True, False])
def test_best_works_beside_round_checkpoint(first, tmp_path):
    best = ModelCheckpoint(monitor="val_loss", mode="max", dirpath=tmp_path / "best")  # the first round is the worst
    callbacks = [RoundCheckpoint(), best] if first else [best, RoundCheckpoint()]
    module = HeldOut()
    one, three = expected(copy.deepcopy(module), 1), expected(copy.deepcopy(module), 3)
    trainer = fit(module, data(), 3, tmp_path, callbacks=callbacks, enable_checkpointing=True, local=HEAD)
    assert Path(best.best_model_path).name.startswith("epoch=0-")
    assert evaluated("test", trainer, None, ckpt_path="best") == pytest.approx(one, rel=1e-6)
    assert evaluated("test", trainer, None, ckpt_path="last") == pytest.approx(three, rel=1e-6)
