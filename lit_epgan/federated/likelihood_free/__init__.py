"""Algorithms that need neither a gradient nor a likelihood: clients say how far simulated data are from theirs."""
