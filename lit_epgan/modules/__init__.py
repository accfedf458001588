"""The LightningModules, and the priors that a Bayesian GAN takes; they know nothing of federation."""

from lit_epgan.modules.acoustic import AcousticModel
from lit_epgan.modules.classifier import Classifier
from lit_epgan.modules.conditional_gan import ConditionalGAN
from lit_epgan.modules.cvae import CVAE
from lit_epgan.modules.gan import GAN
from lit_epgan.modules.language_model import LanguageModel
from lit_epgan.modules.posterior import Posterior, PosteriorOfCodes
from lit_epgan.modules.priors import GaussianPrior, HistoryPrior, UniformPrior
from lit_epgan.modules.regression import Regression
from lit_epgan.modules.speech_gan import SpeechGAN
from lit_epgan.modules.suffiae import SuffiAE

__all__ = [
    "CVAE",
    "GAN",
    "AcousticModel",
    "Classifier",
    "ConditionalGAN",
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
