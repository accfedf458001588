"""Inference from simulations alone: priors, simulators, discrepancies, sequential Monte Carlo."""
