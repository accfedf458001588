"""Lightning callbacks: the federation itself, and what shows how it goes."""

from callbacks.client_metrics import ClientMetrics
from callbacks.federated_strategy import FederatedStrategy
from callbacks.federation import FederationCallback
from callbacks.round_checkpoint import RoundCheckpoint

__all__ = ["ClientMetrics", "FederatedStrategy", "FederationCallback", "RoundCheckpoint"]
