"""Federated algorithms: hooks around a client's local steps, and one on the server."""

from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server
from lit_epgan.federated.ep import ExpectationPropagation
from lit_epgan.federated.fedavg import FedAvg
from lit_epgan.federated.fedprox import FedProx
from lit_epgan.federated.generator_sites import GeneratorSites
from lit_epgan.federated.parameters import FlatParameters
from lit_epgan.federated.report import Report, Weighted

__all__ = [
    "Client",
    "ExpectationPropagation",
    "FedAvg",
    "FedProx",
    "FederatedAlgorithm",
    "FlatParameters",
    "GeneratorSites",
    "OptimizedParameters",
    "Report",
    "Server",
    "Weighted",
]
