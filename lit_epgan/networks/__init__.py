"""Networks: MLPs and DCGANs of the GANs, residual networks, SRUs of the speech recogniser, LSTMs of language models."""

from lit_epgan.networks.acoustic import SRUAcousticNetwork
from lit_epgan.networks.chunk_generator import ChunkGenerator
from lit_epgan.networks.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_epgan.networks.language import CIFGLanguageNetwork
from lit_epgan.networks.mlp import MLPBackbone, MLPDiscriminator, MLPGenerator
from lit_epgan.networks.mnist import MNISTDiscriminator, MNISTGenerator
from lit_epgan.networks.polynomial import PolynomialFeatures
from lit_epgan.networks.resnet import ResNet18
from lit_epgan.networks.sru import SRU
from lit_epgan.networks.sru_discriminator import SRUDiscriminator

__all__ = [
    "SRU",
    "CIFGLanguageNetwork",
    "ChunkGenerator",
    "DCGANDiscriminator",
    "DCGANGenerator",
    "MLPBackbone",
    "MLPDiscriminator",
    "MLPGenerator",
    "MNISTDiscriminator",
    "MNISTGenerator",
    "PolynomialFeatures",
    "ResNet18",
    "SRUAcousticNetwork",
    "SRUDiscriminator",
]
