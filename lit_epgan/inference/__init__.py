"""Approximate Bayesian inference as pure tensor functions."""

from lit_epgan.inference.gaussian import FullGaussianFactor, GaussianFactor, ImproperFactorError, Sites, damped
from lit_epgan.inference.sghmc import SGHMC
from lit_epgan.inference.tilted import tilted_moments, tilted_moments_printed, tilted_moments_quadrature
from lit_epgan.inference.tilted_mixture import gumbel_softmax, responsibilities

__all__ = [
    "SGHMC",
    "FullGaussianFactor",
    "GaussianFactor",
    "ImproperFactorError",
    "Sites",
    "damped",
    "gumbel_softmax",
    "responsibilities",
    "tilted_moments",
    "tilted_moments_printed",
    "tilted_moments_quadrature",
]
