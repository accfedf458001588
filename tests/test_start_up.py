"""What a command does not need, it does not import; and what it imports it does not search for garbage."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer

from lit_epgan.callbacks import FederationCallback
from lit_epgan.cli.process import no_collection
from tests.processes import ROOT, environment

COMMAND = """import contextlib
from lit_epgan.cli.main import main
with contextlib.suppress(SystemExit):
    main({words})
"""


def last_line(code):
    """What a fresh interpreter prints last."""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def loaded_by(code):
    return set(last_line(f"{code}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})").split())


def test_what_only_prints_a_text_imports_no_library():
    commands = "\n".join(COMMAND.format(words=words) for words in (["--version"], ["--help"], ["fit", "--help"]))
    assert not loaded_by(commands) & {"torch", "numpy", "lightning", "jsonargparse"}


@pytest.mark.slow
def test_neither_a_script_nor_a_shown_configuration_imports_what_makes_tables_and_pages():
    """Nor looks for garbage: Lightning and PyTorch alone make more than a quarter of a million objects, now frozen."""
    names = "{name.split('.')[0] for name in sys.modules}"
    script = f"import sys, lit_epgan.callbacks, lit_epgan.datamodules, lit_epgan.modules\nscript = {names}\n"
    shown = COMMAND.format(words=["fit", "--config", "toy.yaml", "--print_config"])
    asked = f"import gc\nprint(gc.get_freeze_count(), 'wandb' in script, *script | {names})"
    frozen, logs, *found = last_line(script + shown + asked).split()
    assert "lightning" in found
    assert not {*found} & {"pandas", "jinja2", "sklearn"}
    assert logs == "False"
    assert int(frozen) > 250_000


def test_garbage_is_collected_again_also_after_an_error_unless_somebody_has_switched_that_off():
    def fail() -> None:
        with no_collection():
            assert not gc.isenabled()
            raise ImportError

    with pytest.raises(ImportError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


SEARCH = "PYTORCH_NVML_BASED_CUDA_CHECK"


@pytest.mark.parametrize(("gpu", "searches"), [(False, "0"), (True, "1")])
def test_a_federation_in_a_script_makes_no_search(monkeypatch, gpu, searches):
    """With a GPU, Lightning's setting stands."""
    monkeypatch.setenv(SEARCH, "1")  # as Lightning's import sets it
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    off = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    callback = FederationCallback()
    trainer = Trainer(accelerator="cpu", callbacks=[callback], **off)
    callback.setup(trainer, LightningModule(), "validate")
    assert os.environ[SEARCH] == searches
