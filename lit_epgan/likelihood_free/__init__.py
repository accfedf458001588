"""Inference from simulations alone: priors, simulators, discrepancies, sequential Monte Carlo."""

from lit_epgan.likelihood_free.mixture import GaussianMixture
from lit_epgan.likelihood_free.refinement import PASSES, Refinement
from lit_epgan.likelihood_free.search import Particles, Search
from lit_epgan.likelihood_free.simulator import Independent, Simulator
from lit_epgan.likelihood_free.statistics import Statistics

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
