"""A small recogniser with a GAN's features, and frames that it can learn."""

import torch

from lit_epgan.modules.acoustic_model import SpeechGAN
from lit_epgan.networks import MLPGenerator, SRUDiscriminator
from lit_epgan.networks.speech_networks import SRUAcousticNetwork

FRAMES, INPUTS, BOTTLENECK, STATES = 4, 5, 3, 2


def speech_gan(kind=SpeechGAN, **options):
    torch.manual_seed(0)
    return kind(
        SRUAcousticNetwork(INPUTS + BOTTLENECK, 6, 1, 6, STATES, dropout=0.0),
        MLPGenerator((FRAMES, INPUTS), latent_dim=2, hidden=(8,), tanh=False, members=2),
        SRUDiscriminator(INPUTS, 6, 1, BOTTLENECK, heads=2, dropout=0.0),
        objective="lsgan",
        average=None,
        **options,
    )


def batch(n=6, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, FRAMES, INPUTS, generator=generator, dtype=dtype)
    return x, (x[:, :, 0] > 0).long()
