"""Samples of a client's site: what of a module is a site, and what is drawn of one or several."""

import torch
from torch import Tensor, nn

from lit_epgan.networks.modes import evaluating
from lit_epgan.randomness import generator_for

Samples = tuple[Tensor, Tensor | None]  # rows and their labels, if they have any


class SiteTensors:
    """What of a module is a site, as one vector.

    Args:
        module: offers ``sample(n, generator)``, or ``sample_labelled`` and a buffer ``label_shares``.
        generator: name of the submodule that it draws from.
    """

    def __init__(self, module: nn.Module, generator: str) -> None:
        self._module, self._generator = module, generator

    def _tensors(self) -> list[Tensor]:
        submodule = self._module.get_submodule(self._generator)
        shares = [self._module.get_buffer("label_shares")] if hasattr(self._module, "sample_labelled") else []
        tensors = [*submodule.parameters(), *submodule.buffers(), *shares]
        return [t.detach() for t in tensors if t.is_floating_point()]

    def read(self) -> Tensor:
        """The vector, copied."""
        return torch.cat([t.flatten() for t in self._tensors()])

    def load(self, site: Tensor) -> None:
        """Make the module hold a site."""
        start = 0
        for tensor in self._tensors():
            tensor.copy_(site[start : start + tensor.numel()].view_as(tensor))
            start += tensor.numel()

    @torch.no_grad()
    def draw(self, site: Tensor, n: int, *stream: str | int) -> Samples:
        """n samples of a site, and their labels where it knows any, leaving the module as it was.

        Args:
            site: the vector.
            n: how many.
            stream: what their randomness is derived from.
        """
        kept, module = self.read(), self._module
        self.load(site)
        generator = generator_for(*stream)
        with evaluating(module):
            if hasattr(module, "sample_labelled"):
                samples, labels = module.sample_labelled(n, generator)  # type: ignore[operator]
            else:
                samples, labels = module.sample(n, generator), None  # type: ignore[operator]
        self.load(kept)
        return samples, labels


def joined(pools: list[Samples]) -> Samples:
    """Pools (n, ...) of the sites as one (sites, n, ...), and their labels."""
    labels = [y for _, y in pools if y is not None]
    return torch.stack([x for x, _ in pools]), torch.stack(labels) if labels else None


def drawn(pools: Samples, records: Tensor, rows: int) -> Samples:
    """``rows`` samples of pools (sites, n, ...), sites in proportion to their ``records`` (sites,)."""
    samples, labels = pools
    origin = torch.multinomial(records, rows, replacement=True)
    index = torch.randint(samples.shape[1], (rows,))
    place = origin.to(samples.device), index.to(samples.device)
    return samples[place], None if labels is None else labels[place]
