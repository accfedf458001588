"""Embedding algorithms on the server, and what all of them have in common: resuming, and what a user may get wrong."""

import pytest
import torch
from torch import Tensor, nn

from lit_epgan.callbacks import FederationCallback
from lit_epgan.engine import Message, Rounds, Server, passing
from lit_epgan.federated import EmbeddingOnServer, EmbeddingSites, FedAvg, MatchedEmbedding
from lit_epgan.lib.errors import UserError
from tests.federations import assert_resumes, federation, fit
from tests.modules import Regression
from tests.refusals import assert_refused
from tests.test_embedding_sites import FAST, ROUGH, Cloud, data, exact, records
from tests.test_generator_sites import Draw


class Totals(EmbeddingOnServer):
    def __init__(self, **options) -> None:
        super().__init__(**(ROUGH | options))
        self.totals: list[dict[str, Tensor]] = []
        self.parameters: list[Tensor] = []

    def round(self, server: Server) -> Rounds:
        self.totals.append({})
        yield from passing(super().round(server), lambda asked: asked, lambda _, report: self._note(report))
        self.parameters.append(server.parameters.clone())

    def _note(self, report: Message) -> None:
        self.totals[-1].update(vars(report)["_total"].sums)  # all that has come, not only what was declared


def test_nothing_but_the_release_reaches_the_server():
    algorithm, module = Totals(noise_multiplier=1.0), Cloud()
    trainer = fit(module, data(), rounds=3, algorithm=algorithm)
    assert [set(total) for total in algorithm.totals] == [{"embedding"}, set(), set()]
    assert algorithm.parameters[0].tolist() == [0.0, 0.0, 1.0, 1.0]  # nothing was trained in round 0
    assert {(seen.round, seen.client) for seen in module.seen} == {(1, ""), (2, "")}
    assert not torch.equal(algorithm.parameters[1], algorithm.parameters[0])
    callback = next(c for c in trainer.callbacks if isinstance(c, FederationCallback))
    clients = callback.state_dict()["clients"]
    kept = {name for state in clients.values() for name, held in state.items() if held}
    assert kept == {"released"}  # which has left the client
    released = [clients[f"client-{k}"]["released"]["embedding"] for k in range(3)]
    torch.testing.assert_close(torch.stack(released).sum(0), algorithm.totals[0]["embedding"])
    error = algorithm.totals[0]["embedding"] - exact(algorithm, [0, 1, 2])
    sigma = algorithm.release.guarantee.sigma * 3**0.5
    assert float(error[1:].std()) == pytest.approx(sigma, rel=0.25)


def test_buffers_do_not_leave_a_client_and_the_server_trains_on_points_alone():
    module, draw = Cloud(), Draw(12, "herded")
    algorithm = EmbeddingOnServer(server_steps=7, batch_size=9, **ROUGH)
    fit(module, data(), rounds=4, algorithm=algorithm, callbacks=[draw])
    on_server = [s for s in module.seen if s.round > 0 and s.client == "" and s.weight is None and len(s.x) == 9]
    assert len(on_server) == 3 * 7
    points = {tuple(p) for p in draw.found[0].tolist()}
    assert all(tuple(row) in points for seen in on_server for row in seen.x.tolist())
    module = Cloud()
    fit(module, data(), rounds=3, algorithm=EmbeddingOnServer(server_steps=5, batch_size=9, **ROUGH))
    assert float(module.rows_seen) == 2 * 5 * 9  # the server's own


def test_a_matched_generator_has_the_datas_mean_and_scale():
    """Of one cloud: the generator's own form can match it, so the optimum is known."""
    module = Cloud()
    options = FAST | {"frequencies": 128, "bandwidths": (0.2, 0.5)}
    fit(module, data((400,)), rounds=4, algorithm=MatchedEmbedding(server_steps=80, lr=0.1, average=0.9, **options))
    assert module.generator.mean.tolist() == pytest.approx(records((400,))[0].mean(0).tolist(), abs=0.06)
    assert module.generator.scale.abs().tolist() == pytest.approx([0.3, 0.3], abs=0.08)
    average = dict(module.average.named_buffers())
    for name, parameter in module.generator.named_parameters():
        assert not torch.equal(average[name], parameter)
        torch.testing.assert_close(average[name], parameter.detach(), atol=0.03, rtol=0)


def test_a_generator_is_matched_to_moments_without_random_features():
    """DP-MEPF, with (1, x, x^2) as the features that everybody knows: their means agree where those of x do."""

    class Known(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([torch.ones_like(x[:, :1]), x], 1)

    module = Cloud()
    options = {"embedding": "moments", "features": Known(), "frequencies": None, "points": 20}
    algorithm = Totals(**options)
    fit(Cloud(), data((400,)), rounds=1, algorithm=algorithm)
    x = records((400,))[0]
    h = torch.cat([torch.ones_like(x[:, :1]), x], 1)
    first, second = h / h.norm(dim=1, keepdim=True), h.square() / h.square().norm(dim=1, keepdim=True)
    expected = torch.cat([torch.tensor([400.0]).double(), torch.cat([first, second], 1).sum(0) / 2**0.5])
    torch.testing.assert_close(algorithm.totals[0]["embedding"], expected)
    fit(module, data((400,)), rounds=5, algorithm=MatchedEmbedding(server_steps=100, lr=0.1, average=0.9, **options))
    assert module.generator.mean.tolist() == pytest.approx(x.mean(0).tolist(), abs=0.1)


@pytest.mark.parametrize(
    "algorithm",
    [
        lambda: EmbeddingSites(noise_multiplier=0.1, noise_seed=0, **ROUGH),
        lambda: EmbeddingOnServer(server_steps=5, noise_multiplier=0.1, noise_seed=0, **ROUGH),
        lambda: MatchedEmbedding(server_steps=5, **ROUGH),
    ],
    ids=["sites", "on server", "matched"],
)
def test_a_resumed_run_ends_as_if_it_had_not_stopped(algorithm, tmp_path):
    assert_resumes(Cloud, data, algorithm, tmp_path)


def test_what_cannot_be_is_named():
    assert_refused(r"FedAvg cannot be its inner algorithm: leave inner out", EmbeddingOnServer, inner=FedAvg())
    for argument in ({"own_rows": 0}, {"points": 0}, {"frequencies": 0}, {"herding_steps": 0}, {"smoothing": -1.0}):
        assert_refused(next(iter(argument)), EmbeddingSites, **argument)
    assert_refused("embedding is 'moment'", MatchedEmbedding, embedding="moment")
    for of_a_kernel in ({"bandwidths": (1.0,)}, {"frequencies": 7}):
        with pytest.raises(UserError, match="bandwidths and frequencies are a kernel's"):
            MatchedEmbedding(embedding="moments", **of_a_kernel)
    assert_refused("server_steps and batch_size are 0 and 32", EmbeddingOnServer, server_steps=0)
    assert_refused("lr and average", MatchedEmbedding, lr=0.0)


@pytest.mark.parametrize(
    ("algorithm", "module", "message"),
    [
        (EmbeddingSites(), Regression, r"Regression has no sample\(n, generator\)"),
        (MatchedEmbedding(), Regression, "Regression has no generator and no latent_dim"),
        (EmbeddingSites(features="random_convolutions", **FAST), Cloud, "choose identity"),
        (EmbeddingSites(features=nn.Threshold(1e9, 0.0), **FAST), Cloud, "no gradient passes through the features"),
        (EmbeddingSites(dimensions=3, **FAST), Cloud, "dimensions are an image's frequencies"),
    ],
)
def test_what_does_not_suit_the_module_is_named(algorithm, module, message):
    with pytest.raises(UserError, match=message):
        fit(module(), federation() if module is Regression else data(), rounds=1, algorithm=algorithm)
