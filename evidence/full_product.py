"""EP without its cavity: every client is pulled to the product of all sites, its own included. For ablations.yaml."""

from lit_epgan.bayes import EmbeddingFactor
from lit_epgan.bayes.gaussian import GaussianFactor
from lit_epgan.engine import Broadcast, Client
from lit_epgan.federated import EmbeddingSites, ExpectationPropagation, GeneratorSites
from lit_epgan.federated.function_space.embedding_release import TOTAL


class FullExpectationPropagation(ExpectationPropagation):
    """A, each client pulled to q."""

    def cavity(self, client: Client, sent: Broadcast) -> tuple[GaussianFactor, float]:
        """q, and all sites, for the strength of the pull is that of one of them."""
        return self._posterior(sent), float(sent["sites"])


class FullGeneratorSites(GeneratorSites):
    """B, each client trained on samples of its own generator, too."""

    def seen_by(self, client: int, sites: list[int]) -> list[int]:
        """All of them."""
        return sites


class FullEmbeddingSites(EmbeddingSites):
    """C, each client trained on points for all clients' records, its own included."""

    def cavity(self, client: Client, sent: Broadcast) -> EmbeddingFactor | None:
        """The product of all sites; None before there are any."""
        return self.release.total(sent) if TOTAL in sent else None
