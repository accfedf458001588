"""The LightningModules, and the priors that a Bayesian GAN takes; they know nothing of federation."""

from lit_epgan.modules.acoustic_model import AcousticModel, SpeechGAN
from lit_epgan.modules.conditional import CVAE, ConditionalGAN
from lit_epgan.modules.flow import ConditionalFlow, Flow
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.language_model import LanguageModel
from lit_epgan.modules.posterior import Posterior, PosteriorOfCodes, SuffiAE
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior, UniformPrior
from lit_epgan.modules.supervised import Classifier, Regression

__all__ = [
    "CVAE",
    "GAN",
    "AcousticModel",
    "Classifier",
    "ConditionalFlow",
    "ConditionalGAN",
    "Flow",
    "GaussianPrior",
    "HistoryPrior",
    "LanguageModel",
    "Posterior",
    "PosteriorOfCodes",
    "Regression",
    "SpeechGAN",
    "SuffiAE",
    "UniformPrior",
]
