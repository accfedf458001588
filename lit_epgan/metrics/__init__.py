"""Metrics of generated samples: extractors of features, scores of images, scores of points in the plane."""

from typing import Literal

from lit_epgan.errors import UserError
from lit_epgan.metrics.features import FeatureExtractor
from lit_epgan.metrics.lite0 import Lite0, Lite0Blocks
from lit_epgan.metrics.pixels import Pixels

ExtractorName = Literal["digits", "fashion", "emoji", "inception", "lite0", "pixels"]


def feature_extractor(name: str, data_dir: str = "data") -> FeatureExtractor:
    """The extractor called ``digits``, ``fashion``, ``emoji``, ``inception``, ``lite0`` or ``pixels``, ready to use.

    Args:
        name: which.
        data_dir: where ``fashion`` and ``emoji`` find the images they are trained on.

    Raises:
        UserError: there is none of that name, or it lacks a file or a package; the message says what to do.
    """
    if name == "digits":
        from lit_epgan.metrics.digits_classifier import digits_classifier

        return digits_classifier()
    if name == "fashion":
        from lit_epgan.metrics.fashion_classifier import fashion_classifier

        return fashion_classifier(data_dir)
    if name == "emoji":
        from lit_epgan.metrics.emoji_classifier import emoji_classifier

        return emoji_classifier(data_dir)
    if name == "inception":
        from lit_epgan.metrics.inception import Inception

        return Inception()
    if name == "lite0":
        return Lite0()
    if name == "pixels":
        return Pixels()
    raise UserError(f"extractor {name!r} does not exist: choose digits, fashion, emoji, inception, lite0 or pixels.")


__all__ = ["ExtractorName", "FeatureExtractor", "Lite0", "Lite0Blocks", "Pixels", "feature_extractor"]
