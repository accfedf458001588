"""The acoustic model of a hybrid recogniser: from frames to scores of HMM states."""

from torch import Tensor, nn

from lit_epgan.networks.sizes import check_positive
from lit_epgan.networks.sru import SRU


class SRUAcousticNetwork(nn.Module):
    """Frames (batch, frames, inputs) -> scores (batch, frames, pdfs): EP-GAN's figure 11, FedNP's appendix D.4.

    A dense layer inputs-H, SRU layers of width H, a dense layer H-projection, ReLU, a dense layer to the HMM states.
    The papers' is ``hidden=1280, layers=12``.

    Args:
        inputs: columns of a frame: 40 log-mel bins of it and of 4 future frames, and features beside them, if any.
        hidden: H.
        layers: SRU layers.
        projection: width of the layer before the last.
        pdfs: HMM states; 3 of each of 41 phones.
        dropout: between SRU layers.

    Raises:
        UserError: a size below one.
    """

    def __init__(
        self,
        inputs: int = 200,
        hidden: int = 256,
        layers: int = 4,
        projection: int = 1024,
        pdfs: int = 123,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        check_positive("an acoustic network", inputs=inputs, hidden=hidden, projection=projection, pdfs=pdfs)
        self.inputs, self.pdfs = inputs, pdfs
        self.first = nn.Linear(inputs, hidden)
        self.recurrent = SRU(hidden, hidden, layers, dropout)
        self.last = nn.Sequential(nn.Linear(hidden, projection), nn.ReLU(), nn.Linear(projection, pdfs))

    def forward(self, x: Tensor) -> Tensor:
        """Scores (batch, frames, pdfs); their log-softmax are the states' log posteriors."""
        scores: Tensor = self.last(self.recurrent(self.first(x)))
        return scores
