"""An answer that is not as its message declares is left out, whoever sends it; the others' training goes on."""

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_epgan.carriers.protocol import Endpoint
from lit_epgan.engine import (
    Answer,
    Count,
    Mechanism,
    Message,
    NormClipping,
    PlainFederation,
    Poisson,
    Sampler,
    Weighted,
    merged,
)
from lit_epgan.engine.private import Private
from lit_epgan.engine.rounds import Round, run_round
from lit_epgan.federated import SCAFFOLD, ExpectationPropagation, FedAvg
from lit_epgan.fit.ends import AtServer
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import AdaptiveNoise, CentralNoise, CorrelatedNoise, DistributedNoise, RecordNoise


def federation(
    algorithm: Any = None, mechanism: Mechanism | None = None, sampler: Sampler | None = None
) -> PlainFederation:
    torch.manual_seed(0)
    normalised = mechanism is None or not mechanism.private
    return PlainFederation(
        algorithm or FedAvg(),
        torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2) if normalised else torch.nn.Identity()),
        lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda client, round_: [(torch.randn(8, 3, generator=torch.Generator().manual_seed(client)), torch.ones(8, 2))],
        [8.0, 8.0, 8.0],
        mechanism=mechanism,
        sampler=sampler,
    )


def after_a_round(
    hostile: Any = None,
    dropped: bool = False,
    algorithm: Any = None,
    mechanism: Mechanism | None = None,
    who: int = 1,
    sampler: Sampler | None = None,
) -> Tensor:
    """The server's parameters where one client answers so."""
    plain = federation(algorithm, mechanism, sampler)
    honest = plain.answers

    def answers(asked: Any) -> Any:
        for k, answer in honest(asked):
            if k != who or (hostile is None and not dropped):
                yield k, answer
            elif hostile is not None:
                yield k, hostile(answer)

    plain.answers = answers  # type: ignore[method-assign]
    return plain.run(1)


def changed(answer: Answer, **entries) -> Answer:
    report = {name: term for name, term in (dict(answer.report) | entries).items() if term is not None}
    return Answer(report, answer.private, answer.steps)


def grown(answer: Answer, name: str, n: int) -> Answer:
    """With a buffer of a shape that is the client's own."""
    key = f"module/{name}/as/{n}"
    return changed(answer, **{key: Weighted(torch.ones(n), 8.0), f"{key}/weight": Count(8.0, True)})


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
    **{
        f"a buffer {what}": (lambda a, name=name, n=n: grown(a, name, n), words)
        for what, name, n, words in (
            ("as it is", "1.running_mean", 2, "'1.running_mean' has the server's shape"),
            ("of a parameter's name", "0.weight", 3, "'0.weight' is no buffer of the model"),
            ("of a method's name", "1.forward", 3, "'1.forward' is no buffer of the model"),
            ("of no layer", "7.x", 3, "the model has no '7', and so no buffer '7.x'"),
            ("without a name", "", 3, "'' is no buffer of the model"),
        )
    },
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


MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "NormClipping": lambda: NormClipping(1.0, 8.0),
    "CentralNoise": lambda: CentralNoise(1.0, 1.0, noise_seed=0),
    "AdaptiveNoise": lambda: AdaptiveNoise(1.0, 1.0, count_noise=2.0, noise_seed=0),
    "CorrelatedNoise": lambda: CorrelatedNoise(1.0, 1.0, noise_seed=0),
}


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("name", [name for name in HOSTILE if "buffer's" not in name and "as it is" not in name])
def test_answers_are_checked_under_a_mechanism_and_a_private_one_names_nobody(name: str, mechanism: str) -> None:
    made, (hostile, words) = MECHANISMS[mechanism], HOSTILE[name]
    private = made().private
    told = "a client is left out: it is not as it was asked for$" if private else f"client 'client-1' .*: .*{words}"
    with pytest.warns(UserWarning, match=f"round 0: the answer of {told}") as warned:
        found = after_a_round(hostile, mechanism=made())
    assert private != any("client-1" in str(each.message) for each in warned)
    assert torch.equal(found, after_a_round(dropped=True, mechanism=made()))
    assert not torch.equal(found, after_a_round(mechanism=made()))


@pytest.mark.parametrize("mechanism", [DistributedNoise(1.0, 1.0, honest=0.5), RecordNoise(1.0, 1.0)])
def test_answers_are_checked_under_noise_of_the_clients_own(mechanism: Mechanism) -> None:
    round_ = Round(federation(mechanism=mechanism).federation, 0)
    report = {"change": Weighted(torch.ones(len(round_._before.parameters)), 1.0), "weight": Count(1.0, True)}
    report["federation/weight"] = Count(1.0, True)
    assert round_.fault(report) is None
    assert (
        round_.fault(report | {"change": torch.ones(3)})
        == f"'change' has the shape [3], not {[*report['change'].tensor.shape]}"
    )  # type: ignore[union-attr]
    assert round_.fault(report | {"weight": Count(1e13, True)}) is not None


def test_one_clients_buffers_end_no_private_round() -> None:
    """Of all they are the configuration's, and refused with advice."""
    round_ = Round(federation(mechanism=CentralNoise(1.0, 1.0, noise_seed=0)).federation, 0)
    report: Any = {"change": Weighted(torch.ones(8)), "weight": Count(1.0, True), "federation/weight": Count(1.0, True)}
    hostile = report | {"module/new/as/3": torch.ones(3), "module/new/as/3/weight": Count(1.0, True)}
    for reports, left_out in (([report, hostile, report], True), ([hostile, hostile, report], False)):
        round_._know_shapes(True)
        round_.settle(reports)
        assert (round_.fault(hostile) is not None) == left_out
        assert round_.fault(report) is None


def test_a_private_mechanism_lets_no_client_count_for_more_than_one() -> None:
    heavy: Any = lambda a: changed(a, weight=Count(2.0, True))  # noqa: E731
    with pytest.warns(UserWarning, match="the answer of a client is left out"):
        after_a_round(heavy, mechanism=CentralNoise(1.0, 1.0, noise_seed=0))
    after_a_round(heavy)  # of records there may be two


def test_a_private_mechanism_names_nobody_whose_update_is_not_finite() -> None:
    with pytest.warns(UserWarning, match="the update of a client is not finite and is left out$") as warned:
        after_a_round(
            lambda a: changed(a, change=Weighted(change(a) * float("nan"))),
            mechanism=CentralNoise(1.0, 1.0, noise_seed=0),
        )
    assert not any("client-1" in str(each.message) for each in warned)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"module/new/as/3": torch.ones(4), "module/new/as/3/weight": Count(1.0, True)}, r"the shape \[4\], not \[3\]"),
        ({"module/new/as/3": torch.ones(3)}, "it lacks 'module/new/as/3/weight'"),
        ({"module/new/as/x": torch.ones(3), "module/new/as/x/weight": Count(1.0, True)}, r"not \[-1, -1\]"),
        (
            {"module/new/as/2": torch.ones(2).to(torch.float8_e4m3fn), "module/new/as/2/weight": Count(1.0, True)},
            "is a tensor of torch.float8",
        ),
    ],
)
def test_a_buffer_that_the_server_does_not_have_is_as_its_name_says(entries: dict[str, Any], words: str) -> None:
    with pytest.warns(UserWarning, match=f"'client-1' is left out: .*{words}"):
        found = after_a_round(lambda a: changed(a, **entries))
    assert torch.equal(found, after_a_round(dropped=True))


@pytest.mark.parametrize("name", ["new", "1.running_mean"])
def test_one_clients_shape_of_a_buffer_is_nobody_elses(name: str) -> None:
    """What most clients send is taken, as where a module registers its buffers in its first forward."""

    def run(senders: int) -> PlainFederation:
        plain = federation()
        honest = plain.answers
        plain.answers = lambda asked: (  # type: ignore[method-assign]
            (k, grown(answer, name, 7) if k < senders else answer) for k, answer in honest(asked)
        )
        plain.round(0)
        return plain

    with pytest.warns(UserWarning, match=rf"'{name}' has no shape that most clients give it \(here: client-0\)"):
        one = run(1)
    assert torch.equal(one.server.parameters, run(0).server.parameters)
    one.round(1)
    assert dict(one.module.named_buffers()).get(name, torch.ones(2)).shape == (2,)
    assert run(2).federation.tensors.server[name].tolist() == [1.0] * 7


class Summing(FedAvg):
    """Sends sums of no known shape beside its change."""

    class Report(Message):
        change: Tensor = merged("mean")
        sums: Tensor = merged("sum")

    def train(self, client, sent) -> Message:
        client.fit(sent["parameters"])
        return self.Report(change=client.change, sums=torch.ones(4))


class Stacking(FedAvg):
    """Sends tensors beside its change that the server sees by themselves."""

    class Report(Message):
        change: Tensor = merged("mean", like="parameters")
        each: Tensor = merged("stack")

    def train(self, client, sent) -> Message:
        client.fit(sent["parameters"])
        return self.Report(change=client.change, each=torch.ones(4))

    def merge(self, server: Any, report: Any) -> None:
        super().merge(server, report)
        server.parameters += torch.stack(list(report.each.values())).mean()


@pytest.mark.parametrize("who", [0, 1, 2])
@pytest.mark.parametrize(("algorithm", "entry"), [(Summing, "sums"), (Stacking, "each")])
def test_in_one_process_too_no_single_client_decides_which_shape_is_right(
    algorithm: type[FedAvg], entry: str, who: int
) -> None:
    told = rf"'client-{who}' is left out: '{entry}' has the shape \[5\], not \[4\]"
    with pytest.warns(UserWarning, match=told):
        found = after_a_round(lambda a: changed(a, **{entry: torch.ones(5)}), algorithm=algorithm(), who=who)
    assert torch.equal(found, after_a_round(dropped=True, algorithm=algorithm(), who=who))
    assert not torch.equal(found, after_a_round(algorithm=algorithm()))


def test_in_one_process_one_clients_buffers_end_no_private_round() -> None:
    made = lambda: CentralNoise(1.0, 1.0, noise_seed=0)  # noqa: E731
    for name in ("new", "0.bias"):
        with pytest.warns(UserWarning, match="the answer of a client is left out: it is not as it was asked for$"):
            found = after_a_round(lambda a, name=name: grown(a, name, 3), mechanism=made(), who=0)
        assert torch.equal(found, after_a_round(dropped=True, mechanism=made(), who=0))


@pytest.mark.parametrize(
    "entries",
    [
        {"weight": Count(0.5, True)},
        {"weight": Count(0.0, True)},
        {"federation/weight": Count(0.0, True)},
        {"federation/weight": Count(0.5, True), "weight": Count(0.5, True)},
    ],
)
def test_one_clients_odd_counts_end_no_round_of_a_random_cohort(entries: dict[str, Count]) -> None:
    noise = lambda: CentralNoise(1.0, 1.0, noise_seed=0)  # noqa: E731
    with pytest.warns(UserWarning, match="the answer of a client is left out: it is not as it was asked for$"):
        found = after_a_round(lambda a: changed(a, **entries), mechanism=noise(), sampler=Poisson(0.999))
    assert torch.equal(found, after_a_round(dropped=True, mechanism=noise(), sampler=Poisson(0.999)))


def test_numbers_that_a_random_cohort_would_give_away_are_refused_before_anybody_is_asked() -> None:
    with pytest.raises(UserError, match="the algorithm counts 'new' among those who take part"):
        after_a_round(algorithm=SCAFFOLD(), mechanism=CentralNoise(1.0, 1.0, noise_seed=0), sampler=Poisson(0.999))


@pytest.mark.parametrize("training", [True, False])
def test_a_round_without_an_answer_of_use_is_refused(training):
    plain = federation(ExpectationPropagation(prior_scale=1.0, prior_precision=1.0))

    def answers(round_):
        hostile = round_.exchange.training == training
        return ((k, changed(a, extra=torch.ones(3)) if hostile else a) for k, a in plain.answers(plain._asked(round_)))

    before = plain.server.parameters.clone()
    with (
        pytest.raises(
            UserError, match=r"round 0: no client.s answer counts, .*\(client-0: its answer is not as it was as"
        ),
        pytest.warns(UserWarning, match="nothing asks for 'extra'"),
    ):
        run_round(Round(plain.federation, 0), answers)
    assert torch.equal(plain.server.parameters, before)


# Over a carrier -------------------------------------------------------------------------------------------------------


class Clients:
    """In the place of ``RemoteClients``: clients that are all there, some of which answer otherwise."""

    def __init__(self, plain: PlainFederation, hostile: Mapping[int, Callable[[Answer], Answer]]) -> None:
        self._plain, self._hostile, self.present = plain, hostile, set(range(3))
        self.heard: dict[int, Any] = {}
        self.begin = self.meet = self.over = lambda *_: ()

    def ask(self, tasks: Any) -> Any:
        for k, task in tasks.items():
            yield k, self._hostile.get(k, lambda a: a)(self._plain.answer(task, Private()))


@torch.no_grad()
def after_a_carried_round(
    folder: Path, hostile: Mapping[int, Callable[[Answer], Answer]], algorithm: Any = None
) -> tuple[Tensor, list[str]]:
    """The server's parameters, and why each client has not counted, as ``contributions.csv`` says it."""
    plain = federation(algorithm)
    plain.federation.elsewhere = True  # as ``AtServer.begin`` says
    server = AtServer(Endpoint("server", carrier=object()), folder, {})
    server._federation, server._clients = plain.federation, Clients(plain, hostile)  # type: ignore[assignment]
    server.run(Round(plain.federation, 0), lambda _: (), lambda _: None)
    rows = list(csv.DictReader((folder / "contributions.csv").open()))
    assert all((row["counted"] == "1") == (not row["why"]) for row in rows)
    return plain.server.parameters, [row["why"] for row in rows]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("weight of 1e300", "its answer is not as it was asked for: 'change' has the number 1e+300"),
        ("unknown", "its answer is not as it was asked for: nothing asks for 'extra'"),
        ("missing", "its answer is not as it was asked for: it lacks 'change'"),
        ("not finite", "its update is not finite"),
        ("3e38", "its answer is not as it was asked for: its norm, 1e+39, is beyond what the model's numbers hold"),
    ],
)
def test_the_list_of_contributions_says_why_an_answer_is_left_out(tmp_path: Path, name: str, why: str) -> None:
    wild: Any = lambda a: changed(  # noqa: E731
        a, change=Weighted(torch.full_like(change(a), float("nan") if name == "not finite" else float(name)), 8.0)
    )
    with pytest.warns(UserWarning, match="'client-1'"):
        found, whys = after_a_carried_round(tmp_path, {1: HOSTILE[name][0] if name in HOSTILE else wild})
    assert whys[1].startswith(why)
    assert (whys[0], whys[2]) == ("", "")
    assert torch.equal(found, after_a_round(dropped=True))


@pytest.mark.parametrize("first", [torch.ones(5), torch.ones(1), Count(1.0, True)])
def test_no_single_client_decides_which_shape_is_right(tmp_path: Path, first: Any) -> None:
    """Client 0 answers first, and the message leaves the shape of its sums open."""
    with pytest.warns(UserWarning, match="the answer of client 'client-0' is left out: 'sums' has the shape"):
        found, whys = after_a_carried_round(tmp_path, {0: lambda a: changed(a, sums=first)}, Summing())
    assert [bool(why) for why in whys] == [True, False, False]
    with pytest.warns(UserWarning, match="client-0"):
        expected, _ = after_a_carried_round(tmp_path, {0: lambda a: changed(a, sums=None)}, Summing())
    assert torch.equal(found, expected)


def test_where_nobody_knows_which_shape_is_right_a_sentence_says_so(tmp_path: Path) -> None:
    hostile = {k: lambda a, k=k: changed(a, sums=torch.ones(5 + k)) for k in range(2)}
    with (
        pytest.raises(UserError, match=r"no client's answer counts.*as many answers give 'sums' another shape as"),
        pytest.warns(UserWarning, match="is left out"),
    ):
        after_a_carried_round(tmp_path, hostile, Summing())  # type: ignore[arg-type]
