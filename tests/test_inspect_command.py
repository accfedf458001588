"""``inspect`` end to end on a small federation: the page, the ledger, and what is refused before data are read."""

import pytest
import torch
import yaml
from rich.console import Console

from lit_epgan.cli.inspect import PAGE, RELEASED, _keep_earlier, show
from lit_epgan.cli.main import main
from lit_epgan.datamodules import WritersDataModule
from lit_epgan.inspection.view import Check, Findings
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.config_files import INSPECTIONS, config_folders, known_configs
from tests.ledgers import paths, the_ledger

SMALL = [
    *("--data.clients", "60", "--data.images", "8", "--data.held_out_writers", "12", "--epochs", "2"),
    *("--view.frequencies", "16", "--view.points", "9", "--view.steps", "3", "--price.noise_seed", "3"),
]
INSPECT = ["inspect", "--config", "inspect_digits.yaml", *SMALL]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "inspect_digits"


@pytest.mark.slow
def test_an_inspection_from_the_command_to_the_page(folder, capsys):
    before = torch.get_rng_state()
    assert main([*INSPECT, "--price.epsilon", "8", "--selection.below", "0.4", "--selection.above", "0.5"]) == 0
    assert torch.equal(torch.get_rng_state(), before)
    out = capsys.readouterr().out
    assert "how pixels are encoded" in " ".join(out.split())
    assert "cost: (8, 1e-05)-differential privacy for users (one user's whole data set emptied" in out
    html = (folder / "index.html").read_text()
    assert html.count("data:image/png;base64,") == 2  # those of few users are not shown
    assert "too small to be sure of 10 users" in html
    assert "http" not in html
    for words in (
        "detectors raise an alarm",
        "whoever knows the seed",
        "low accuracy",
        "--price.epsilon 8",
        "tag alarm",
    ):
        assert words in html
    (account,) = the_ledger().read().accounts.values()
    assert (account.made, account.ended, account.group) == (1, True, "all users")
    assert "low accuracy, high accuracy (at most 0.4, at least 0.5)" in account.what
    released = tensor_file.load(folder / "released.pt")["released"]
    assert released.shape == (2 * (1 + 2 + 32),)
    assert main([*INSPECT, "--price.epsilon", "8", "--selection", "lit_epgan.inspection.AllExamples"]) == 0
    assert (folder / "1-index.html").read_text() == html
    assert torch.equal(tensor_file.load(folder / "1-released.pt")["released"], released)
    total = the_ledger().read().total()
    assert total.epsilon > 8
    assert f"in the ledger: {total}" in capsys.readouterr().out


def test_quantiles_and_a_given_checkpoint(folder, capsys):
    config = yaml.safe_load((config_folders()[-1] / "inspect_digits.yaml").read_text())
    config["selection"]["init_args"] = {"quantiles": [0.3, 0.6]}
    (folder.parent.parent / "own.yaml").write_text(yaml.safe_dump(config))
    torch.save({"state_dict": state()}, "primary.ckpt")
    words = ["inspect", "--config", "own.yaml", *SMALL, "--checkpoint", "primary.ckpt", "--price.epsilon", "4"]
    code, told = main(words), capsys.readouterr()
    if code:  # an untrained model is right nowhere
        assert "are both" in told.err
    assert "Training" not in told.err
    book = the_ledger().read()
    assert next(iter(book.accounts.values())).what.endswith(", quantiles")
    assert book.total().epsilon <= 4


def test_detectors_are_shown_as_a_table():
    calm = Check("[dark] pixels", "", 0.1, -0.25, 0.5, 0.3, 1.0, False, "")
    loud = Check("edges", "", -0.75, -1.0, -0.5, 0.3, 1.0, True, "")
    console = Console(width=100, record=True)
    show(Findings(checks=[calm, loud], look_next=["Look at [edges]."]), console)
    lines = [" ".join(line.split()) for line in console.export_text().splitlines() if line.strip()]
    assert lines[0] == "1 of 2 detectors raise an alarm"
    assert "[dark] pixels +0.10 -0.25 to +0.50 quiet" in lines
    assert "edges -0.75 -1.00 to -0.50 alarm" in lines
    assert lines[-1] == "Look at [edges]."


def test_it_keeps_what_was_paid_for_and_is_told_from_an_experiment(tmp_path, capsys):
    for turn in range(3):
        for name in (PAGE, RELEASED):
            (tmp_path / name).write_text(str(turn))
        _keep_earlier(tmp_path)
    for name in (PAGE, RELEASED):
        assert [(tmp_path / f"{k}-{name}").read_text() for k in (1, 2, 3)] == ["0", "1", "2"]
    assert main(["inspect", "--help"]) == 0
    assert "one page" in capsys.readouterr().out
    assert "inspect_digits.yaml" in known_configs(INSPECTIONS)
    assert not any(name.startswith(INSPECTIONS) for name in known_configs())


def test_it_locks_a_folder_of_the_last_configs_name(monkeypatch, tmp_path, capsys):
    def taken(folder, option):
        raise UserError(f"{folder} is locked, {option}")

    monkeypatch.setattr("lit_epgan.cli.inspect.locked", taken)
    (tmp_path / "own.yaml").write_text("epochs: 2\n")
    for more, folder in ([], "runs/own"), (["--output", "elsewhere"], "elsewhere"):
        assert main([*INSPECT, "--config", "own.yaml", *more]) == 2
        assert f"error: {folder} is locked, --output" in capsys.readouterr().err


def state():
    generator = torch.Generator().manual_seed(0)
    shapes = {"backbone.layers.1.0.weight": (64, 64), "backbone.layers.1.0.bias": (64,)}
    shapes |= {"head.weight": (10, 64), "head.bias": (10,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_what_passes_the_budget_reads_no_data(monkeypatch, folder, capsys):
    def read(data):
        raise AssertionError("data were read")

    monkeypatch.setattr(WritersDataModule, "load", read)
    assert main([*INSPECT, "--price.budget", "1.5"]) == 2
    assert "allows epsilon 1.5" in capsys.readouterr().err
    assert not paths()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--view.pionts", "3"], "There is no key view.pionts; did you mean view.points?"),
        (["--zzz", "3"], "`inspect --help` lists the keys"),
        (["--selection.below", "0.99"], "the smaller one first"),
        (["--price.epsilon", "0"], "price.epsilon is 0"),
        (["--checkpoint", "no.ckpt"], "no.ckpt does not exist"),
        (["--primary", "null"], "asks what a model gets right"),
        (["--selection", "Nope"], "selection"),
        (["--view.points", "null"], "view.points"),
        (["--config", "digits.yaml"], "federation"),
    ],
)
def test_a_mistake_is_one_sentence(words, sentence, capsys):
    assert main([*INSPECT, *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert sentence in lines[0]
