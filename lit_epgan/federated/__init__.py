"""Federated algorithms: hooks around a client's local steps, and one on the server."""

from lit_epgan.federated.algorithm import Client, FederatedAlgorithm, OptimizedParameters, Server
from lit_epgan.federated.bayesian.conjugate_ep import ConjugateEP
from lit_epgan.federated.bayesian.ep import ExpectationPropagation
from lit_epgan.federated.bayesian.fedla import FedLA
from lit_epgan.federated.bayesian.fednp import FedNP
from lit_epgan.federated.bayesian.fedpa import FedPA
from lit_epgan.federated.bayesian.laplace import LaplaceSites
from lit_epgan.federated.bayesian.prior_on import PriorOn
from lit_epgan.federated.bayesian.sample_moments import SampleMoments
from lit_epgan.federated.bayesian.site_rule import SiteRule
from lit_epgan.federated.bayesian.tilted_ep import TiltedExpectationPropagation
from lit_epgan.federated.composed import Composed
from lit_epgan.federated.drift.fedprox import FedProx
from lit_epgan.federated.drift.fedseq import FedSeq
from lit_epgan.federated.drift.interpolation import Interpolation
from lit_epgan.federated.drift.label_priors import LabelPriors
from lit_epgan.federated.drift.moon import MOON
from lit_epgan.federated.drift.scaffold import SCAFFOLD
from lit_epgan.federated.drift.server_optimizers import FedAdam, FedAvgM, FedYogi, ServerOptimizer
from lit_epgan.federated.f2a import F2A
from lit_epgan.federated.fedavg import FedAvg
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.federated.function_space.distilled_sites import DistilledSites
from lit_epgan.federated.function_space.embedding_on_server import EmbeddingOnServer, MatchedEmbedding
from lit_epgan.federated.function_space.embedding_sites import EmbeddingSites
from lit_epgan.federated.function_space.generator_sites import GeneratorSites
from lit_epgan.federated.parameters import FlatParameters
from lit_epgan.federated.report import Report, Weighted

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
    "FedSeq",
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
