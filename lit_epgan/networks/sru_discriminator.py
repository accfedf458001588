"""A discriminator of speech whose encoder is an SRU, and the bottleneck features that recognition takes from it."""

import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.networks.sizes import check_positive
from lit_epgan.networks.sru import SRU


class SRUDiscriminator(nn.Module):
    """Chunks (n, frames, inputs) -> scores (n, heads), as in EP-GAN's figure 11 and appendix F.4.2.

    An SRU encodes the frames; a dense layer to the bottleneck and a dense layer to the heads discriminate, with the
    mean over frames between them. The bottleneck's outputs are what ``features`` gives for each frame.

    Args:
        inputs: columns of a frame.
        hidden, layers: of the SRU; the paper's are like the acoustic model's.
        bottleneck: width of the features.
        heads: discriminators that share all but the last layer.
        dropout: between SRU layers.

    Raises:
        UserError: a size below one.
    """

    def __init__(
        self,
        inputs: int = 200,
        hidden: int = 128,
        layers: int = 2,
        bottleneck: int = 64,
        heads: int = 1,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_positive("an SRU discriminator", bottleneck=bottleneck, heads=heads)
        self.encoder = SRU(inputs, hidden, layers, dropout)
        self.bottleneck = nn.Linear(hidden, bottleneck)
        self.heads = nn.Linear(bottleneck, heads)
        self.features_width = bottleneck

    def features(self, x: Tensor) -> Tensor:
        """Bottleneck features (n, frames, bottleneck) of ``x`` (n, frames, inputs)."""
        features: Tensor = self.bottleneck(self.encoder(x))
        return features

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n, heads) of ``x`` (n, frames, inputs)."""
        scores: Tensor = self.heads(F.leaky_relu(self.features(x), 0.2).mean(1))
        return scores
