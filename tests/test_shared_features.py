"""Mean embeddings over features of the federation's own model: those of one round, for everybody and for good."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.bayes import EmbeddingFactor
from lit_epgan.callbacks import RoundCheckpoint
from lit_epgan.engine import Broadcast, Client, Message
from lit_epgan.errors import UserError
from lit_epgan.federated import EmbeddingSites
from lit_epgan.federated.function_space.embedding_release import SharedFeatures
from tests.federations import fit
from tests.test_embedding_sites import FAST, Cloud, data, records, state_of

LEARNED: dict[str, Any] = FAST | {"features": "critic.0", "release_round": 2}


class Critical(Cloud):
    """With a network beside, which every step changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self.critic(batch[0]).square().mean()


class Received(EmbeddingSites):
    """Keeps the critic's first layer as each round's first client receives it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.received: dict[int, dict[str, Tensor]] = {}

    def train(self, client: Client, sent: Broadcast) -> Message:
        layer = client.module.get_submodule("critic.0")
        self.received.setdefault(client.round, {k: v.clone() for k, v in layer.state_dict().items()})
        return super().train(client, sent)


def test_features_are_those_of_the_round_of_the_release() -> None:
    algorithm = Received(**LEARNED)
    trainer = fit(Critical(), data(), rounds=5, algorithm=algorithm)
    assert len(algorithm.received) == 5
    layer = nn.Linear(2, 8).double()
    released = state_of(trainer)["embedding"]
    fourier = algorithm.release.phi[-1]
    for round_, state in algorithm.received.items():
        layer.load_state_dict(state)
        with torch.no_grad():
            x = torch.cat(records())
            expected = EmbeddingFactor.of([x], nn.Sequential(layer, fourier), x).statistics
        assert torch.allclose(released, expected) == (round_ == 2)


def test_before_the_release_clients_train_alone() -> None:
    module = Critical()
    fit(module, data(), rounds=4, algorithm=EmbeddingSites(**LEARNED))
    assert {seen.round for seen in module.seen if seen.weight is None} == {0, 1, 2}
    assert {seen.round for seen in module.seen if seen.weight is not None} == {3}


@pytest.mark.parametrize("finished", [1, 2, 3, 4])
def test_a_resumed_fit_is_the_uninterrupted_one(finished: int, tmp_path: Path) -> None:
    whole, cut = Critical(), Critical()
    options: dict[str, Any] = {"callbacks": [RoundCheckpoint(str(tmp_path))], "enable_checkpointing": True}
    expected = state_of(fit(whole, data(), rounds=5, algorithm=EmbeddingSites(**LEARNED)))
    fit(Critical(), data(), rounds=finished, algorithm=EmbeddingSites(**LEARNED), **options)
    options["callbacks"] = [RoundCheckpoint(str(tmp_path))]
    path = {"ckpt_path": str(tmp_path / "last.ckpt")}
    found = state_of(fit(cut, data(), rounds=5, algorithm=EmbeddingSites(**LEARNED), **path, **options))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    for name, value in whole.state_dict().items():
        assert torch.equal(cut.state_dict()[name], value), name


def test_the_copy_gives_what_the_submodule_gives_and_stays(tmp_path: Path) -> None:
    module = Critical()
    x = torch.cat(records())
    shared = SharedFeatures(module, "critic.1")
    expected = torch.tanh(module.critic[0](x))
    assert torch.equal(shared(x), expected)
    with torch.no_grad():
        module.critic[0].weight += 1
    assert torch.equal(shared(x), expected)
    other = SharedFeatures(module, "critic.1")
    other.load(shared.vector)
    assert torch.equal(other(x), expected)
    assert torch.equal(SharedFeatures(module, "critic")(x), module.critic(x))


def test_nonsense_is_refused() -> None:
    with pytest.raises(UserError, match="release_round is -1"):
        EmbeddingSites(release_round=-1)
    with pytest.raises(UserError, match=r"features 'critic\.7' do not exist: choose .*, a submodule of the model"):
        fit(Critical(), data(), rounds=1, algorithm=EmbeddingSites(features="critic.7", **FAST))
