"""Lightning callbacks: the federation itself, and what shows how it goes."""

from lit_epgan.callbacks.boosted_classifiers import BoostedClassifiers
from lit_epgan.callbacks.classifier_prior import ClassifierPrior
from lit_epgan.callbacks.client_metrics import ClientMetrics
from lit_epgan.callbacks.client_report import ClientReport
from lit_epgan.callbacks.curve_fit import CurveFit
from lit_epgan.callbacks.downstream_accuracy import DownstreamAccuracy
from lit_epgan.callbacks.federated_strategy import FederatedStrategy
from lit_epgan.callbacks.federation import FederationCallback
from lit_epgan.callbacks.generative_metrics import GenerativeMetrics
from lit_epgan.callbacks.partition_report import PartitionReport
from lit_epgan.callbacks.personal_metrics import PersonalMetrics
from lit_epgan.callbacks.posterior_predictive import PosteriorPredictive
from lit_epgan.callbacks.posterior_report import MixtureErrors, PosteriorReport
from lit_epgan.callbacks.prediction_writer import PredictionWriter, SampleWriter, TestedRecords
from lit_epgan.callbacks.progress import FederatedProgressBar
from lit_epgan.callbacks.round_checkpoint import RoundCheckpoint
from lit_epgan.callbacks.rounds_to_target import RoundsToTarget
from lit_epgan.callbacks.sample_grid import SampleGrid
from lit_epgan.callbacks.toy_metrics import DensityMap, ToyMetrics
from lit_epgan.callbacks.word_error_rate import WordErrorRate

__all__ = [
    "BoostedClassifiers",
    "ClassifierPrior",
    "ClientMetrics",
    "ClientReport",
    "CurveFit",
    "DensityMap",
    "DownstreamAccuracy",
    "FederatedProgressBar",
    "FederatedStrategy",
    "FederationCallback",
    "GenerativeMetrics",
    "MixtureErrors",
    "PartitionReport",
    "PersonalMetrics",
    "PosteriorPredictive",
    "PosteriorReport",
    "PredictionWriter",
    "RoundCheckpoint",
    "RoundsToTarget",
    "SampleGrid",
    "SampleWriter",
    "TestedRecords",
    "ToyMetrics",
    "WordErrorRate",
]
