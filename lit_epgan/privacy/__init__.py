"""Differential privacy: mechanisms around any algorithm, what they cost, and the ledger of a data set."""

from lit_epgan.privacy.accountant import Releases, Spent, noise_multiplier_for, spent
from lit_epgan.privacy.adaptive import AdaptiveNoise
from lit_epgan.privacy.central import CentralNoise
from lit_epgan.privacy.correlated import CorrelatedNoise
from lit_epgan.privacy.distributed import DistributedNoise
from lit_epgan.privacy.gaussian_mechanism import GaussianMechanism, Guarantee
from lit_epgan.privacy.heavy_hitters import HeavyHitters
from lit_epgan.privacy.ledger import Budget, Ledger
from lit_epgan.privacy.queries import Queries
from lit_epgan.privacy.records import RecordNoise

__all__ = [
    "AdaptiveNoise",
    "Budget",
    "CentralNoise",
    "CorrelatedNoise",
    "DistributedNoise",
    "GaussianMechanism",
    "Guarantee",
    "HeavyHitters",
    "Ledger",
    "Queries",
    "RecordNoise",
    "Releases",
    "Spent",
    "noise_multiplier_for",
    "spent",
]
