"""Any number of ranks gives the same server model: real gloo processes."""

from pathlib import Path

import pytest
import torch

from lit_epgan.privacy.ledger import Ledger
from tests.processes import model, run

pytestmark = pytest.mark.slow


RUNS = [
    ("--module", "regression", "--algorithm", "ep"),
    ("--module", "regression", "--median"),
    ("--module", "gan"),
    ("--module", "gan", "--algorithm", "tilted"),
    ("--module", "regression", "--noise-seed", "1", "--groups", "2"),  # noise once, and not for each rank
    ("--module", "regression", "--noise-seed", "1", "--unit", "record"),
]


@pytest.mark.parametrize("options", RUNS, ids=" ".join)
def test_ranks_agree(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Float64, five rounds, cohorts of 3 of 4 clients, dropout, and a GAN with its own noise.

    On 4 ranks one always stands idle, on 3 ranks clients are shared 2-1-1, so a cohort may leave one idle as well.
    """
    run(tmp_path / "1", *options)
    expected = model(tmp_path / "1")
    for ranks in (2, 3, 4):
        run(tmp_path / str(ranks), *options, devices=ranks)
        for name, value in model(tmp_path / str(ranks)).items():
            torch.testing.assert_close(
                value, expected[name], rtol=1e-6, atol=1e-6 * float(expected[name].abs().max()), msg=f"{ranks}: {name}"
            )


def test_every_client_pays_once_for_its_steps_whichever_rank_trains_it(tmp_path: Path) -> None:
    """A round's cohort of 3 of 4 clients moves from rank to rank; the ledger is one file."""
    books = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        run(folder, "--module", "regression", "--noise-seed", "1", "--unit", "record", devices=ranks)
        accounts = Ledger(folder / "privacy.jsonl").read().accounts.values()
        books.append({each.group: (each.made, each.planned, each.ended) for each in accounts})
    assert books[0] == books[1]
    assert len(books[0]) == 4
    assert all(made > 0 and ended for made, _, ended in books[0].values())


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_chain_of_clients_runs_over_ranks(tmp_path: Path, ranks: int) -> None:
    """A model that another rank's client has trained comes by the server."""
    options = ("--module", "regression", "--algorithm", "fedseq")
    run(tmp_path / "1", *options)
    run(tmp_path / "several", *options, devices=ranks)
    expected = model(tmp_path / "1")
    for name, value in model(tmp_path / "several").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)
