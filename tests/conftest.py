"""What many tests share."""

import pytest


@pytest.fixture(scope="session")
def speech_cache(tmp_path_factory):
    """Where the miniature speech corpus is kept, so that a process speaks it once."""
    return tmp_path_factory.mktemp("speech")
