"""Copies of what objects hold, as plain data, and the same objects put back as they were."""
