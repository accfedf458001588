"""YAML files, read within bounds, each mistake in a sentence with the file's name.

Bounds, since an alias can make a few lines stand for more than any memory holds.
"""

from pathlib import Path
from typing import Any

import yaml

from lit_epgan.lib.errors import UserError

MOST_NODES = 100_000  # mappings, lists and values, every alias counted as what it stands for


def load_yaml(path: Path) -> Any:
    """What a YAML file says. UserError: It is no YAML in UTF-8, a key stands twice, its aliases stand for too much, or
    its brackets are nested too deep. OSError: It cannot be read."""
    try:
        return _load(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}, line {line}: it is not UTF-8: save the file as UTF-8.") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        tab = error.problem is not None and "'\\t'" in error.problem
        problem = "a tab stands where YAML takes blanks" if tab else f"it is no YAML: {error.problem}"
        raise UserError(f"{path}, line {line}: {problem}.") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error


def _load(text: str, where: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        if _size(root, {}) > MOST_NODES:
            raise UserError(f"{where} stands for more than {MOST_NODES:,} values, by its aliases (&, *): use fewer.")
        _check_keys(root, where, set())
        return loader.construct_document(root)
    except RecursionError:
        raise UserError(f"{where} is nested too deep.") from None
    finally:
        loader.dispose()


def _check_keys(node: yaml.Node, where: str, seen: set[int]) -> None:
    """Refuse a key that a mapping has twice: YAML's readers let the last one win without a word."""
    if id(node) in seen:
        return
    seen.add(id(node))
    lines: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else []:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode):
            if key.value in lines:
                first = lines[key.value]
                raise UserError(f"{where}, line {line}: the key {key.value!r} is there already, in line {first}.")
            lines[key.value] = line
        _check_keys(value, where, seen)
    for each in node.value if isinstance(node, yaml.SequenceNode) else []:
        _check_keys(each, where, seen)


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
