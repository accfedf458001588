"""Federated algorithms: hooks around a client's local steps, and one on the server."""

from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server
from lit_epgan.federated.composed import Composed
from lit_epgan.federated.conjugate_ep import ConjugateEP
from lit_epgan.federated.distilled_sites import DistilledSites
from lit_epgan.federated.embedding_on_server import EmbeddingOnServer, MatchedEmbedding
from lit_epgan.federated.embedding_sites import EmbeddingSites
from lit_epgan.federated.ep import ExpectationPropagation
from lit_epgan.federated.f2a import F2A
from lit_epgan.federated.fedavg import FedAvg
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.federated.fedla import FedLA
from lit_epgan.federated.fednp import FedNP
from lit_epgan.federated.fedpa import FedPA
from lit_epgan.federated.fedprox import FedProx
from lit_epgan.federated.generator_sites import GeneratorSites
from lit_epgan.federated.interpolation import Interpolation
from lit_epgan.federated.label_priors import LabelPriors
from lit_epgan.federated.laplace import LaplaceSites
from lit_epgan.federated.moon import MOON
from lit_epgan.federated.parameters import FlatParameters
from lit_epgan.federated.prior_on import PriorOn
from lit_epgan.federated.report import Report, Weighted
from lit_epgan.federated.sample_moments import SampleMoments
from lit_epgan.federated.scaffold import SCAFFOLD
from lit_epgan.federated.server_optimizers import FedAdam, FedAvgM, FedYogi, ServerOptimizer
from lit_epgan.federated.site_rule import SiteRule
from lit_epgan.federated.tilted_ep import TiltedExpectationPropagation

__all__ = [
    "F2A",
    "MOON",
    "SCAFFOLD",
    "Client",
    "Composed",
    "ConjugateEP",
    "DistilledSites",
    "EmbeddingOnServer",
    "EmbeddingSites",
    "ExpectationPropagation",
    "FedAdam",
    "FedAvg",
    "FedAvgGAN",
    "FedAvgM",
    "FedLA",
    "FedNP",
    "FedPA",
    "FedProx",
    "FedYogi",
    "FederatedAlgorithm",
    "FlatParameters",
    "GeneratorSites",
    "Interpolation",
    "LabelPriors",
    "LaplaceSites",
    "MatchedEmbedding",
    "OptimizedParameters",
    "PriorOn",
    "Report",
    "SampleMoments",
    "Server",
    "ServerOptimizer",
    "SiteRule",
    "TiltedExpectationPropagation",
    "Weighted",
]
