"""The federated engine, without Lightning: rounds on a server, a client's side of them, and what travels between."""

from lit_epgan.engine.aggregation import Krum, Median, Robust, TrimmedMean
from lit_epgan.engine.algorithm import (
    Algorithm,
    Around,
    Exchange,
    Rounds,
    Server,
    check_server_training,
    passing,
)
from lit_epgan.engine.client import Client, OptimizedParameters, StepHooks
from lit_epgan.engine.mechanisms import Mechanism, NormClipping, Plan
from lit_epgan.engine.messages import (
    Aggregator,
    Broadcast,
    Count,
    Message,
    Report,
    Stack,
    Sum,
    Task,
    Term,
    Total,
    Weighted,
    merged,
    scalar,
)
from lit_epgan.engine.parameters import FlatParameters
from lit_epgan.engine.plain_loop import PlainFederation
from lit_epgan.engine.rounds import Federation, Round
from lit_epgan.engine.runner import Answer, ClientRunner, LocalData, Model
from lit_epgan.engine.samplers import (
    Chains,
    ComingAndGoing,
    Everyone,
    EveryoneAtFirst,
    FixedSize,
    InTurn,
    Poisson,
    Sampler,
    stages,
)

__all__ = [
    "Aggregator",
    "Algorithm",
    "Answer",
    "Around",
    "Broadcast",
    "Chains",
    "Client",
    "ClientRunner",
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
    "LocalData",
    "Mechanism",
    "Median",
    "Message",
    "Model",
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
    "Server",
    "Stack",
    "StepHooks",
    "Sum",
    "Task",
    "Term",
    "Total",
    "TrimmedMean",
    "Weighted",
    "check_server_training",
    "merged",
    "passing",
    "scalar",
    "stages",
]
