"""Messages of half size: large floating tensors travel as bfloat16, and not where numbers must arrive exactly."""

import csv
import time
from multiprocessing import Pipe
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from lit_epgan.carriers.policy import Policy, ReportFilter
from lit_epgan.carriers.protocol import Endpoint, FederateSettings, Frame, Kind
from lit_epgan.carriers.remote_clients import RemoteClients
from lit_epgan.carriers.remote_server import RemoteServer
from lit_epgan.cli.federate import _own, _terms
from lit_epgan.engine import NormClipping
from lit_epgan.engine.messages import Count, Task, Weighted, tensor_of
from lit_epgan.engine.private import Private
from lit_epgan.engine.runner import Answer
from lit_epgan.engine.wire import LARGE, decode_answer, decode_task, encode_answer, encode_task
from lit_epgan.fit.ends import AtSecureServer, AtServer
from lit_epgan.privacy import CentralNoise, RecordNoise
from tests.pipe_federations import half as federation
from tests.refusals import assert_refused


def task(dtype: torch.dtype = torch.float32) -> Task:
    received = {"parameters": torch.randn(100 * LARGE, dtype=dtype), "bound": torch.rand(LARGE - 1, dtype=dtype)}
    return Task(0, 3, 1, "train", True, received, frozenset(received))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_tensors_have_their_type_again_within_2_to_the_minus_8_and_small_ones_are_exact(
    dtype: torch.dtype,
) -> None:
    sent, cache = task(dtype), dict[str, torch.Tensor]()
    whole, small = encode_task(sent), encode_task(sent, half=True)
    assert len(small) < len(whole) * (0.52 if dtype == torch.float32 else 0.27)
    found = decode_task(small, cache).received
    assert all(torch.equal(cache[name], found[name]) for name in found)
    assert torch.equal(found["bound"], sent.received["bound"])
    exact = sent.received["parameters"]
    assert found["parameters"].dtype == dtype
    assert 0 < float(((found["parameters"] - exact) / exact).abs().max()) <= 2**-8
    answer = Answer({"change": Weighted(exact, 3.0), "n": Count(3.0), "steps": torch.arange(LARGE)}, Private(), 4)
    report = decode_answer(encode_answer(answer, half=True)).report
    assert torch.equal(tensor_of(report["change"]), found["parameters"])
    assert (report["n"], torch.equal(tensor_of(report["steps"]), torch.arange(LARGE))) == (Count(3.0), True)


class Links:
    def __init__(self, link: Any) -> None:
        self.accept, self.close = iter([link]).__next__, link.close


def test_both_ends_send_half_and_the_list_of_what_has_left_says_so(tmp_path: Path) -> None:
    servers, sites = Pipe()
    site = RemoteServer(sites, "a", 0, ReportFilter(Policy(), tmp_path / "sent.csv"), half=True)
    clients: Any = RemoteClients(Links(servers), ["a"], 10.0, 10**7, half=True)  # type: ignore[arg-type]
    assert clients.meet([0], 10.0) == {0}
    sent, answers = task(), list[Any]()
    clients._tell(0, Frame.of(Kind.BEGIN, round=3, trains=True, cohort=1))
    assert site.first() == 3
    Thread(target=lambda: answers.extend(clients.ask({0: sent})), daemon=True).start()
    found = site.task()
    assert isinstance(found, Task)
    change = found.received["parameters"]
    assert not torch.equal(change, sent.received["parameters"])
    site.answer(found, Answer({"change": Weighted(change, 2.0)}, Private(), 1))
    while not answers:
        time.sleep(0.01)
    assert clients.heard[0].bytes < 2.1 * change.numel() + 500
    assert torch.equal(tensor_of(answers[0][1].report["change"]), change)
    (row,) = csv.DictReader((tmp_path / "sent.csv").open())
    assert (row["type"], row["bytes"]) == ("bfloat16", str(2 * change.numel()))


def begin(kind: type[AtServer], folder: Path, mechanism: Any = None, secure: bool = False) -> None:
    terms = FederateSettings(half=True, secure=secure, gather=0.1)
    made = federation("fedavg").federation
    made.mechanism = mechanism
    listener: Any = type("Closed", (), {"accept": lambda self: (_ for _ in ()).throw(SystemExit)})()
    trainer: Any = type("Trainer", (), {"max_epochs": 1})
    kind(Endpoint("server", terms=terms, carrier=listener), folder, {}).begin(made, None, trainer)  # type: ignore[arg-type]


@pytest.mark.parametrize("mechanism", [NormClipping(1.0), CentralNoise(1.0, 1.0)])
def test_they_are_refused_where_reports_are_bounded(tmp_path: Path, mechanism: Any) -> None:
    assert_refused("half size are refused: .* bounds each report, and rounding", begin, AtServer, tmp_path, mechanism)


def test_they_are_refused_under_masks(tmp_path: Path) -> None:
    why = "half size are refused: masks cancel in whole numbers alone"
    assert_refused(why, begin, AtSecureServer, tmp_path, RecordNoise(1.0, 1.0), True)


def test_the_command_has_a_word_for_them() -> None:
    own, rest = _own(["--half_messages", "--config", "a.yaml"])
    assert (_terms(own).half, rest) == (True, ["--config", "a.yaml"])
    assert not _terms(_own([])[0]).half
