"""LightningCLI as this package uses it: one seed, one folder a run, a federation beside the trainer."""

import contextlib
import logging
import warnings
from argparse import ArgumentError, ArgumentTypeError
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lit_epgan.callbacks import ClientReport, FederationCallback
from lit_epgan.cli.error_messages import disk_error, explain_by_setting, own_error, user_settings
from lit_epgan.cli.parser import check_values, parse_error, quote_numbers, read_null
from lit_epgan.cli.process import no_collection
from lit_epgan.cli.run_end import (
    EndOfFit,
    StopAtBatch,
    draw_samples,
    refuse_empty,
    say_what_was_written,
    stopped_in_a_sentence,
    summary,
    with_writer,
)
from lit_epgan.cli.run_setup import (
    KeepHyperparameters,
    choose_strategy,
    fit_networks,
    hyperparameters,
    make_room,
    place_checkpoints,
    place_loggers,
    refuse_changes,
    refuse_missing_packages,
    say,
    with_loggers,
)
from lit_epgan.fit.options import search_cheaply
from lit_epgan.lib.atomic import replacing
from lit_epgan.lib.errors import UserError
from lit_epgan.runs.checkpoints import best_of, newest_whole, require_whole, seal_checkpoints, where_to_go_on
from lit_epgan.runs.lock import locked
from lit_epgan.runs.run_folder import CHECKPOINTS, CONFIG, MLFLOW_ID, default_folder, is_first_rank

quote_numbers()
read_null()
search_cheaply()  # for fits without a federation, too
logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(
    lambda record: "litlogger" not in record.getMessage()
)
warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # Lightning 2.6 with PyTorch 2.14
warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")  # there is nothing held out


class SaveRunConfig(SaveConfigCallback):
    """Writes the resolved configuration of a fit to ``config.yaml`` in the run's folder, and tells it to W&B."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace the file in one step; a resumed run writes what it runs with now."""
        resolved = self.parser.dump(self.config, skip_none=False)
        if stage == "fit":
            with replacing(Path(trainer.default_root_dir) / CONFIG) as beside:
                beside.write_text(resolved, encoding="utf-8")
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.log_hyperparams(yaml.safe_load(resolved))
            elif isinstance(logger, MLFlowLogger) and stage == "fit":
                (Path(trainer.default_root_dir) / MLFLOW_ID).write_text(str(logger.run_id), encoding="utf-8")


class CheckedOnce(LightningArgumentParser):
    """Writes a configuration out without checking it again: it was when it was read, and it is half of the work."""

    def dump(self, namespace: Namespace, *options: Any, skip_validation: bool = True, **named: Any) -> str:
        """As jsonargparse's, which by default checks first."""
        return str(super().dump(namespace, *options, skip_validation=skip_validation, **named))


class FederatedCLI(LightningCLI):
    """``fit``, ``validate``, ``test`` and ``predict`` of any LightningModule, with a top-level ``federation``."""

    def __init__(self, args: list[str]) -> None:
        strict = {"exit_on_error": False, "allow_abbrev": False}
        self._asked = {args[0]: LightningCLI.subcommands()[args[0]]}
        with contextlib.ExitStack() as self._lock:
            super().__init__(
                args=args,
                seed_everything_default=0,
                save_config_callback=SaveRunConfig,
                parser_class=CheckedOnce,
                save_config_kwargs={"save_to_log_dir": False},
                parser_kwargs={**strict, args[0]: dict(strict)},
            )

    # Parsing

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The command that was asked for: making the others' parsers would take most of a start's parsing."""
        return self._asked

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``federation`` and ``base``, and let one seed drive everything."""
        starts_from = "A config that this config starts from, or a list of them."
        parser.add_argument("--base", type=str | list[str] | None, default=None, help=starts_from)
        goes_on = "Go on from a checkpoint although settings that decide the numbers differ from its run's."
        parser.add_argument("--accept_changes", type=bool, default=False, help=goes_on)
        parser.add_subclass_arguments(FederationCallback, "federation", required=False)
        parser.link_arguments("seed_everything", "data.init_args.seed")

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        parser.set_defaults({"weights_only": True})  # a checkpoint from elsewhere must not run code
        return parser

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse ``args``, whatever ``sys.argv`` holds."""
        words = with_loggers(list(map(str, args or [])))
        refuse_own_seed(words)
        self._words = words
        command, own = words[0], self._subcommand_parsers[words[0]]
        # the parser above it would check everything once more; without one it prints its configuration itself
        del own.parent_parser  # type: ignore[attr-defined]
        try:
            with no_collection():
                config = own.parse_args(words[1:])
        except (ArgumentError, ArgumentTypeError) as error:
            raise UserError(parse_error(error, words, own)) from error
        check_values(config)
        self.config = Namespace({"subcommand": command, command: config})

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration as the user wrote it; Lightning would overwrite it from the checkpoint."""

    # Before the classes exist

    def before_instantiate_classes(self) -> None:
        """Settle the run's folder, what to resume from, the loggers' and checkpoints' places, and the strategy."""
        config = self.config[self.subcommand]
        trainer = config.trainer
        if trainer.default_root_dir is None:
            trainer.default_root_dir = str(default_folder([str(path) for path in config.config or []]))
        folder = Path(trainer.default_root_dir)
        if self.subcommand == "fit" and is_first_rank() and not trainer.fast_dev_run:
            self._lock.enter_context(locked(folder, "--trainer.default_root_dir"))
        config.ckpt_path = self._checkpoint_for(folder, config.ckpt_path)
        fit_networks(config, self._words, str(self.subcommand))
        self._compare_settings(config)
        refuse_missing_packages(trainer)
        if self.subcommand == "fit" and config.ckpt_path is None and not trainer.fast_dev_run:
            make_room(folder)
        place_loggers(config, folder, str(self.subcommand))
        place_checkpoints(trainer, folder)
        choose_strategy(trainer, federated=config.get("federation") is not None)

    def _checkpoint_for(self, folder: Path, asked: str | None) -> str | None:
        checkpoints = folder / CHECKPOINTS
        trusted = self.config[self.subcommand].weights_only is False
        demands = {"to_train": self.subcommand == "fit", "trusted": trusted}
        if asked is None and self.subcommand != "fit":
            if any(checkpoints.glob("*.ckpt")):
                asked = "last"
            elif self.subcommand == "predict":
                say(f"No checkpoint in {checkpoints}: this is the untrained model.")
            else:
                raise UserError(
                    f"There is no checkpoint in {checkpoints}, and the numbers of an untrained model say nothing: name "
                    "the run's folder with --trainer.default_root_dir, or a file with --ckpt_path."
                )
        if asked == "last":
            asked = str(newest_whole(checkpoints, **demands))
        elif asked == "best":
            asked = str(best_of(checkpoints, **demands))
        elif asked in ("hpc", "registry"):
            raise UserError(f"--ckpt_path {asked} is not supported here; name a file, `last`, or `best`.")
        elif asked is not None:
            require_whole(asked, **demands)
        return asked

    def _compare_settings(self, config: Namespace) -> None:
        self.settings = hyperparameters(config.as_dict())
        self.accept_changes, config.accept_changes = config.accept_changes, False  # asked anew by every resume
        if self.subcommand == "fit" and config.ckpt_path is not None and not self.accept_changes:
            refuse_changes(config.ckpt_path, self.settings)

    # The classes

    def instantiate_classes(self) -> None:
        """Build data, model and trainer; a value they refuse is the user's mistake."""
        try:
            super().instantiate_classes()
        except (MisconfigurationException, ValueError, TypeError) as error:
            reason = explain_by_setting(error, user_settings(self._words))
            raise own_error(error) or UserError(reason or f"The configuration cannot be built: {error}") from error

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, with the federation first among its callbacks: metrics must see the merged model."""
        federation = self._get(self.config_init, "federation")
        callbacks = self._get(self.config_init, "trainer").get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        callbacks = [*callbacks, KeepHyperparameters(self.settings), StopAtBatch()]
        if federation:
            federation.accept_changes, federation.settings = self.accept_changes, self.settings
            callbacks = [federation, *callbacks]
        if self.subcommand == "fit":
            callbacks.append(EndOfFit())
        reported = any(isinstance(callback, ClientReport) for callback in callbacks)
        if federation and self.subcommand in ("validate", "test") and not reported:
            callbacks = [*callbacks, ClientReport()]
        if self.subcommand == "predict":
            callbacks = with_writer(callbacks, self.model)
        trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        seal_checkpoints(trainer)
        return trainer

    # The run

    def _run_subcommand(self, subcommand: str) -> None:
        """Run it; where the disk ends it, say what of a fit is safe."""
        try:
            with stopped_in_a_sentence(self.trainer, subcommand):
                super()._run_subcommand(subcommand)
        except (OSError, RuntimeError) as error:
            sentence = disk_error(error)
            if sentence is None:
                raise
            checkpoints = Path(self.trainer.default_root_dir) / CHECKPOINTS
            go_on = where_to_go_on(checkpoints) if subcommand == "fit" else ""
            raise UserError(f"{sentence} {go_on}".rstrip()) from error

    def after_fit(self) -> None:
        """Say how good it became, and what there is to open."""
        if not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            for line in summary(Path(self.trainer.default_root_dir)):
                say(line)

    def after_predict(self) -> None:
        """Say what was written; a UserError if nothing was."""
        draw_samples(self.trainer, self.model)
        say(say_what_was_written(self.trainer))

    def after_validate(self) -> None:
        refuse_empty(self.trainer, self.model, "validate")

    def after_test(self) -> None:
        refuse_empty(self.trainer, self.model, "test")


def refuse_own_seed(args: list[str]) -> None:
    """Raise a UserError for ``--data.seed``, which the parser would take and then overwrite."""
    for word in args:
        if word.split("=")[0] in ("--data.seed", "--data.init_args.seed"):
            raise UserError("data.seed follows the run's one seed: give --seed_everything instead.")
