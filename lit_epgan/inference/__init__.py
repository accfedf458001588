"""Approximate Bayesian inference as pure tensor functions."""

from lit_epgan.inference.gaussian import GaussianFactor, ImproperFactorError

__all__ = ["GaussianFactor", "ImproperFactorError"]
