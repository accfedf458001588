"""Examples that the public data do not have: a kernel density of the public data weighs private examples."""

from collections.abc import Callable, Iterator

from torch import Tensor

from lit_epgan.errors import UserError
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.features import ImageFeatures
from lit_epgan.inspection.records import Records
from lit_epgan.inspection.selections import Selection


class UnlikePublic(Selection):
    """T6, detecting bias in the training data: examples with high density where the model serves (the users) and low
    density where it was trained (the public data).

        w(x) = min(1, c / p(x))^sharpness,   p(x) = <phi(x), mu>

    p is the kernel density of the public data (phi: random Fourier features, mu: their mean over half of the public
    examples), and c its quantile at the other half. With sharpness 1 the private examples' weighted density is that of
    the ratio of private to public density, bounded; a larger one leaves less of what the public data have, too. A
    user counts with a weighted mean, so moves the sum by no more than any other.

    Args:
        quantile: the share of public examples of full weight.
        sharpness: see above.
        at_least: the weight of a user's examples that makes the user count.
        frequencies: of phi.

    Raises:
        UserError: the quantile is no share, or the sharpness not above 0.
    """

    task = "T6, detecting bias in the training data"
    groups = ("unlike the public data",)

    def __init__(
        self, quantile: float = 0.05, sharpness: float = 8.0, at_least: float = 5.0, frequencies: int = 256
    ) -> None:
        if not 0 < quantile < 1 or not sharpness > 0:
            raise UserError(
                f"selection.quantile is {quantile} and selection.sharpness {sharpness}: a share between 0 and 1, and a "
                "number above 0"
            )
        self.quantile, self.sharpness, self.at_least, self.frequencies = quantile, sharpness, at_least, frequencies
        self._features: ImageFeatures | None = None

    def settle(self, users: Callable[[], Iterator[Records]], public: Records | None, ask: Ask) -> None:
        """Model the public data; the private ones are not looked at.

        Raises:
            UserError: there are too few public data.
        """
        if public is None or len(public.x) < 20:
            raise UserError("the selection of what is unlike the public data needs public data: the data module has "
                            "none to validate on")  # fmt: skip
        self._features = ImageFeatures.of(tuple(public.x.shape[1:]), self.frequencies)
        seen = self._features(public.x)
        self._mean = seen[::2].mean(0)
        self._threshold = float((seen[1::2] @ self._mean).quantile(self.quantile).clamp_min(1e-6))

    def weights(self, records: Records) -> Tensor:
        """min(1, c / p)^sharpness, and 1 where p is estimated at or below c."""
        assert self._features is not None
        density = self._features(records.x) @ self._mean
        return (self._threshold / density.clamp_min(self._threshold)).pow(self.sharpness)[:, None]
