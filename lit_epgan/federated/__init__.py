"""Federated algorithms, a file each: a round on the server, and the work that it asks of a client."""

from lit_epgan.federated.bayesian.conjugate_ep import ConjugateEP
from lit_epgan.federated.bayesian.ep import ExpectationPropagation, LaplaceSites, SampleMoments, SiteRule
from lit_epgan.federated.bayesian.fedla import FedLA
from lit_epgan.federated.bayesian.fednp import FedNP
from lit_epgan.federated.bayesian.fedpa import FedPA
from lit_epgan.federated.bayesian.laplace import LaplacePosterior
from lit_epgan.federated.bayesian.prior_on import PriorOn
from lit_epgan.federated.bayesian.pvi import PartitionedVariationalInference
from lit_epgan.federated.bayesian.tilted_ep import TiltedExpectationPropagation
from lit_epgan.federated.drift.feddyn import FedDyn
from lit_epgan.federated.drift.fednova import FedNova
from lit_epgan.federated.drift.fedprox import FedProx
from lit_epgan.federated.drift.fedrep import FedRep
from lit_epgan.federated.drift.fedseq import FedSeq
from lit_epgan.federated.drift.moon import MOON
from lit_epgan.federated.drift.personal import APFL, Ditto, PersonalModels
from lit_epgan.federated.drift.scaffold import SCAFFOLD
from lit_epgan.federated.drift.server_optimizers import FedAdam, FedAvgM, FedYogi, ServerOptimizer
from lit_epgan.federated.f2a import F2A
from lit_epgan.federated.fedavg import FedAvg
from lit_epgan.federated.fedavg_gan import FedAvgGAN
from lit_epgan.federated.function_space.distilled_sites import DistilledSites
from lit_epgan.federated.function_space.embedding_on_server import EmbeddingOnServer, MatchedEmbedding
from lit_epgan.federated.function_space.embedding_sites import EmbeddingSites
from lit_epgan.federated.function_space.generator_sites import GeneratorSites
from lit_epgan.federated.likelihood_free.discrepancy_search import DiscrepancySearch
from lit_epgan.federated.likelihood_free.published_rejection import PublishedRejection
from lit_epgan.federated.likelihood_free.search_on_release import SearchOnRelease
from lit_epgan.federated.md_gan import MDGAN

__all__ = [
    "APFL",
    "F2A",
    "MDGAN",
    "MOON",
    "SCAFFOLD",
    "ConjugateEP",
    "DiscrepancySearch",
    "DistilledSites",
    "Ditto",
    "EmbeddingOnServer",
    "EmbeddingSites",
    "ExpectationPropagation",
    "FedAdam",
    "FedAvg",
    "FedAvgGAN",
    "FedAvgM",
    "FedDyn",
    "FedLA",
    "FedNP",
    "FedNova",
    "FedPA",
    "FedProx",
    "FedRep",
    "FedSeq",
    "FedYogi",
    "GeneratorSites",
    "LaplacePosterior",
    "LaplaceSites",
    "MatchedEmbedding",
    "PartitionedVariationalInference",
    "PersonalModels",
    "PriorOn",
    "PublishedRejection",
    "SampleMoments",
    "SearchOnRelease",
    "ServerOptimizer",
    "SiteRule",
    "TiltedExpectationPropagation",
]
