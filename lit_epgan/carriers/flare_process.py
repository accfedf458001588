"""FLARE's server or client, which lets in and calls those alone whose certificates its kit's list of members has.

    python -m lit_epgan.carriers.flare_process PID MODULE -m KIT ...

It ends when the process PID, which has started it, has ended, however that was.
"""

import contextlib
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
from nvflare.private.fed.utils.identity_utils import IdentityVerifier

from lit_epgan.carriers.keys import MEMBERS, MemberList

LOOK = 0.5  # seconds between two looks
LEAVING = 10.0  # seconds that a process has for leaving


def know(members: Path) -> None:
    """From now on, who shows a certificate is refused unless the list in a file has it under the name that it says.

    FLARE itself asks whether the authority has ever signed it. The list is read anew each time.
    """
    signed = IdentityVerifier.verify_common_name

    def known(self: IdentityVerifier, asserted_cn: str, **shown: Any) -> bool:
        if not MemberList.read(members).has(asserted_cn, shown["asserter_cert"]):
            raise ValueError(f"the certificate of {asserted_cn} is not the one that {members} has: it may be revoked")
        return signed(self, asserted_cn=asserted_cn, **shown)

    IdentityVerifier.verify_common_name = known


def end_below(pid: int) -> None:
    """End all that a process has started, and what those have: who does not leave when asked is killed."""
    with contextlib.suppress(psutil.NoSuchProcess):
        below = psutil.Process(pid).children(recursive=True)
        for each in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        for each in psutil.wait_procs(below, LEAVING)[1]:
            each.kill()


def end_with(parent: int) -> None:
    """Wait for a process to end, and end this one, and all that it has started."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    end_below(os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    parent, module, kit = int(sys.argv[1]), sys.argv[2], Path(sys.argv[4])
    know(kit / "startup" / MEMBERS)
    Thread(target=end_with, args=(parent,), daemon=True).start()
    del sys.argv[1:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
