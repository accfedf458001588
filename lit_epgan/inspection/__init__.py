"""Looking at data nobody may look at: selections on the users' side, one release, and a page."""

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.federated_generator import FederatedGenerator
from lit_epgan.inspection.group_models import FederatedGAN, FederatedLanguageModel
from lit_epgan.inspection.image_view import ImageView
from lit_epgan.inspection.inspection import Inspection, Price
from lit_epgan.inspection.selections import (
    AllExamples,
    Misclassified,
    OutsideVocabulary,
    Selection,
    Slice,
    UnknownLabels,
    Unlabelled,
    UnlikePublic,
    UsersByAccuracy,
    Where,
)
from lit_epgan.inspection.view import Check, Findings, Panel, Users, View
from lit_epgan.inspection.words_view import WordsView

__all__ = [
    "AllExamples",
    "Ask",
    "Check",
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
