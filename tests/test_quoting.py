"""What the command line saves and prints of a configuration is read back as the same values."""

from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonargparse import Namespace, get_loader

from lit_epgan.cli.main import main
from lit_epgan.cli.parser import quoted
from tests.parsed import Parsed

DIGIT_LIKE = st.text(alphabet="0123456789abcdefox_.:+-eEnNiI", min_size=1, max_size=10)
NUMBER_LIKE = (
    *("yes", "no", "on", "off", "true", "False", "null", "~", "nan", ".nan", "inf", "-.inf", "1e5", ".5e3", "1_000"),
    *("0o7", "0x1f", "0b1", "12:30", "12:30:45.5", "2026-11-25", "7876e627", "+1", "-", "=", "<<", "1.", ".", "0"),
)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
STRINGS = st.one_of(DIGIT_LIKE, st.sampled_from(NUMBER_LIKE), ANY_TEXT)


@pytest.fixture(scope="module")
def cli() -> Parsed:
    return Parsed()


@settings(max_examples=50, deadline=None)
@given(st.recursive(STRINGS, lambda inner: st.lists(inner) | st.dictionaries(STRINGS, inner), max_leaves=8))
def test_whatever_is_dumped_is_loaded_by_the_parser_s_own_reader(data: Any) -> None:
    assert get_loader("yaml")(quoted({"key": data})) == {"key": data}


@settings(max_examples=4)
@given(st.lists(STRINGS, min_size=2, max_size=50))
@example([*NUMBER_LIKE])
def test_a_configuration_is_parsed_as_it_was(cli: Parsed, strings: list[str]) -> None:
    """Of keys that are texts: where one may be none, the parser takes some texts for that, however they are quoted."""
    parser = cli.parser_of_fit
    config = cli.config.fit.clone()
    config.data.init_args.data_dir, config.trainer.logger[0].init_args.file = strings[:2]
    config.federation.init_args.local = strings
    again = parser.parse_string(parser.dump(config, skip_validation=True))
    assert values(again) == values(config)


def values(config: Namespace) -> list[Any]:
    return [
        config.data.init_args.data_dir,
        config.trainer.logger[0].init_args.file,
        config.federation.init_args.local,
    ]


def test_a_run_named_like_a_number_is_printed_in_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["fit", "--config", "toy.yaml", "--data.data_dir", "7876e627", "--print_config"])
    printed = capsys.readouterr().out
    assert 'data_dir: "7876e627"' in printed
    assert yaml.safe_load(printed)["data"]["init_args"]["data_dir"] == "7876e627"


@pytest.mark.parametrize("null", ["null", "None"])
def test_null_reaches_a_class_within_a_class(capsys: pytest.CaptureFixture[str], null: str) -> None:
    words = ["--config", "polynomial.yaml", "--config", "algorithms/central_noise.yaml"]
    words += ["--federation.mechanism.noise_multiplier", null, "--federation.mechanism.target_epsilon", "2"]
    with pytest.raises(SystemExit, match="0"):
        main(["fit", *words, "--print_config"])
    mechanism = yaml.safe_load(capsys.readouterr().out)["federation"]["init_args"]["mechanism"]["init_args"]
    assert mechanism["noise_multiplier"] is None
    assert mechanism["target_epsilon"] == 2
