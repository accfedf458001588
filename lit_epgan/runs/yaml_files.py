"""YAML files, read within bounds: an alias can make a few lines stand for more than any memory holds."""

from pathlib import Path
from typing import Any

import yaml

from lit_epgan.errors import UserError

MOST_NODES = 100_000  # mappings, lists and values, every alias counted as what it stands for


def load_yaml(path: Path) -> Any:
    """What a YAML file says.

    Raises:
        UserError: Its aliases stand for too much, or its brackets are nested too deep.
        yaml.YAMLError: It is no YAML.
        OSError, UnicodeDecodeError: It cannot be read.
    """
    return load_yaml_text(path.read_text(encoding="utf-8"), str(path))


def load_yaml_text(text: str, where: str) -> Any:
    """As ``load_yaml``, of a text that stands in ``where``."""
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(root, {}) > MOST_NODES:
            raise UserError(f"{where} stands for more than {MOST_NODES:,} values, by its aliases (&, *): use fewer.")
        return loader.construct_document(root)
    except RecursionError:
        raise UserError(f"{where} is nested too deep.") from None
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes from ``node`` on with every alias replaced by what it stands for; counted up to one more than the most."""
    if id(node) not in known:
        known[id(node)] = MOST_NODES + 1  # what an alias within the node itself stands for: there is no end to it
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known[id(node)] = min(1 + sum(_size(child, known) for child in children), MOST_NODES + 1)
    return known[id(node)]
