"""FLARE's server or client, which lets in and calls those alone whose certificates its kit's list of members has.

    python -m lit_epgan.carriers.flare_process MODULE -m KIT ...

It ends when the process that has started it has ended, however that was.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

from nvflare.private.fed.utils.identity_utils import IdentityVerifier

from lit_epgan.carriers.keys import MEMBERS, MemberList

LOOK = 0.5  # seconds between two looks


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


def end_with(parent: int) -> None:
    """Wait for a process to end, and end this one."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    module, kit = sys.argv[1], Path(sys.argv[3])
    know(kit / "startup" / MEMBERS)
    Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
