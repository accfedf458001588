"""One switch for colour and size: a model's networks take the images that its data module makes of a user's files."""

from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace

from lit_epgan.command.placing import say
from lit_epgan.errors import UserError

FOLLOWING = ("image_size", "channels", "data_shape")


def fit_networks(config: Namespace, words: list[str]) -> None:
    """Set the networks' ``image_size`` and ``channels``, or ``data_shape``, where ``data`` has both switches.

    Args:
        config: of a command; its networks' arguments are changed in place, and a change is said.
        words: the command line.

    Raises:
        UserError: it gives a network another shape itself.
    """
    data = (config.get("data") or Namespace()).get("init_args") or {}
    if "image_size" not in data or "color" not in data:
        return
    for word in words:
        key = word.split("=")[0].lstrip("-")
        if key.startswith("model.") and key.rpartition(".")[2] in FOLLOWING:
            raise UserError(f"{key} follows the data: give --data.image_size and --data.color instead.")
    channels, size = 3 if data["color"] == "rgb" else 1, data["image_size"]
    wanted = {"image_size": size, "channels": channels, "data_shape": [channels, size, size]}
    changed = [_set(arguments, wanted) for arguments in _networks(config.get("model"))]
    if any(changed):
        say(f"The networks take images of {channels} x {size} x {size}, as data.color and data.image_size say.")


def _networks(part: Any) -> Iterator[Namespace]:
    """The arguments of every class within a part of the configuration that takes images."""
    if not isinstance(part, Namespace):
        return
    if "data_shape" in part or ("image_size" in part and "channels" in part):
        yield part
    for inner in vars(part).values():
        yield from _networks(inner)


def _set(arguments: Namespace, wanted: dict[str, Any]) -> bool:
    """Whether an argument had to be changed."""
    changed = {name: value for name, value in wanted.items() if name in arguments and arguments[name] != value}
    for name, value in changed.items():
        arguments[name] = value
    return bool(changed)
