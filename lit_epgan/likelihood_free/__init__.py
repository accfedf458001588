"""Inference from simulations alone: priors, simulators, discrepancies, sequential Monte Carlo."""

from lit_epgan.likelihood_free.inference import PASSES, Refinement
from lit_epgan.likelihood_free.mean_embeddings import Statistics
from lit_epgan.likelihood_free.search import Particles, Search
from lit_epgan.likelihood_free.simulator import GaussianMixture, Independent, Simulator

__all__ = [
    "PASSES",
    "GaussianMixture",
    "Independent",
    "Particles",
    "Refinement",
    "Search",
    "Simulator",
    "Statistics",
]
