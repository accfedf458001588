"""Networks: multilayer perceptrons and DCGANs of the GANs, SRUs of the speech recogniser."""

from lit_epgan.networks.chunk_generator import ChunkGenerator
from lit_epgan.networks.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_epgan.networks.mlp import MLPDiscriminator, MLPGenerator
from lit_epgan.networks.sru import SRU
from lit_epgan.networks.sru_discriminator import SRUDiscriminator

__all__ = [
    "SRU",
    "ChunkGenerator",
    "DCGANDiscriminator",
    "DCGANGenerator",
    "MLPDiscriminator",
    "MLPGenerator",
    "SRUDiscriminator",
]
