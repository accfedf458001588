"""The server's side as it is between two rounds, to go back to when a round is refused or cut off."""

import torch

from lit_epgan.engine.divergence import largest_norm, overflowing
from lit_epgan.engine.federation import Federation


class ServerCopy:
    """All that a round changes at the server; the clients' private states have a way back of their own.

    Args:
        federation: whose server it is.

    Attributes:
        parameters: the flat vector (d,).
        tensors: what of the module lies outside it, by name.
    """

    def __init__(self, federation: Federation) -> None:
        server, tensors = federation.server, federation.tensors
        self._federation = federation
        self.parameters = server.parameters.clone()
        self.tensors = dict(tensors.server)  # they are replaced, never written to
        self._versions = dict(tensors.versions)
        self._state = {name: value.clone() for name, value in server.state.items()}
        self._networks = None if federation.networks.server is None else federation.networks.server.clone()

    def restore(self) -> None:
        """Make the server what it was."""
        federation = self._federation
        federation.server.parameters.copy_(self.parameters)
        federation.server.state.clear()
        federation.server.state.update({name: value.clone() for name, value in self._state.items()})
        if federation.networks.server is not None and self._networks is not None:
            federation.networks.server.copy_(self._networks)
        federation.tensors.go_back(self.tensors, self._versions)

    def trouble(self) -> str | None:
        """What of the server must not be kept, as it has become since; None where all may be."""
        federation, server = self._federation, self._federation.server
        learnt = {"the server's model": server.parameters}
        learnt |= {f"the algorithm's {name!r}": value for name, value in server.state.items()}
        if federation.networks.server is not None:
            learnt["the algorithm's networks"] = federation.networks.server
        trouble = overflowing(learnt, largest_norm(server.parameters.dtype))
        for name, value in federation.tensors.server.items():
            before = self.tensors.get(name)
            if trouble is None and value is not before and value.is_floating_point():
                was = torch.isfinite(before) if before is not None and before.shape == value.shape else True
                if bool((~torch.isfinite(value) & was).any()):
                    trouble = f"the buffer {name!r} would not be finite"
        return trouble
