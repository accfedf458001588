"""The command line's parser alone: building it takes longer than it takes to parse many a configuration."""

from jsonargparse import Namespace

from lit_epgan.cli.lightning_cli import FederatedCLI
from lit_epgan.cli.parser import check_values
from lit_epgan.runs.config_files import resolve_configs


class Parsed(FederatedCLI):
    def __init__(self) -> None:
        super().__init__(resolve_configs(["fit", "--config", "toy.yaml"]))
        self.parser_of_fit = self._subcommand_parsers["fit"]

    def fit(self, words: list[str]) -> Namespace:
        config = self.parser_of_fit.parse_args(resolve_configs(words))
        check_values(config)
        return config

    def before_instantiate_classes(self) -> None: ...

    def instantiate_classes(self) -> None: ...

    def _run_subcommand(self, subcommand: str) -> None: ...
