"""Mean embeddings of data sets: random features, herded points, cavity weights, private release."""

from lit_epgan.embedding.codes import LowFrequencies, Points
from lit_epgan.embedding.factor import EmbeddingFactor
from lit_epgan.embedding.feature_maps import feature_map
from lit_epgan.embedding.fourier import RandomFourierFeatures, median_distance
from lit_epgan.embedding.gaussian_mechanism import GaussianMechanism, Guarantee
from lit_epgan.embedding.herding import herd
from lit_epgan.embedding.matched_rows import matched_rows, new_networks
from lit_epgan.embedding.moments import NormalisedMoments
from lit_epgan.embedding.simplex import SimplexWeights, project_to_simplex
from lit_epgan.embedding.stacked_frames import StackedFrames

__all__ = [
    "EmbeddingFactor",
    "GaussianMechanism",
    "Guarantee",
    "LowFrequencies",
    "NormalisedMoments",
    "Points",
    "RandomFourierFeatures",
    "SimplexWeights",
    "StackedFrames",
    "feature_map",
    "herd",
    "matched_rows",
    "median_distance",
    "new_networks",
    "project_to_simplex",
]
