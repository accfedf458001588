"""Algorithms against the drift of clients whose data differ, without a distribution."""
