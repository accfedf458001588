"""Makes the miniature speech corpus's cache as a process of its own, for tests that kill it.

    python -m tests.speech_build CACHE SECONDS

It lingers between a whole folder and its name.
"""

import sys
import time
from pathlib import Path


def main() -> None:
    # here, since the process of each session imports this file again
    from lit_epgan.datamodules.speech import SpeechDataModule
    from tests.speech import MINIATURE

    cache, seconds = sys.argv[1], float(sys.argv[2])
    rename = Path.rename

    def lingering(self: Path, target: Path) -> Path:
        time.sleep(seconds)
        return rename(self, target)

    Path.rename = lingering  # type: ignore[method-assign, assignment]
    SpeechDataModule(**MINIATURE, cache_dir=cache).prepare_data()


if __name__ == "__main__":
    main()
