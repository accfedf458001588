"""An array that the machine's memory does not hold is refused at once, instead of the process being killed later."""

import os
import sys


def bound_memory() -> None:
    """Let this process and those it starts take as much private memory as the machine has, and no more.

    Linux promises more memory than there is, and kills the process when it is used. Only there, and only without a GPU,
    whose driver reserves more than it uses.
    """
    if sys.platform != "linux":
        return
    import resource

    import torch

    if torch.cuda.is_available():
        return
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or soft > total:
        limit = total if hard == resource.RLIM_INFINITY else min(total, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _swap() -> int:
    """Bytes of swap space."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            sizes = dict(line.split(":") for line in file)
        return int(sizes["SwapTotal"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 0
