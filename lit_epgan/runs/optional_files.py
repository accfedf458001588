"""Files that a run can do without."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn

from lit_epgan.lib.atomic import naming


@contextmanager
def optional_file(path: Path) -> Iterator[None]:
    """Within, ``path`` is written; where the disk refuses, that is said (once for each path) and the run goes on."""
    try:
        with naming(path):
            yield
    except OSError as error:
        rank_zero_warn(f"{path} could not be written ({error.strerror}): the run goes on without it")
