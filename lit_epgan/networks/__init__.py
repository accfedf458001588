"""Networks of GANs and flows, residual networks, SRUs of the speech recogniser, LSTMs of language models."""

from lit_epgan.networks.image_gans import DCGANDiscriminator, DCGANGenerator, MNISTDiscriminator, MNISTGenerator
from lit_epgan.networks.language import CIFGLanguageNetwork
from lit_epgan.networks.mlp import MLPBackbone, MLPDiscriminator, MLPGenerator, PolynomialFeatures
from lit_epgan.networks.resnet import ResNet18
from lit_epgan.networks.speech_networks import SRU, ChunkGenerator, SRUAcousticNetwork, SRUDiscriminator
from lit_epgan.networks.velocities import FlowGenerator, MLPVelocity, UNetVelocity

__all__ = [
    "SRU",
    "CIFGLanguageNetwork",
    "ChunkGenerator",
    "DCGANDiscriminator",
    "DCGANGenerator",
    "FlowGenerator",
    "MLPBackbone",
    "MLPDiscriminator",
    "MLPGenerator",
    "MLPVelocity",
    "MNISTDiscriminator",
    "MNISTGenerator",
    "PolynomialFeatures",
    "ResNet18",
    "SRUAcousticNetwork",
    "SRUDiscriminator",
    "UNetVelocity",
]
