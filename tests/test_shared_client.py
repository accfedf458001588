"""A client that several ranks train."""

import os
import secrets
import sys

import pytest
import torch

from lit_epgan.carriers.fit import at_institution
from lit_epgan.carriers.protocol import Endpoint
from lit_epgan.cli.main import main
from lit_epgan.fit.ends import SharedClient, rows_of
from tests.processes import Started
from tests.same_weights import assert_same, last_checkpoint

# batches of 7 rows, so that two ranks have 4 and 3; FedProx adds a loss of its own
WORDS = ["--config", "digits_classifier.yaml", "--config", "algorithms/fedprox.yaml", "--data.clients", "2"]
WORDS += ["--data.batch_size", "7", "--data.local_steps", "6", "--trainer.max_epochs", "2"]


def test_each_rank_has_its_rows_and_its_weight_by_which_a_loss_counts(monkeypatch):
    batch = {"x": torch.arange(7), "scale": torch.tensor(2.0), "y": (torch.arange(7),)}
    factors = []
    for rank, rows in ((0, [0, 3, 6]), (1, [1, 4]), (2, [2, 5])):
        monkeypatch.setattr("lit_epgan.fit.ends.rank", lambda rank=rank: rank)
        monkeypatch.setattr("lit_epgan.fit.ends.ranks", lambda: 3)
        client = SharedClient()
        part = client.part(batch)
        assert part["x"].tolist() == part["y"][0].tolist() == rows
        assert part["scale"] == 2.0
        factors.append(client.factor)
    assert (sum(factors), factors) == (pytest.approx(3), pytest.approx([9 / 7, 6 / 7, 6 / 7]))
    client = SharedClient()
    assert client.part(torch.arange(2)).tolist() == [0, 1]  # fewer rows than ranks: all have all
    assert client.factor == 1
    assert rows_of([torch.zeros(5, 2), torch.zeros(3)]) == 5
    assert rows_of("no tensor") == 0
    client, weight = SharedClient(), torch.tensor(3.0, requires_grad=True)
    client.factor = 0.5
    loss = weight * 2
    client.weigh(loss)
    loss.add_(weight * 10)  # an algorithm's loss is alike on all ranks
    loss.backward()
    assert weight.grad == 0.5 * 2 + 10


@pytest.mark.slow
def test_two_ranks_of_an_institution_train_the_model_of_one(tmp_path):
    address, key = str(tmp_path / "s"), secrets.token_hex(16)
    server = Endpoint("server", address, key)
    fits = {"server": (server, WORDS)}
    for name, devices in (("client-0", "1"), ("client-1", "2")):
        fits[name] = (
            Endpoint("institution", address, key, name),
            at_institution([*WORDS, "--trainer.devices", devices]),
        )
    processes = {name: started(tmp_path / name, *fit) for name, fit in fits.items()}
    for process in processes.values():
        assert process.wait(200) == 0, process.printed()
    assert main(["fit", *WORDS, "--trainer.default_root_dir", str(tmp_path / "alone")]) == 0
    assert_same(last_checkpoint(tmp_path / "server" / "run"), last_checkpoint(tmp_path / "alone"))
    sent = (tmp_path / "client-1" / "run" / "sent.csv").read_text().splitlines()
    assert len(sent) == 1 + len((tmp_path / "client-0" / "run" / "sent.csv").read_text().splitlines()[1:])


def started(folder, where, words):
    command = [sys.executable, "-m", "lit_epgan", "fit", *words, "--trainer.default_root_dir", str(folder / "run")]
    return Started(command, **where.environment(), MASTER_PORT=str(20_000 + os.getpid() % 20_000))
