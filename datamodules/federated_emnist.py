"""TensorFlow Federated's Federated EMNIST: EMNIST by writer, as HDF5."""

from collections.abc import Mapping
from typing import Any

from lit_epgan.datamodules.images_by_user import ImagesByUser, Own, own_images
from lit_epgan.datamodules.tff_files import hdf5_examples
from lit_epgan.errors import UserError

SOURCE = "https://storage.googleapis.com/tff-datasets-public/fed_emnist.tar.bz2"


class FederatedEMNISTDataModule(ImagesByUser):
    """Federated EMNIST in TensorFlow Federated's files, a writer for a client: 28 x 28 grey images of 62 classes.

    Reads one file: a group ``examples`` with a group for each writer, and in it ``pixels``, (n, 28, 28) numbers in
    [0, 1] with ink 0 on paper 1, and ``label``, (n,) integers. Images are kept as a byte a pixel: 0.5 GB for all 3,400
    writers. Needs h5py: ``pip install lit_epgan[hdf5]``.

    Args:
        data_dir: the folder of the file.
        file: its name; ``fed_emnist_digitsonly_train.h5`` has the ten digits alone.
        options: ``clients``, ``held_out``, ``inverted`` and ``split_seed`` of ``ImagesByUser``, and the settings of
            ``FederatedDataModule``.
    """

    def __init__(self, data_dir: str = "data/fed_emnist", file: str = "fed_emnist_train.h5", **options: Any) -> None:
        super().__init__(data_dir, **options)
        self.file = file

    def read(self) -> Mapping[str, Own]:
        """Every writer's images.

        Raises:
            UserError: h5py or the file is missing, or the file is not as TensorFlow Federated writes it.
        """
        path = self.data_dir / self.file
        if not path.exists():
            raise UserError(
                f"Federated EMNIST is not in {self.data_dir.absolute()}: place {self.file} (out of {SOURCE}) there, or "
                "say by --data.data_dir where it is"
            )
        with hdf5_examples(path) as examples:
            return {name: _own(examples[name], f"{path}, user {name!r}") for name in examples}


def _own(entry: Any, whose: str) -> Own:
    own: list[Any] = [entry.get(key) if hasattr(entry, "get") else None for key in ("pixels", "label")]
    if not all(hasattr(each, "shape") for each in own):
        raise UserError(f"{whose}: there are no 'pixels' and 'label'; place the published file anew")
    pixels, labels = (each[()] for each in own)
    return own_images(pixels, labels, whose)
