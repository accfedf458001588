"""FedRep: a representation that all share, and each client's own head, trained in turn."""

from lit_epgan.engine import Algorithm, Broadcast, Client, Message, OptimizedParameters
from lit_epgan.lib.bounds import within
from lit_epgan.lib.errors import UserError


class FedRep(Algorithm):
    """Each client's head is trained first, then the representation (Collins et al. 2021, algorithm 1).

    The head is what clients keep: ``FederationCallback(local=["head.*"])``. FedAvg trains both at once there.

    Price: FedAvg's, without the head's bytes.

    Args:
        share: of a round's local steps, those of the head alone; the others are the representation's alone.
    """

    def __init__(self, share: float = 0.5) -> None:
        within("(0, 1)", self, share=share)
        self.share = share

    def train(self, client: Client, sent: Broadcast) -> Message:
        """The head's steps, then the representation's.

        Raises:
            UserError: the client keeps no layers, or does not know how many steps it will take.
        """
        shared = {id(p) for part in client.optimized for p in part.parameters}
        heads = [p for p in client.module.parameters() if p.requires_grad and id(p) not in shared]
        if not heads or client.steps is None:
            raise UserError(
                "FedRep needs layers that clients keep, as local: [head.*], and a known number of local steps"
            )
        first = round(self.share * client.steps)

        def hold(part: OptimizedParameters) -> None:
            for parameter in part.parameters if client.step <= first else heads:
                parameter.grad = None

        client.fit(sent["parameters"], gradient=hold)
        return self.Report(change=client.change)
