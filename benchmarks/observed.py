"""``python -m lit_epgan`` under the eyes of an outside observer.

The observer stands where noise is drawn. Each release is a line of the file that ``OBSERVER`` names, on the disk before
the noise exists: who is released, by how many standard deviations of noise, and at which rate of sampling.
"""

import json
import os
import sys
from typing import Any

from lit_epgan.cli.main import main
from lit_epgan.privacy.accountant import Releases
from lit_epgan.privacy.central import CentralNoise
from lit_epgan.privacy.correlated import CorrelatedNoise
from lit_epgan.privacy.gaussian_mechanism import GaussianMechanism
from lit_epgan.privacy.queries import Queries
from lit_epgan.privacy.records import RecordNoise

OBSERVER = "LIT_EPGAN_OBSERVER"


def see(who: str, releases: Releases) -> None:
    """One more of these releases is about to be made of ``who``."""
    line = json.dumps({"who": who, "releases": releases.times(1).as_dict()}) + "\n"
    file = os.open(os.environ[OBSERVER], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.fsync(file)
    os.close(file)


def observe() -> None:
    """Stand between each mechanism and its noise."""
    central, record, release, query = (
        CentralNoise._normal,
        RecordNoise._normal,
        GaussianMechanism.release,
        Queries.sum,
    )
    last: list[Any] = []

    def central_normal(self: Any, like: Any, name: str) -> Any:
        exchange = [id(self), self._round, self._drawn]  # of which each tensor has noise of its own
        if exchange != last:
            last[:] = exchange
            z = self.deviations([name])[name] / self.bound
            if isinstance(self, CorrelatedNoise):  # each client takes part in its group's rounds
                group, kind = f"group {self._round % self._separation}", Releases(z)
            else:
                group, kind = "all users", self._planned.with_noise(z, 1)
            see(group, kind)
        return central(self, like, name)

    def record_normal(self: Any, client: Any) -> Any:
        normal, planned = record(self, client), self._payments.planned[client.name]

        def noise(n: int) -> Any:
            see(client.name, planned)
            return normal(n)

        return noise

    def released(self: Any, vector: Any, sensitivity: float, *stream: Any) -> Any:
        see(str(stream), Releases(self.noise_multiplier, unit="record"))
        return release(self, vector, sensitivity, *stream)

    def asked(self: Any, vectors: Any, noise_multiplier: float, what: str, group: str = "all users") -> Any:
        normal = self.normal

        def noise(*words: Any) -> Any:
            see(group, Releases(noise_multiplier))
            return normal(*words)

        self.normal = noise
        try:
            return query(self, vectors, noise_multiplier, what, group)
        finally:
            del self.normal

    CentralNoise._normal, RecordNoise._normal = central_normal, record_normal  # type: ignore[method-assign]
    GaussianMechanism.release, Queries.sum = released, asked  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    observe()
    sys.exit(main())
