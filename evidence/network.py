"""Machines on a network, for trials on one: network namespaces, joined by a bridge. Needs root and iproute2."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PREFIX = "lit"  # of the namespaces' names
ETC = Path("/etc/netns")


def ip(*words: str) -> str:
    """``ip WORDS``."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


class Network:
    """Machines, each with an address of its own, which know each other by names.

    Args:
        machines: their names in this trial; the first is known as ``host`` on all of them.
        host: a domain name.
    """

    def __init__(self, machines: Sequence[str], host: str) -> None:
        self.machines = {name: f"{PREFIX}-{name}" for name in machines}
        self.addresses = {name: f"10.77.0.{k + 1}" for k, name in enumerate(machines)}
        self._host, self._middle = host, f"{PREFIX}-middle"

    def __enter__(self) -> "Network":
        self.close()
        ip("netns", "add", self._middle)
        ip("-n", self._middle, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._middle, "link", "set", "bridge", "up")
        first = next(iter(self.addresses.values()))
        for name, space in self.machines.items():
            ip("netns", "add", space)
            (ETC / space).mkdir(parents=True, exist_ok=True)
            (ETC / space / "hosts").write_text(f"127.0.0.1 localhost\n{first} {self._host}\n")
            ends = ("eth0", "netns", space), ("type", "veth", "peer", f"to-{name}", "netns", self._middle)
            ip("link", "add", *ends[0], *ends[1])
            ip("-n", self._middle, "link", "set", f"to-{name}", "master", "bridge", "up")
            ip("-n", space, "address", "add", f"{self.addresses[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take it down, with all that runs on it."""
        spaces = ip("netns", "list").split()
        for name, space in self.machines.items():
            if space in spaces:
                self.kill(name)
                ip("netns", "delete", space)
        if self._middle in spaces:
            ip("netns", "delete", self._middle)

    def start(
        self, machine: str, command: Sequence[str], folder: Path, log: IO[bytes], more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """A process on a machine.

        Args:
            machine: its name.
            command: the program and its words.
            folder: where it works.
            log: where it prints to.
            more: environment variables beside this process's.
        """
        words = ["ip", "netns", "exec", self.machines[machine], *command]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(more or {})
        return subprocess.Popen(
            words, cwd=folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
        )

    def kill(self, machine: str) -> int:
        """Kill all that runs on a machine, as when its plug is pulled; how many processes."""
        pids = [int(pid) for pid in ip("netns", "pids", self.machines[machine]).split()]
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return len(pids)

    def cut(self, machine: str, down: bool) -> None:
        """Pull a machine's network cable, or put it back."""
        ip("-n", self.machines[machine], "link", "set", "eth0", "down" if down else "up")

    def slow(self, machine: str, rate: str) -> None:
        """Let a machine send no faster than ``rate``, as ``tc`` writes it: ``10mbit`` a second."""
        words = ["tc", "-n", self.machines[machine], "qdisc", "replace", "dev", "eth0", "root"]
        subprocess.run([*words, "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms"], check=True)
