"""LightningDataModules whose training loader yields a round's clients one after another."""

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.datamodules.characters import FederatedEMNISTDataModule, LeafDataModule, TypefacesDataModule
from lit_epgan.datamodules.client_data import ClientData
from lit_epgan.datamodules.dealt_table import BreastCancerDataModule
from lit_epgan.datamodules.elsewhere import Elsewhere
from lit_epgan.datamodules.folder import FolderDataModule
from lit_epgan.datamodules.images import ImageDataModule
from lit_epgan.datamodules.institutions import Institutions
from lit_epgan.datamodules.preparation import Preparation
from lit_epgan.datamodules.speech import SpeechDataModule
from lit_epgan.datamodules.table import TableDataModule
from lit_epgan.datamodules.text import DocstringsDataModule, StackOverflowDataModule
from lit_epgan.datamodules.tiny_imagenet import TinyImageNetDataModule
from lit_epgan.datamodules.toy import PolynomialDataModule, ToyDataModule
from lit_epgan.datamodules.writers import WritersDataModule

__all__ = [
    "BreastCancerDataModule",
    "ClientData",
    "DocstringsDataModule",
    "Elsewhere",
    "FederatedDataModule",
    "FederatedEMNISTDataModule",
    "FolderDataModule",
    "ImageDataModule",
    "Institutions",
    "LeafDataModule",
    "PolynomialDataModule",
    "Preparation",
    "SpeechDataModule",
    "StackOverflowDataModule",
    "TableDataModule",
    "TinyImageNetDataModule",
    "ToyDataModule",
    "TypefacesDataModule",
    "WritersDataModule",
]
