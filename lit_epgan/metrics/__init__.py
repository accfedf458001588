"""Metrics of generated samples: extractors of features, scores of images, scores of points in the plane."""

import importlib.util
from typing import Literal, get_args

from lit_epgan.lib.errors import UserError
from lit_epgan.metrics.feature_extractors import FeatureExtractor, Pixels
from lit_epgan.metrics.image_classifiers import (
    digits_classifier,
    emoji_classifier,
    fashion_classifier,
    typefaces_classifier,
)
from lit_epgan.metrics.pretrained_extractors import PACKAGE, Inception, Lite0, Lite0Blocks

ExtractorName = Literal["digits", "fashion", "emoji", "typefaces", "inception", "lite0", "pixels"]


def feature_extractor(name: str, data_dir: str = "data") -> FeatureExtractor:
    """The extractor of that name, ready to use; ``fashion``, ``emoji`` and ``typefaces`` are trained on what is in
    ``data_dir``. UserError: there is none of that name, or it lacks a file or a package; the message says what to do.
    """
    if name == "digits":
        return digits_classifier()
    if name == "fashion":
        return fashion_classifier(data_dir)
    if name == "emoji":
        return emoji_classifier(data_dir)
    if name == "typefaces":
        return typefaces_classifier(data_dir)
    if name == "inception":
        return Inception()
    if name == "lite0":
        return Lite0()
    if name == "pixels":
        return Pixels()
    raise UserError(f"extractor {name!r} does not exist: choose one of {', '.join(get_args(ExtractorName))}.")


def fitting_extractor(dataset: str | None = None) -> ExtractorName:
    """The extractor of a known set of images (``digits``, ``fashion_mnist``, ``emoji``, ``typefaces``), else ``lite0``
    where its package is installed, else ``pixels``: the latter two take images of any size and colour."""
    classifiers: dict[str | None, ExtractorName] = {"fashion_mnist": "fashion"}
    classifiers |= {name: name for name in ("digits", "emoji", "typefaces")}
    return classifiers.get(dataset) or ("lite0" if importlib.util.find_spec(PACKAGE) else "pixels")


__all__ = [
    "ExtractorName",
    "FeatureExtractor",
    "Lite0",
    "Lite0Blocks",
    "Pixels",
    "feature_extractor",
    "fitting_extractor",
]
