"""Algorithms that keep a distribution over parameters: expectation propagation, its sites, posteriors."""
