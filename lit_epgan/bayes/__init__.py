"""Approximate Bayesian inference: Gaussian factors, tilted moments, mean embeddings, simulators."""

from lit_epgan.bayes.codes import LowFrequencies, Points, PublicDirections, StackedFrames
from lit_epgan.bayes.factor import EmbeddingFactor
from lit_epgan.bayes.feature_maps import NormalisedMoments, RandomFourierFeatures, feature_map, median_distance
from lit_epgan.bayes.gaussian import FullGaussianFactor, GaussianFactor, ImproperFactorError, damped
from lit_epgan.bayes.herding import SimplexWeights, herd, project_to_simplex
from lit_epgan.bayes.inference import PASSES, Refinement
from lit_epgan.bayes.mean_embeddings import Statistics
from lit_epgan.bayes.search import Particles, Search
from lit_epgan.bayes.sghmc import SGHMC
from lit_epgan.bayes.simulator import GaussianMixture, Independent, Simulator
from lit_epgan.bayes.tilted import tilted_moments, tilted_moments_printed, tilted_moments_quadrature
from lit_epgan.bayes.tilted_mixture import gumbel_softmax, responsibilities

__all__ = [
    "PASSES",
    "SGHMC",
    "EmbeddingFactor",
    "FullGaussianFactor",
    "GaussianFactor",
    "GaussianMixture",
    "ImproperFactorError",
    "Independent",
    "LowFrequencies",
    "NormalisedMoments",
    "Particles",
    "Points",
    "PublicDirections",
    "RandomFourierFeatures",
    "Refinement",
    "Search",
    "SimplexWeights",
    "Simulator",
    "StackedFrames",
    "Statistics",
    "damped",
    "feature_map",
    "gumbel_softmax",
    "herd",
    "median_distance",
    "project_to_simplex",
    "responsibilities",
    "tilted_moments",
    "tilted_moments_printed",
    "tilted_moments_quadrature",
]
