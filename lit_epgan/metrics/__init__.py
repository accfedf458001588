"""Metrics of generated samples: extractors of features, scores of images, scores of points in the plane."""

from typing import Literal

from lit_epgan.lib.errors import UserError
from lit_epgan.metrics.feature_extractors import FeatureExtractor, Pixels
from lit_epgan.metrics.image_classifiers import digits_classifier, emoji_classifier, fashion_classifier
from lit_epgan.metrics.pretrained_extractors import Inception, Lite0, Lite0Blocks

ExtractorName = Literal["digits", "fashion", "emoji", "inception", "lite0", "pixels"]


def feature_extractor(name: str, data_dir: str = "data") -> FeatureExtractor:
    """The extractor called ``digits``, ``fashion``, ``emoji``, ``inception``, ``lite0`` or ``pixels``, ready to use;
    ``fashion`` and ``emoji`` are trained on the images in ``data_dir``. UserError: there is none of that name, or it
    lacks a file or a package; the message says what to do."""
    if name == "digits":
        return digits_classifier()
    if name == "fashion":
        return fashion_classifier(data_dir)
    if name == "emoji":
        return emoji_classifier(data_dir)
    if name == "inception":
        return Inception()
    if name == "lite0":
        return Lite0()
    if name == "pixels":
        return Pixels()
    raise UserError(f"extractor {name!r} does not exist: choose digits, fashion, emoji, inception, lite0 or pixels.")


__all__ = ["ExtractorName", "FeatureExtractor", "Lite0", "Lite0Blocks", "Pixels", "feature_extractor"]
