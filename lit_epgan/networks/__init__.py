"""Networks of the GANs: multilayer perceptrons and DCGANs."""

from lit_epgan.networks.dcgan import DCGANDiscriminator, DCGANGenerator
from lit_epgan.networks.mlp import MLPDiscriminator, MLPGenerator

__all__ = ["DCGANDiscriminator", "DCGANGenerator", "MLPDiscriminator", "MLPGenerator"]
