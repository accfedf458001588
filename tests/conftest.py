"""What many tests share."""

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing on a busy machine
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def speech_cache(tmp_path_factory):
    """Where the miniature speech corpus is kept, so that a process speaks it once."""
    return tmp_path_factory.mktemp("speech")
