"""Looking at data nobody may look at: selections on the users' side, one release, and a page."""

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.density import UnlikePublic
from lit_epgan.inspection.federated_gan import FederatedGAN
from lit_epgan.inspection.federated_generator import FederatedGenerator
from lit_epgan.inspection.federated_language_model import FederatedLanguageModel
from lit_epgan.inspection.images import ImageView
from lit_epgan.inspection.inspection import Inspection, Price
from lit_epgan.inspection.selections import (
    Everyone,
    Misclassified,
    Selection,
    Slice,
    UnknownLabels,
    Unlabelled,
    UsersByAccuracy,
    Where,
)
from lit_epgan.inspection.text import OutsideVocabulary
from lit_epgan.inspection.view import Check, Findings, Panel, Users, View
from lit_epgan.inspection.words_view import WordsView

__all__ = [
    "Ask",
    "Check",
    "Everyone",
    "FederatedGAN",
    "FederatedGenerator",
    "FederatedLanguageModel",
    "Findings",
    "ImageView",
    "Inspection",
    "Misclassified",
    "OutsideVocabulary",
    "Panel",
    "Price",
    "Selection",
    "Slice",
    "UnknownLabels",
    "Unlabelled",
    "UnlikePublic",
    "Users",
    "UsersByAccuracy",
    "View",
    "Where",
    "WordsView",
]
