"""LEAF's FEMNIST (Caldas et al. 2018): EMNIST by writer, as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_epgan.datamodules.images_by_user import ImagesByUser, Own, own_images
from lit_epgan.errors import UserError
from lit_epgan.listing import few

SOURCE = "https://github.com/TalwalkarLab/leaf (data/femnist: ./preprocess.sh -s niid --sf 1.0 -k 0 -t sample)"


class LeafDataModule(ImagesByUser):
    """FEMNIST in LEAF's files, a writer for a client: 28 x 28 grey images of 62 classes.

    Reads every ``all_data_*.json`` in ``data_dir``. A file is an object of ``users``, a list of names, and
    ``user_data``, by name an object of ``x``, images as lists of 784 numbers in [0, 1] with ink 0 on paper 1, and of
    ``y``, their labels from 0 to 61. Files are read one after another and kept as a byte a pixel: 0.6 GB for all 3,550
    writers.

    Args:
        data_dir: the folder of the files.
        options: ``clients``, ``held_out``, ``inverted`` and ``split_seed`` of ``ImagesByUser``, and the settings of
            ``FederatedDataModule``.
    """

    def __init__(self, data_dir: str = "data/femnist", **options: Any) -> None:
        super().__init__(data_dir, **options)

    def read(self) -> Mapping[str, Own]:
        """Every writer's images.

        Raises:
            UserError: there is no file, or one is not as LEAF writes it.
        """
        paths = sorted(self.data_dir.glob("all_data_*.json"))
        if not paths:
            raise UserError(
                f"FEMNIST is not in {self.data_dir.absolute()}: place LEAF's all_data_*.json (made by {SOURCE}) there, "
                "or say by --data.data_dir where they are"
            )
        users: dict[str, Own] = {}
        for path in paths:
            own = _read(path)
            if twice := sorted(set(own) & set(users)):
                raise UserError(
                    f"{path}: {few(twice)} stand in another file, too; leave only the files of one sampling"
                )
            users |= own
        return users


def _read(path: Path) -> dict[str, Own]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no whole JSON file ({_brief(error)}); place it anew") from error
    names, data = (content.get(key) for key in ("users", "user_data")) if isinstance(content, dict) else (None, None)
    if not isinstance(names, list) or not isinstance(data, dict):
        raise UserError(f"{path} is not LEAF's: it has no list 'users' and no object 'user_data'; place the right file")
    return {
        str(name): _own(data.get(name) if isinstance(name, str) else None, f"{path}, user {name!r}") for name in names
    }


def _own(entry: Any, whose: str) -> Own:
    if not isinstance(entry, dict) or "x" not in entry or "y" not in entry:
        raise UserError(f"{whose}: 'user_data' has no 'x' and 'y' of this user; place LEAF's file anew")
    return own_images(entry["x"], entry["y"], whose)


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
