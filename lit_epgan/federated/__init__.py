"""Federated algorithms."""

import importlib

_ALL = {
    "ConjugateEP": "lit_epgan.federated.bayesian.conjugate_ep",
    "ExpectationPropagation": "lit_epgan.federated.bayesian.ep",
    "FedLA": "lit_epgan.federated.bayesian.fedla",
    "FedNP": "lit_epgan.federated.bayesian.fednp",
    "FedPA": "lit_epgan.federated.bayesian.fedpa",
    "GaussianSites": "lit_epgan.federated.bayesian.gaussian_sites",
    "LaplaceSites": "lit_epgan.federated.bayesian.laplace",
    "PriorOn": "lit_epgan.federated.bayesian.prior_on",
    "SampleMoments": "lit_epgan.federated.bayesian.sample_moments",
    "SiteRule": "lit_epgan.federated.bayesian.site_rule",
    "TiltedExpectationPropagation": "lit_epgan.federated.bayesian.tilted_ep",
    "APFL": "lit_epgan.federated.drift.apfl",
    "Ditto": "lit_epgan.federated.drift.ditto",
    "FedDyn": "lit_epgan.federated.drift.feddyn",
    "FedNova": "lit_epgan.federated.drift.fednova",
    "FedProx": "lit_epgan.federated.drift.fedprox",
    "FedSeq": "lit_epgan.federated.drift.fedseq",
    "Interpolation": "lit_epgan.federated.drift.interpolation",
    "LabelPriors": "lit_epgan.federated.drift.label_priors",
    "MOON": "lit_epgan.federated.drift.moon",
    "PersonalModels": "lit_epgan.federated.drift.personal",
    "SCAFFOLD": "lit_epgan.federated.drift.scaffold",
    "FedAdam": "lit_epgan.federated.drift.server_optimizers",
    "FedAvgM": "lit_epgan.federated.drift.server_optimizers",
    "FedYogi": "lit_epgan.federated.drift.server_optimizers",
    "ServerOptimizer": "lit_epgan.federated.drift.server_optimizers",
    "F2A": "lit_epgan.federated.f2a",
    "FedAvg": "lit_epgan.federated.fedavg",
    "FedAvgGAN": "lit_epgan.federated.fedavg_gan",
    "DistilledSites": "lit_epgan.federated.function_space.distilled_sites",
    "EmbeddingOnServer": "lit_epgan.federated.function_space.embedding_on_server",
    "MatchedEmbedding": "lit_epgan.federated.function_space.embedding_on_server",
    "EmbeddingSites": "lit_epgan.federated.function_space.embedding_sites",
    "GeneratorSites": "lit_epgan.federated.function_space.generator_sites",
    "SyntheticRecords": "lit_epgan.federated.function_space.synthetic_records",
    "DiscrepancySearch": "lit_epgan.federated.likelihood_free.discrepancy_search",
    "EnergySearch": "lit_epgan.federated.likelihood_free.energy_search",
    "PublishedRejection": "lit_epgan.federated.likelihood_free.published_rejection",
    "SearchOnRelease": "lit_epgan.federated.likelihood_free.search_on_release",
    "MDGAN": "lit_epgan.federated.md_gan",
}
for _n, _m in _ALL.items():
    try:
        globals()[_n] = getattr(importlib.import_module(_m), _n)
    except ImportError:  # not converted yet
        globals()[_n] = type(_n, (), {})
