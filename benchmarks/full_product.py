"""EP without its cavity: every client is pulled to the product of all sites, its own included. For ablations.yaml."""

from lit_epgan.embedding import EmbeddingFactor
from lit_epgan.engine import Broadcast, Client, Work
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, GeneratorSites
from lit_epgan.federated.bayesian.ep import SiteReport, TiltedTraining
from lit_epgan.federated.function_space.embedding_sites import EmbeddingWork
from lit_epgan.federated.function_space.embedding_release import TOTAL
from lit_epgan.inference.gaussian import GaussianFactor


class FullReport(SiteReport):
    """Takes q for the cavity."""

    def cavity(self) -> GaussianFactor:
        """q."""
        return self.posterior

    def others(self) -> float:
        """All sites, for the strength of the pull is that of one of them."""
        return float(self.received["sites"])


class FullTraining(TiltedTraining):
    """Steps towards q."""

    def __init__(self, settings: ExpectationPropagation, client: Client, received: Broadcast) -> None:
        super().__init__(settings, client, received)
        self.reports = FullReport(settings, client, received)


class FullExpectationPropagation(ExpectationPropagation):
    """A, each client pulled to q."""

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """Training towards q."""
        return (
            [FullTraining(self, client, received)] if question == "train" else super().works(question, client, received)
        )


class FullGeneratorSites(GeneratorSites):
    """B, each client trained on samples of its own generator, too."""

    def seen_by(self, client: int, sites: list[int]) -> list[int]:
        """All of them."""
        return sites


class FullEmbeddingWork(EmbeddingWork):
    """Points weighed to the sum of all clients' embeddings."""

    def cavity(self) -> EmbeddingFactor | None:
        """The product of all sites; None before there are any."""
        return self.release.total(self.received) if TOTAL in self.received else None


class FullEmbeddingSites(EmbeddingSites):
    """C, each client trained on points for all clients' records, its own included."""

    def works(self, question: str, client: Client, received: Broadcast) -> list[Work]:
        """The points in the minibatch."""
        inner = super().works(question, client, received)
        return [*inner[:-1], FullEmbeddingWork(self, client, received)] if question == "train" else inner
