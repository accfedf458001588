"""Weights of Inception's layout that stand in for the published ones, which have to be fetched."""

import hashlib
from pathlib import Path

from lit_epgan.metrics.pretrained_extractors import Inception


def stand_in(weights: Path) -> Inception:
    class StandIn(Inception):
        sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()

    return StandIn(weights)
