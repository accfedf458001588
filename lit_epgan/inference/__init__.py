"""Approximate Bayesian inference as pure tensor functions."""

from lit_epgan.inference.ep import Sites, TiedSites, damped, sweep
from lit_epgan.inference.full_gaussian import FullGaussianFactor
from lit_epgan.inference.gaussian import GaussianFactor, ImproperFactorError
from lit_epgan.inference.mixture import component_log_densities, gumbel_softmax, mixture_log_density, responsibilities
from lit_epgan.inference.sghmc import SGHMC
from lit_epgan.inference.tilted import tilted_moments, tilted_moments_printed, tilted_moments_quadrature

__all__ = [
    "SGHMC",
    "FullGaussianFactor",
    "GaussianFactor",
    "ImproperFactorError",
    "Sites",
    "TiedSites",
    "component_log_densities",
    "damped",
    "gumbel_softmax",
    "mixture_log_density",
    "responsibilities",
    "sweep",
    "tilted_moments",
    "tilted_moments_printed",
    "tilted_moments_quadrature",
]
