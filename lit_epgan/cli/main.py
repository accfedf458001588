"""The command line: what to run, and every mistake of the user in one sentence."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from lit_epgan.cli.process import importing, printable_messages
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.signals import Stopped, stoppable
from lit_epgan.lib.text import markup, printable
from lit_epgan.runs.config_files import ALGORITHMS, INSPECTIONS, STUDIES, known_configs, resolve_configs
from lit_epgan.runs.run_folder import is_first_rank

if TYPE_CHECKING:
    from rich.console import Console

    from lit_epgan.privacy.ledger import Ledger, LedgerState

HELP = """usage: python -m lit_epgan {{fit,validate,test,predict,study}} --config NAME.yaml ... [--KEY VALUE ...]
       python -m lit_epgan compare --config NAME.yaml [--KEY VALUE ...]
       python -m lit_epgan federate --config NAME.yaml [--KEY VALUE ...]
       python -m lit_epgan inspect --config NAME.yaml [--KEY VALUE ...]
       python -m lit_epgan privacy {{show,give-back}} LEDGER
       python -m lit_epgan new NAME

  fit        train; everything goes to one folder, runs/NAME (or --trainer.default_root_dir DIR)
  validate   evaluate the newest checkpoint of the run (or --ckpt_path FILE) on the validation data
  test       evaluate it on the test data
  predict    write samples of it to the run's folder
  study      methods x seeds in parallel: a table with t-tests, plots and one HTML page
  compare    each client alone, all in one place, federated, with noise, and trees: a table by client, one page
  federate   as fit, a process for the server and one for each client, carried by NVIDIA FLARE
  inspect    look at users' data under differential privacy: groups side by side, detectors, one HTML page
  privacy    show what runs on a private data set have spent of its budget; give-back: what dead ones have reserved
  new        a folder with a module, a data module, a configuration and a test, to begin your own from

  --config NAME.yaml         looked up in the working directory, then in configs/
    --config algorithms/NAME.yaml   another algorithm on top of it; everything goes to runs/NAME_ALGORITHM
  --KEY VALUE                overrides a key of it, e.g. --model.lr 1e-3 --trainer.devices 2
  --ckpt_path last           goes on where the run was stopped (fit)
  --print_config             shows the resolved configuration
  fit --help                 the common keys; fit --help all every one; fit --model.help GAN those of a class
  --version                  this package's version

configs: {configs}
algorithms: {algorithms}
studies: {studies}
inspections: {inspections}

LIT_EPGAN_DEBUG=1 shows the traceback behind an error.
"""
LEDGER = "python -m lit_epgan privacy {show,give-back} LEDGER"
COMMANDS = ("fit", "validate", "test", "predict", "study", "compare", "federate", "inspect", "privacy", "new")


def main(args: list[str] | None = None) -> int:
    """Run the command line, by default with the process's own words, and return 0, 2 for a mistake of the user (told in
    one sentence), 130 for Ctrl-C, 143 for SIGTERM, or the study's own exit code."""
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help"):
        kinds = {"configs": "", "algorithms": ALGORITHMS, "studies": STUDIES, "inspections": INSPECTIONS}
        print(HELP.format(**{title: ", ".join(known_configs(kind)) for title, kind in kinds.items()}))
        return 0
    if args[0] in ("-V", "--version"):
        print(f"lit_epgan {version('lit_epgan')}")
        return 0
    if (page := short_help(args)) is not None:
        print(page)
        return 0
    args = with_full_names(without_all(args))
    try:
        with printable_messages(), stoppable():
            return _run(args)
    except Stopped as stopped:
        if is_first_rank():
            print(stopped.sentence, file=sys.stderr)
        return stopped.exit_code
    except Exception as error:  # told in a sentence if it is a user's mistake, else raised again
        if os.environ.get("LIT_EPGAN_DEBUG"):
            raise
        sentence = _sentence(error, args)
        if sentence is None:
            raise
        print(f"error: {printable(sentence)}", file=sys.stderr)
        return 2


def console() -> int:
    """Run ``lit-epgan``, which finds a user's own modules in the working directory, as ``python -m lit_epgan`` does."""
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return main()


def _run(args: list[str]) -> int:
    command = args[0]
    for word in args:
        if any(map(_is_no_text, word)):
            raise UserError(f"{word} on the command line is not UTF-8: rename the file, or give a symbolic link to it.")
    if command == "study":
        from lit_epgan.cli.study import study  # each command pays for its own imports only

        return study(args[1:])
    if command == "compare":
        from lit_epgan.cli.compare import compare

        return compare(args[1:])
    if command == "fit-and-test":  # as `compare` starts its runs
        tested = args[1 : args.index("--ckpt_path")] if "--ckpt_path" in args else args[1:]
        return main(["fit", *args[1:]]) or main(
            ["test", *tested, "--trainer.callbacks+", "lit_epgan.callbacks.TestedRecords"]
        )
    if command == "federate":
        with importing():
            from lit_epgan.cli.federate import federate

        return federate(args[1:])
    if command == "inspect":
        with importing():
            from lit_epgan.cli.inspect import inspect

        return inspect(args[1:])
    if command == "privacy":
        return privacy(args[1:])
    if command == "new":
        from lit_epgan.cli.new import new

        return new(args[1:])
    if command == "evaluate":  # as `federate --evaluate` starts its ends
        with importing():
            from lit_epgan.cli.evaluation import take_part

        return take_part(args[1:])
    if command not in COMMANDS:
        raise UserError(_unknown_command(command))
    resolved = resolve_configs(args)
    with importing():
        from lit_epgan.cli.lightning_cli import FederatedCLI
        from lit_epgan.cli.process import bound_memory
    bound_memory()
    FederatedCLI(resolved)
    return 0


def privacy(args: list[str]) -> int:
    """Print what every run on a private data set has paid, and for what: ``privacy show LEDGER``; or free what was
    reserved and never released: ``privacy give-back LEDGER``."""
    if args and args[-1] in ("-h", "--help"):
        print(
            f"Usage: {LEDGER}\n\nshow: what every run, query and rerun on one data set has released, and what it adds "
            "up to.\ngive-back: what processes that are dead have reserved and never released is free again."
        )
        return 0
    if len(args) != 2 or args[0] not in ("show", "give-back"):
        raise UserError(f"Usage: {LEDGER}")
    path = Path(args[1])
    if not path.is_file():
        raise UserError(f"There is no ledger {path}.")
    with importing():
        from rich.console import Console

        from lit_epgan.privacy import Ledger
    if args[0] == "give-back":
        give_back(Ledger(path))
    else:
        show(Ledger(path).read(), Console())
    return 0


def give_back(ledger: "Ledger") -> None:
    """Free what dead processes have reserved, and print what that is."""
    before = ledger.read().total().epsilon
    given = ledger.give_back()
    for account in given:
        print(
            printable(
                f"{account.what}: {account.planned.count - account.made} of {account.planned.count} reserved releases "
                f"are given back, and {account.made} stays counted. Process {account.process} is dead."
            )
        )
    if not given:
        print("Nothing is given back: all that is reserved belongs to processes that may still run.")
        return
    print(
        "A release stands in the ledger before its noise is drawn, so nobody has seen anything of those. Spent or "
        f"reserved: from epsilon {before:.3g} to {ledger.read().total().epsilon:.3g}."
    )


def show(book: "LedgerState", console: "Console") -> None:
    """Print what was spent on what, and what may still be spent."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from lit_epgan.privacy.ledger import EVERYONE

    table = Table(box=SIMPLE_HEAD)
    whose = "records of" if book.unit == "record" else "users"
    for heading in ("since", "run", whose, "releases", "state"):
        table.add_column(heading, overflow="fold")
    for account in book.accounts.values():
        state = "ended" if account.ended else f"{account.made} of {account.planned.count} made, all reserved"
        cells = (account.since, account.what, account.group, str(account.releases), state)
        table.add_row(*map(markup, cells))
    console.print(table)
    for group in book.groups():
        name = "all together" if group == EVERYONE else f"on {group}"
        console.print(f"{printable(name)}: {book.spent(group)}", markup=False, highlight=False)
    if book.budget.epsilon is not None:
        left = max(0.0, book.budget.epsilon - book.total().epsilon)
        console.print(f"budget: epsilon {book.budget.epsilon:g} at delta {book.budget.delta:g}; {left:.3g} is left")


def _unknown_command(word: str) -> str:
    close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.4)
    hint = (
        f" Did you mean {close[0]}?" if close else " Put the command first: python -m lit_epgan fit --config NAME.yaml."
    )
    return f"There is no command {word!r}; there are {', '.join(COMMANDS)}.{hint}"


def _is_no_text(character: str) -> bool:
    return "\ud800" <= character <= "\udfff"  # which stands for a byte that is not UTF-8


def _sentence(error: Exception, args: list[str]) -> str | None:
    from lit_epgan.cli.error_messages import explain, explain_by_setting, user_settings, with_file, with_key

    sentence = str(error) if isinstance(error, UserError) else explain(error)
    given = user_settings(_resolved(args))
    told = explain_by_setting(error, given) if sentence is None else with_key(sentence, error, given)
    return None if told is None else with_file(told, given)


def _resolved(args: list[str]) -> list[str]:
    try:
        return resolve_configs(args)
    except UserError:  # which is the mistake that is told
        return args


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
  --trainer.logger+ NAME           tensorboard, mlflow or wandb beside the others
  --trainer.logger false           no Weights & Biases, no metrics.csv

going on
  --ckpt_path last                 where the run was stopped{ckpt}
  --accept_changes true            although settings have changed

  --help all                       every key there is
"""


def short_help(args: Sequence[str]) -> str | None:
    """The page for a command's words; None where they ask for no help, or for all of it."""
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
