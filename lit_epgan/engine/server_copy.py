"""The server's side as it is between two rounds, to go back to when a round is refused or cut off."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lit_epgan.engine.rounds import Federation


class ServerCopy:
    """All that a round changes at the server; the clients' private states have a way back of their own.

    Args:
        federation: whose server it is.

    Attributes:
        parameters: the flat vector (d,).
        tensors: what of the module lies outside it, by name.
    """

    def __init__(self, federation: "Federation") -> None:
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
