"""The joint probability that a language model gives a sentence."""

from torch import Tensor

from lit_epgan.networks import CIFGLanguageNetwork


def log_probabilities(network: CIFGLanguageNetwork, symbols: Tensor, mask: Tensor) -> Tensor:
    """log p(x_1, ..., x_T) = sum_t log p(x_t | x_1, ..., x_{t-1}): Augenstein et al. 2020, equation 1.

    Args:
        network: the model.
        symbols: int64 (batch, T), each row from its begin to its end.
        mask: bool (batch, T), where there is something.

    Returns:
        Float (batch,).
    """
    logs = network(symbols[:, :-1]).log_softmax(-1).gather(2, symbols[:, 1:, None])[..., 0]
    return (logs * mask[:, 1:]).sum(1)
