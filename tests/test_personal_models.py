"""Ditto and APFL: personal models by hand and against plain loops, and their evaluation client by client."""

import copy
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lit_epgan.callbacks import FederationCallback, PersonalMetrics, RoundCheckpoint
from lit_epgan.federated import APFL, Ditto, FedAvg, FedRep
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import CentralNoise, RecordNoise
from tests.federations import client_sets, federation, fit
from tests.modules import Regression, TwoOptimizers
from tests.plain_federation import federated
from tests.plain_loop import PlainLoop, own_batches
from tests.quadratics import CENTRES, CURVATURES, RATE, Quadratic, clients, trained
from tests.refusals import assert_refused
from tests.test_client_metrics import evaluator
from tests.test_federation import assert_same, plain_batches
from tests.test_lightning_signals import Choosy, institutions
from tests.test_personal_evaluation import HeldOut, held_out
from tests.test_policies import is_head

ZERO = torch.zeros(2, dtype=torch.float64)


def run(algorithm, rounds, data=None):
    """The server's parameters after so many rounds on the quadratics, and every client's state."""
    plain = federated(Quadratic(), data or clients(), algorithm)
    parameters = plain.run(rounds)
    return parameters, [plain.federation.private.clients[f"client-{k}"].algorithm for k in range(2)]


def test_two_rounds_of_ditto_by_hand():
    """v_k is pulled to what the server had when the round began: by lam = .7, at a rate of its own."""
    own = [ZERO.clone() for _ in range(2)]
    for round_ in range(2):
        theta = trained(FedAvg(), round_) if round_ else ZERO
        for k in range(2):
            for _ in range(4):
                own[k] = own[k] - 0.1 * (CURVATURES[k] * (own[k] - CENTRES[k]) + 0.7 * (own[k] - theta))
    _, states = run(Ditto(lam=0.7, lr=0.1), 2)
    for k in range(2):
        torch.testing.assert_close(states[k]["personal"], own[k], rtol=1e-12, atol=1e-12)


def test_ditto_ends_between_the_clients_own_optimum_and_the_server():
    """v_k = (h a + lam theta) / (h + lam), where the server has come to rest."""
    theta, states = run(Ditto(lam=0.5, lr=0.2), 11, clients(local_steps=50))
    for k in range(2):
        expected = (CURVATURES[k] * CENTRES[k] + 0.5 * theta) / (CURVATURES[k] + 0.5)
        torch.testing.assert_close(states[k]["personal"], expected, rtol=1e-8, atol=1e-8)


def test_ditto_is_a_plain_loop_with_buffers_of_its_own():
    module = Regression(batch_norm=True)
    server = copy.deepcopy(module).double()
    theta = dict(server.named_parameters())
    expected = []
    for k, dataset in enumerate(client_sets()):
        own = copy.deepcopy(server).train()
        for batch in plain_batches(dataset, 4, 0, k):
            gradients = torch.autograd.grad(own.loss(batch), list(own.parameters()))
            with torch.no_grad():
                for (name, p), gradient in zip(own.named_parameters(), gradients, strict=True):
                    p -= 0.05 * (gradient + 0.3 * (p - theta[name]))
        expected.append(own.state_dict())
    found = Personals()
    fit(module, federation(local_steps=4), 1, algorithm=Ditto(lam=0.3, lr=0.05), callbacks=[found])
    for k in range(4):
        assert found.models[f"client-{k}"].keys() == expected[k].keys()
        for name, value in expected[k].items():
            torch.testing.assert_close(found.models[f"client-{k}"][name], value, rtol=1e-9, atol=1e-9, msg=name)


def test_a_late_ditto_without_a_pull_fine_tunes_the_servers_model():
    """FedAvg for two rounds, whose model each client then trains by itself for one."""
    theta = trained(FedAvg(), 2)
    server, states = run(Ditto(lam=0.0, lr=0.1, first_round=2), 3)
    assert torch.equal(server, trained(FedAvg(), 3))
    for k in range(2):
        own = theta
        for _ in range(4):
            own = own - 0.1 * CURVATURES[k] * (own - CENTRES[k])
        torch.testing.assert_close(states[k]["personal"], own, rtol=1e-12, atol=1e-12)


class Personals(PersonalMetrics):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        callback: Any = trainer.callbacks[0]
        self.on_validation_start(trainer, pl_module)
        self.models = {}
        for name in callback.federation.names:
            model = {n: t.detach().clone() for n, t in pl_module.state_dict().items()}
            self.models[name] = model | self.model_of(self._state(name))


@pytest.mark.parametrize("adaptive", [True, False])
def test_two_rounds_of_apfl_by_hand(adaptive):
    own, shares = [ZERO.clone() for _ in range(2)], [0.6, 0.6]
    for round_ in range(2):
        server = trained(FedAvg(), round_) if round_ else ZERO
        for k in range(2):
            theta = server.clone()
            for step in range(4):
                gradient = CURVATURES[k] * (shares[k] * own[k] + (1 - shares[k]) * theta - CENTRES[k])
                moved = shares[k] - 0.1 * float(gradient @ (own[k] - theta))
                own[k] = own[k] - 0.1 * shares[k] * gradient
                if adaptive and step == 0:
                    shares[k] = min(max(moved, 0.0), 1.0)
                theta = theta - RATE * CURVATURES[k] * (theta - CENTRES[k])
    algorithm = APFL(share=0.6, adaptive=adaptive, lr=0.1)
    server, states = run(algorithm, 2)
    for k in range(2):
        torch.testing.assert_close(states[k]["personal"], own[k], rtol=1e-12, atol=1e-12)
        assert algorithm.share_of(states[k]) == pytest.approx(shares[k], rel=1e-12)
        assert ("share" in states[k]) == adaptive
        mixed = shares[k] * own[k] + (1 - shares[k]) * server
        torch.testing.assert_close(algorithm.personal(states[k], server), mixed, rtol=1e-12, atol=1e-12)


def test_a_share_of_1_is_every_client_for_itself_and_of_0_the_server_and_it_stays_between():
    alone, none = APFL(share=1.0, adaptive=False, lr=RATE), APFL(share=0.0, adaptive=False)
    _, states = run(alone, 10, clients(local_steps=50))
    for k in range(2):
        torch.testing.assert_close(states[k]["personal"], CENTRES[k], rtol=1e-8, atol=1e-8)
    server, states = run(none, 3)
    for k in range(2):
        assert torch.equal(none.personal(states[k], server), server)
    algorithm = APFL(share=0.9, lr=2.0)
    _, states = run(algorithm, 3, clients(local_steps=1))
    assert {algorithm.share_of(state) for state in states} <= {0.0, 1.0}


def test_fedrep_trains_the_head_and_then_the_representation():
    """Three of four local steps are the head's, whose values stay; the representation is averaged."""

    def work(local: Any, batches: list[Any], client: int, round_: int) -> None:
        for part, some in ((local.body[3], batches[:3]), (local.body[0], batches[3:])):
            optimizer = torch.optim.SGD(part.parameters(), lr=local.lr, momentum=local.momentum)
            for batch in some:
                optimizer.zero_grad()
                local.loss(batch).backward()
                optimizer.step()

    module = Regression()
    loop = PlainLoop(work, kept=is_head, batches=own_batches(4))
    reference = loop.run(module, 3)
    kept = Kept()
    fit(module, federation(local_steps=4), 3, algorithm=FedRep(0.75), local=["body.3.*"], callbacks=[kept])
    assert_same(module, reference, skip=("body.3",))
    for k, layers in loop.private.items():
        for name, value in layers.items():
            torch.testing.assert_close(kept.layers[f"client-{k}"][name], value, rtol=1e-9, atol=1e-9)


def test_clients_keep_the_same_layers_without_a_trainer():
    module, kept = Regression().double(), Kept()
    plain = federated(copy.deepcopy(module), federation(local_steps=4), FedRep(0.75), local=["body.3.*"])
    plain.run(3)
    fit(module, federation(local_steps=4), 3, algorithm=FedRep(0.75), local=["body.3.*"], callbacks=[kept])
    for client, layers in kept.layers.items():
        for name, value in layers.items():
            own = plain.federation.private.personal(client)[name]
            torch.testing.assert_close(own, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", [Ditto(), APFL()], ids=lambda a: type(a).__name__)
def test_the_server_learns_and_logs_what_fedavg_does(algorithm):
    module, plain = Regression(batch_norm=True), Regression(batch_norm=True)
    plain.load_state_dict(module.state_dict())
    trainer, reference = fit(module, federation(), 3, algorithm=algorithm), fit(plain, federation(), 3)
    assert_same(module, plain, tolerance=0.0)
    assert torch.equal(trainer.callback_metrics["train_loss"], reference.callback_metrics["train_loss"])


def test_clients_that_have_not_trained_or_skip_their_batches_keep_nothing():
    """Client h1 trains on nothing, and keeps nothing."""

    class Skipping(Choosy):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if int(batch[2][0]) == 1 else None

    found = Kept()
    fit(Skipping(), institutions(), 1, algorithm=APFL(), callbacks=[found])
    assert "h1" not in found.states
    assert found.states["h2"].keys() == {"personal"}  # v_k has just left theta_k: no share has moved
    found = Kept()
    data = federation(clients_per_round=2)
    fit(Regression(), data, 1, algorithm=Ditto(), callbacks=[found])
    chains = data.sampler.draw([0, 1, 2, 3], data.seed, 0)
    assert found.states.keys() == {f"client-{k}" for chain in chains for k in chain}
    assert all(state.keys() == {"personal"} for state in found.states.values())  # no buffers to keep


class Kept(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        kept = trainer.callbacks[0].state_dict()["clients"]
        self.states = {name: dict(state["algorithm"]) for name, state in kept.items() if state["algorithm"]}
        self.layers = {name: dict(state["personal"]) for name, state in kept.items()}


def losses(module, algorithm, folder):
    saved = torch.load(folder / "checkpoints" / "last.ckpt")
    (state,) = (s for s in saved["callbacks"].values() if "clients" in s)
    found = {}
    for client, dataset in held_out().items():
        own = copy.deepcopy(module).double().eval()
        own.load_state_dict(saved["state_dict"])
        vector = torch.nn.utils.parameters_to_vector(own.parameters()).detach()
        private = state["clients"][client]["algorithm"]
        torch.nn.utils.vector_to_parameters(algorithm.personal(private, vector), own.parameters())
        buffers = {n.removeprefix("personal."): b for n, b in private.items() if n.startswith("personal.")}
        own.load_state_dict(buffers, strict=False)
        found[client] = float(own.loss(dataset.tensors))
    return found


@pytest.mark.parametrize("algorithm", [Ditto(lr=0.01), APFL(lr=0.01)], ids=lambda a: type(a).__name__)
def test_every_client_is_evaluated_with_its_own_model(algorithm, tmp_path):
    module, data = HeldOut(batch_norm=True), federation(val_dataset=held_out(), test_dataset=held_out())
    callbacks = [PersonalMetrics(), RoundCheckpoint()]
    trainer = fit(module, data, 3, tmp_path, callbacks=callbacks, enable_checkpointing=True, algorithm=algorithm)
    expected = losses(module, algorithm, tmp_path)
    last = tmp_path / "checkpoints" / "last.ckpt"
    written = torch.load(last)["state_dict"]
    for stage in ("fit", "validate", "test"):
        if stage != "fit":
            trainer = evaluator(FederationCallback(algorithm), PersonalMetrics())
            module = HeldOut(batch_norm=True)
            getattr(trainer, stage)(module, datamodule=data, ckpt_path=last, verbose=False)
        logged = trainer.callback_metrics
        name = "test_loss" if stage == "test" else "val_loss"
        assert {c: float(logged[f"{name}/client/{c}"]) for c in expected} == pytest.approx(expected, rel=1e-6)
        now = module.state_dict().items()
        assert all(torch.equal(v.float(), written[n].float()) for n, v in now)  # the server's again


def test_evaluating_leaves_the_server_alone():
    """Whatever clients' models the module held in validation, the server's is FedAvg's after three rounds."""
    module, data = HeldOut(batch_norm=True), federation(val_dataset=held_out())
    plain = copy.deepcopy(module)
    trainer = fit(module, data, 3, algorithm=Ditto(lr=0.01), callbacks=[PersonalMetrics()])
    reference = fit(plain, data, 3)
    assert_same(module, plain, tolerance=0.0)
    losses = [float(each.callback_metrics["val_loss"]) for each in (trainer, reference)]
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_what_cannot_be_evaluated_is_said(tmp_path):
    data = federation(val_dataset=held_out(), test_dataset=held_out())
    with pytest.raises(UserError, match="FedAvg trains no personal models: leave the callback out, or take Ditto"):
        fit(HeldOut(), data, 1, algorithm=FedAvg(), callbacks=[PersonalMetrics()])
    with pytest.raises(UserError, match="personal models stand in a run's checkpoint: give it, as ckpt_path"):
        evaluator(FederationCallback(Ditto()), PersonalMetrics()).test(HeldOut(), datamodule=data, verbose=False)
    private: Any = {"mechanism": CentralNoise(1.0, 1.0), "buffers": "exclude", "algorithm": Ditto()}
    with pytest.raises(UserError, match="tells of single clients' models, which a private run does not: leave it out"):
        fit(HeldOut(), data, 1, tmp_path, callbacks=[PersonalMetrics()], **private)
    common = federation(val_dataset=client_sets((6,))[0])
    with pytest.warns(UserWarning, match="held-out data are nobody's, so the server's model is evaluated"):
        fit(HeldOut(), common, 1, algorithm=Ditto(), callbacks=[PersonalMetrics()])


def test_a_users_mistakes(tmp_path):
    for build, said in (
        (lambda: Ditto(lam=-1.0), "Ditto's lam is -1.0; it must be 0"),
        (lambda: Ditto(lr=0.0), "Ditto's lr is 0.0; it must be above 0"),
        (lambda: Ditto(first_round=-1), "Ditto's first_round is -1; it must be at least 0"),
        (lambda: FedRep(share=1.0), "FedRep's share is 1.0; it must lie in"),
        (lambda: APFL(share=1.5), "APFL's share is 1.5; it must lie in"),
    ):
        assert_refused(said, build)
    with pytest.raises(UserError, match="Ditto trains a second model by the loss that training_step returns, and"):
        fit(TwoOptimizers(), federation(), 1, algorithm=Ditto())
    with pytest.raises(UserError, match="FedRep needs layers that clients keep"):
        fit(Regression(), federation(), 1, algorithm=FedRep())
    with pytest.raises(UserError, match="APFL looks at a client's records outside its local steps"):
        fit(Regression(), federation(), 1, tmp_path, algorithm=APFL(), mechanism=RecordNoise(1.0, 1.0))
