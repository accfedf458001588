"""What algorithms share whose clients answer once: the server does all the rest."""

from lit_epgan.engine import Algorithm


class AskedOnce(Algorithm):
    """Clients answer one exchange, in the first round, and train no model."""

    def trains(self, round_: int) -> bool:
        """Never: no record reaches a training step, nor any loss that it logs."""
        return False

    def exchanges(self, start: int, stop: int) -> int:
        """One, in the first round."""
        return int(start == 0 < stop)
