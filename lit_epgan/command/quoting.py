"""YAML that is read back as it was: strings that look like numbers, and the null that the parser writes as a text."""

from typing import Any

import yaml
from jsonargparse import get_loader, set_dumper, set_loader


class _Dumper(yaml.SafeDumper):
    """PyYAML's, with quotes around every string that the parser would read as something else."""


def _string(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if _is_plain(value) else '"')


def _is_plain(value: str) -> bool:
    try:
        return bool(get_loader("yaml")(value) == value)
    except (yaml.YAMLError, TypeError):  # the reader trips over "0:"
        return False


_Dumper.add_representer(str, _string)


def quoted(data: Any) -> str:
    """``data`` as YAML in which a string such as ``7876e627``, which the parser would read as a number, is quoted."""
    return yaml.dump(data, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False)


def quote_numbers() -> None:
    """Let the strings of what the parser prints and saves be read back as they were."""
    set_dumper("yaml", quoted)


def read_null() -> None:
    """Let ``--a.b.c null`` set c to null where a and b are classes.

    The parser gives the value of a key within a class within a class to a parser of its own as Python's text: None.
    """
    read = get_loader("yaml")

    def read_with_none(text: str) -> Any:
        return None if text.strip() == "None" else read(text)

    set_loader("yaml", read_with_none, (yaml.YAMLError,))
