"""A study in several settings: the same methods, compared within each setting."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_epgan.errors import UserError

VARIANT_KEYS = ("title", "set", "seeds", "methods", "published")


def variants(content: dict[str, Any], path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each variant's name and the content of a study of its own; of a study without any, itself under "".

    A variant's settings come before the methods' own. ``methods`` says which take part (all by default), as a list or
    with further settings for each; ``seeds`` and ``published`` values may be its own. A claim about a method that does
    not take part is left out.

    Args:
        content: of the study's YAML.
        path: where it stands.

    Raises:
        UserError: a variant names what is none of the methods; the message says where.
    """
    content = dict(content)
    named = content.pop("variants", None)
    if named is None:
        yield "", content
        return
    for name, entry in named.items():
        yield name, _variant(content, name, entry or {}, f"{path}: variants.{name}")


def _variant(content: dict[str, Any], name: str, entry: dict[str, Any], where: str) -> dict[str, Any]:
    for key in entry:
        if key not in VARIANT_KEYS:
            raise UserError(f"{where}: there is no key {key}; the keys are {', '.join(VARIANT_KEYS)}.")
    taking_part = entry.get("methods") or dict.fromkeys(content["methods"])
    further = taking_part if isinstance(taking_part, dict) else dict.fromkeys(taking_part)
    published = entry.get("published") or {}
    for method in (*further, *published):
        if method not in content["methods"]:
            raise UserError(f"{where} names {method!r}, which is none of the methods {', '.join(content['methods'])}.")
    methods = {}
    for method in content["methods"]:
        if method in further:
            methods[method] = copy.deepcopy(content["methods"][method]) or {}
            own = methods[method].get("set") or {}
            methods[method]["set"] = {**(entry.get("set") or {}), **own, **(further[method] or {})}
            if method in published:
                methods[method]["published"] = published[method]
    absent = [method for method in content["methods"] if method not in methods]
    return {
        **content,
        "title": f"{content.get('title', name)}: {entry.get('title', name)}",
        "seeds": entry.get("seeds", content.get("seeds")),
        "methods": methods,
        "pairwise": [method for method in content.get("pairwise") or [] if method in methods],
        "ratios": [entry for entry in content.get("ratios") or [] if not _names_one_of(absent, entry)],
    }


def _names_one_of(methods: list[str], ratio: Any) -> bool:
    return isinstance(ratio, dict) and any(ratio.get(key) in methods for key in ("of", "to"))
