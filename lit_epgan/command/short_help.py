"""What ``fit --help`` and its like say first: what this project adds, and the common options of a trainer."""

import importlib
from collections.abc import Sequence

ROOMS = ("modules", "datamodules", "federated", "callbacks", "privacy", "engine")  # whose classes go by short names
ALL = "all"  # --help all: every key there is
WHAT = {
    "fit": "trains; all goes to one folder, runs/NAME",
    "validate": "evaluates a run's newest checkpoint on the validation data, each client's own where there are any",
    "test": "evaluates a run's newest checkpoint on the test data, each client's own where there are any",
    "predict": "draws samples from a run's newest checkpoint, or predicts, and writes them to the run's folder",
}
PAGE = """usage: python -m lit_epgan {command} --config NAME.yaml [--config algorithms/NAME.yaml] [--KEY VALUE ...]

{command} {what}.

what is run
  --config NAME.yaml               looked up in the working directory, then in configs/; later files go on top
  --seed_everything N              initialisation, batches, cohorts and partition
  --print_config                   the resolved configuration, and nothing is run

the federation
  --federation.algorithm CLASS     who is merged how: FedAvg, SCAFFOLD, ExpectationPropagation, GeneratorSites, ...
  --federation.mechanism CLASS     privacy: CentralNoise for users, RecordNoise for records, NormClipping, ...
  --federation.aggregator CLASS    in the sum's place: Median, TrimmedMean, Krum
  --federation.sampler CLASS       who takes part in a round: FixedSize, Poisson, InTurn
  --federation.local '[PATTERN]'   parameters that never leave a client
  --federation null                no federation

data and model
  --data CLASS, --data.KEY VALUE   FolderDataModule, TableDataModule, SpeechDataModule, Institutions, ...
  --data.clients_per_round N       how many clients work in a round
  --data.local_epochs N            passes of a client over its data in a round; or --data.local_steps N
  --model CLASS, --model.KEY VALUE a LightningModule, yours or ours: Classifier, GAN, AcousticModel, ...
  --model.help CLASS               the keys of a class; --data.help, --federation.algorithm.help as well

the trainer (Lightning's)
  --trainer.max_epochs N           rounds
  --trainer.devices N              processes or GPUs that share the clients
  --trainer.accelerator NAME       cpu, gpu, auto
  --trainer.precision NAME         32-true, bf16-mixed, ...
  --trainer.default_root_dir DIR   the run's folder
  --trainer.logger false           no Weights & Biases, no metrics.csv

going on
  --ckpt_path last                 where the run was stopped{ckpt}
  --accept_changes true            although settings have changed

  --help all                       every key there is
"""


def short_help(args: Sequence[str]) -> str | None:
    """The page for a command's words; None where they ask for no help, or for all of it.

    Args:
        args: from the command on.
    """
    command, *words = args
    if command not in WHAT or not words or words[-1] not in ("-h", "--help"):
        return None
    ckpt = "" if command == "fit" else "; or a file, or `best` where a checkpoint callback has a monitor"
    return PAGE.format(command=command, what=WHAT[command], ckpt=ckpt)


def without_all(args: Sequence[str]) -> list[str]:
    """The words with ``--help all`` as the parser knows it."""
    words = list(args)
    if len(words) > 1 and words[-1] == ALL and words[-2] in ("-h", "--help"):
        words.pop()
    return words


def with_full_names(args: Sequence[str]) -> list[str]:
    """The words with the class of ``--model.help GAN`` by its full name, which the parser asks for."""
    words = list(args)
    for position, word in enumerate(words[:-1]):
        if word.startswith("--") and word.endswith(".help") and words[position + 1].isidentifier():
            words[position + 1] = _full_name(words[position + 1])
    return words


def _full_name(name: str) -> str:
    rooms = (importlib.import_module(f"lit_epgan.{room}") for room in ROOMS)
    return next((f"{room.__name__}.{name}" for room in rooms if name in room.__all__), name)
