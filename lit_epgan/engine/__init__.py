"""The federated engine, without Lightning: rounds on a server, work at a client's seat, and what travels between."""

from lit_epgan.engine.aggregation import Aggregator, Median, Robust, Stack, Sum, Total, TrimmedMean
from lit_epgan.engine.algorithm import (
    Algorithm,
    Around,
    Exchange,
    Rounds,
    Server,
    check_server_training,
    passing,
)
from lit_epgan.engine.coming_and_going import ComingAndGoing
from lit_epgan.engine.everyone_at_first import EveryoneAtFirst
from lit_epgan.engine.federation import Federation
from lit_epgan.engine.jobs import Answer
from lit_epgan.engine.krum import Krum
from lit_epgan.engine.mechanisms import Mechanism, NormClipping, Plan
from lit_epgan.engine.messages import Broadcast, Count, Report, Task, Term, Weighted, scalar
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.plain_loop import PlainFederation
from lit_epgan.engine.rounds import Round
from lit_epgan.engine.samplers import Chains, Everyone, FixedSize, InTurn, Poisson, Sampler, stages
from lit_epgan.engine.seat import Seat
from lit_epgan.engine.work import Client, OptimizedParameters, Training, Work
from lit_epgan.engine.workplace import Workplace

__all__ = [
    "Aggregator",
    "Algorithm",
    "Answer",
    "Around",
    "Broadcast",
    "Chains",
    "Client",
    "ComingAndGoing",
    "Count",
    "Everyone",
    "EveryoneAtFirst",
    "Exchange",
    "Federation",
    "FixedSize",
    "FlatParameters",
    "InTurn",
    "Krum",
    "Mechanism",
    "Median",
    "NormClipping",
    "OptimizedParameters",
    "PlainFederation",
    "Plan",
    "Poisson",
    "Report",
    "Robust",
    "Round",
    "Rounds",
    "Sampler",
    "Seat",
    "Server",
    "Stack",
    "Sum",
    "Task",
    "Term",
    "Total",
    "Training",
    "TrimmedMean",
    "Weighted",
    "Work",
    "Workplace",
    "check_server_training",
    "passing",
    "scalar",
    "stages",
]
