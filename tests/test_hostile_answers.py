"""An answer that is not as its message declares is left out, whoever sends it; the others' training goes on."""

import pytest
import torch
from torch import Tensor

from lit_epgan.engine import Answer, Count, Message, PlainFederation, Weighted, merged
from lit_epgan.engine.rounds import Round, run_round
from lit_epgan.errors import UserError
from lit_epgan.federated import ExpectationPropagation, FedAvg


def federation(algorithm=None) -> PlainFederation:
    torch.manual_seed(0)
    return PlainFederation(
        algorithm or FedAvg(),
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)),
        lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda client, round_: [(torch.randn(8, 3, generator=torch.Generator().manual_seed(client)), torch.ones(8, 2))],
        [8.0, 8.0, 8.0],
    )


def after_a_round(hostile=None, dropped: bool = False, algorithm=None) -> Tensor:
    """The server's parameters where client 1 answers so."""
    plain = federation(algorithm)

    def answers(round_):
        for k, answer in plain.answers(plain._asked(round_)):
            if k != 1 or (hostile is None and not dropped):
                yield k, answer
            elif hostile is not None:
                yield k, hostile(answer)

    run_round(Round(plain.federation, 0), answers)
    return plain.server.parameters


def changed(answer: Answer, **entries) -> Answer:
    report = {name: term for name, term in (dict(answer.report) | entries).items() if term is not None}
    return Answer(report, answer.private, answer.steps)


def change(answer: Answer) -> Tensor:
    return answer.report["change"].tensor


HOSTILE = {
    "float8": (lambda a: changed(a, change=Weighted(change(a).to(torch.float8_e4m3fn), 8.0)), "float8"),
    "complex": (lambda a: changed(a, change=Weighted(change(a).to(torch.complex64), 8.0)), "complex64"),
    "integers": (lambda a: changed(a, change=Weighted(change(a).long(), 8.0)), "tensor of torch.int64"),
    "bool": (lambda a: changed(a, change=Weighted(change(a).bool(), 8.0)), "tensor of torch.bool"),
    "a number": (lambda a: changed(a, change=Count(1.0)), "'change' is a number"),
    "shape": (lambda a: changed(a, change=Weighted(torch.zeros(3), 8.0)), r"'change' has the shape \[3\], not \[12\]"),
    "weight below 0": (lambda a: changed(a, change=Weighted(change(a), -5.0)), "has the number -5"),
    "weight of 1e300": (lambda a: changed(a, change=Weighted(change(a), 1e300)), "has the number 1e[+]300"),
    "weight in all": (lambda a: changed(a, weight=Count(-1000.0, True)), "'weight' has the number -1000"),
    "records": (lambda a: changed(a, **{"federation/weight": Count(1e306, True)}), "has the number 1e[+]306"),
    "a tensor for a number": (lambda a: changed(a, weight=torch.ones(1)), "'weight' is a tensor of torch.float32"),
    "unknown": (lambda a: changed(a, extra=torch.ones(3)), "nothing asks for 'extra'"),
    "unknown buffer": (lambda a: changed(a, **{"module/no": torch.ones(3)}), "nothing asks for 'module/no'"),
    "buffer's shape": (
        lambda a: changed(a, **{"module/1.running_mean": Weighted(torch.ones(7), 8.0)}),
        r"running_mean' has the shape \[7\], not \[2\]",
    ),
    "missing": (lambda a: changed(a, change=None), "it lacks 'change'"),
    "steps": (lambda a: Answer(a.report, a.private, 10**18), "it counts 1000000000000000000 steps"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_left_out_with_the_clients_name(name):
    hostile, words = HOSTILE[name]
    with pytest.warns(UserWarning, match=f"round 0: the answer of client 'client-1' is left out: .*{words}"):
        found = after_a_round(hostile)
    assert torch.equal(found, after_a_round(dropped=True))
    assert not torch.equal(found, after_a_round())


class Summing(FedAvg):
    """Sends sums of no known shape beside its change."""

    class Report(Message):
        change: Tensor = merged("mean")
        sums: Tensor = merged("sum")

    def train(self, client, sent) -> Message:
        client.fit(sent["parameters"])
        return self.Report(change=client.change, sums=torch.ones(4))


def test_a_sum_has_the_shape_of_the_first_one():
    with pytest.warns(UserWarning, match=r"'client-1' is left out: 'sums' has the shape \[5\], not \[4\]"):
        found = after_a_round(lambda a: changed(a, sums=torch.ones(5)), algorithm=Summing())
    assert torch.equal(found, after_a_round(dropped=True, algorithm=Summing()))


@pytest.mark.parametrize("training", [True, False])
def test_a_round_without_an_answer_of_use_is_refused(training):
    plain = federation(ExpectationPropagation(prior_scale=1.0, prior_precision=1.0))

    def answers(round_):
        hostile = round_.exchange.training == training
        return ((k, changed(a, extra=torch.ones(3)) if hostile else a) for k, a in plain.answers(plain._asked(round_)))

    before = plain.server.parameters.clone()
    with (
        pytest.raises(UserError, match=r"round 0: no client.s answer is as it was asked for \(left out: client-0"),
        pytest.warns(UserWarning, match="nothing asks for 'extra'"),
    ):
        run_round(Round(plain.federation, 0), answers)
    assert torch.equal(plain.server.parameters, before)
