"""Whatever number a key is given, a fit runs, or one sentence names the key: draws over every numeric key.

DRAWS=1000 tries more of them than the suite has time for.
"""

import os
from collections import deque
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.values import Draw, attempt, draws, kind_of

COUNT, SEED = int(os.environ.get("DRAWS", "8")), 29
AT_ONCE = os.cpu_count() or 1
SECONDS = 600  # for one that its limit of ten seconds of a processor does not end, on however busy a machine


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="limits of processes are POSIX's")
def test_a_number_is_taken_or_refused_by_its_key(tmp_path):
    wrong, alive = [], deque[tuple[Draw, Path, BaseProcess]]()

    def end() -> None:
        draw, folder, process = alive.popleft()
        process.join(SECONDS)
        code = process.exitcode
        process.kill()
        kind = kind_of(draw, code, (folder / "log").read_text(errors="replace"))
        if kind not in ("run", "named"):
            wrong.append(f"{draw.configuration}: --{draw.key} {draw.value}: {kind}, see {folder / 'log'}")

    for number, draw in enumerate(draws(COUNT, SEED)):
        folder = tmp_path / str(number)
        alive.append((draw, folder, attempt(draw, folder)))
        if len(alive) > AT_ONCE:
            end()
    while alive:
        end()
    assert not wrong, "\n".join(wrong)
