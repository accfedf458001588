"""Mean embeddings of data sets: random features, herded points, cavity weights, private release."""

from lit_epgan.embedding.codes import LowFrequencies, Points, PublicDirections, StackedFrames
from lit_epgan.embedding.factor import EmbeddingFactor
from lit_epgan.embedding.feature_maps import NormalisedMoments, RandomFourierFeatures, feature_map, median_distance
from lit_epgan.embedding.gaussian_mechanism import GaussianMechanism, Guarantee
from lit_epgan.embedding.herding import SimplexWeights, herd, matched_rows, new_networks, project_to_simplex

__all__ = [
    "EmbeddingFactor",
    "GaussianMechanism",
    "Guarantee",
    "LowFrequencies",
    "NormalisedMoments",
    "Points",
    "PublicDirections",
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
