"""The server's side of a federation: what rounds are run with."""

from dataclasses import dataclass, field

from lit_epgan.engine.aggregation import Aggregator
from lit_epgan.engine.algorithm import Algorithm, Server
from lit_epgan.engine.mechanisms import Mechanism
from lit_epgan.engine.module_state import ModuleState
from lit_epgan.engine.networks import AlgorithmNetworks
from lit_epgan.engine.private import PrivateStates
from lit_epgan.engine.samplers import Everyone, Sampler


@dataclass
class Federation:
    """The server's side of a federation.

    Attributes:
        algorithm: whose rounds are run.
        server: what the algorithm sees.
        tensors: what of the server's module lies outside the flat vector.
        networks: the algorithm's own.
        names: the clients' names.
        active: indices of the clients that hold data.
        sampler: draws the cohorts.
        aggregator: stands for the sum of the clients' changes; None for the sum.
        mechanism: sees all totals.
        private: what the clients keep; each rank holds its own clients'.
        secure: whether the server sees sums of reports alone.
    """

    algorithm: Algorithm
    server: Server
    tensors: ModuleState
    networks: AlgorithmNetworks
    names: list[str]
    active: list[int]
    sampler: Sampler = field(default_factory=Everyone)
    aggregator: Aggregator | None = None
    mechanism: Mechanism | None = None
    private: PrivateStates = field(default_factory=PrivateStates)
    secure: bool = False


def cohorts_by(algorithm: Algorithm, sampler: Sampler, mechanism: Mechanism | None) -> Sampler:
    """What draws the cohorts: the sampler that is set, as the algorithm and then the mechanism want it."""
    drawn = algorithm.sampler(sampler)
    return drawn if mechanism is None else mechanism.sampler(drawn)
