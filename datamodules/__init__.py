"""LightningDataModules whose training loader yields a round's clients one after another."""

from datamodules.base import ClientData, FederatedDataModule
from datamodules.institutions import Institutions

__all__ = ["ClientData", "FederatedDataModule", "Institutions"]
