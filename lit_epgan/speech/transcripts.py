"""What of a transcript is words."""

import re
import unicodedata
from collections.abc import Sequence

from lit_epgan.errors import UserError

TAGS = ("[]", "<>", "()", "{}")
APOSTROPHES = "\u2019\u2018\u201b\u02bc\u02b9\u02bb\u2032\uff07\u00b4`"  # all of which people type within a word


def plain_words(text: str, tags: Sequence[str] = TAGS) -> str:
    """Words in lower case without punctuation, their letters composed (Unicode's NFC), each apostrophe the same.

    Args:
        text: as it was transcribed.
        tags: pairs of brackets, such as ``<>``: what stands within one, such as <noise>, is no word.

    Raises:
        UserError: a tag is no pair of characters.
    """
    spoken = unicodedata.normalize("NFC", text.lower())
    for pair in tags:
        check_tag(pair)
        spoken = re.sub(f"{re.escape(pair[0])}[^{re.escape(pair[1])}]*{re.escape(pair[1])}", " ", spoken)
    spoken = spoken.translate(str.maketrans(APOSTROPHES, "'" * len(APOSTROPHES)))
    spoken = re.sub(r"(?<=\b[a-z])\.(?=[a-z]\b)", "", spoken)  # u.s.
    words = "".join(letter if _is_spoken(letter) else " " for letter in spoken if not _is_unseen(letter)).split()
    bare = [word if word.strip("'") in ("em", "cause") else word.strip("'") for word in words]
    return " ".join(word for word in bare if word)


def check_tag(pair: str) -> None:
    """Refuse what is no pair of brackets.

    Raises:
        UserError: it has more characters than two, or fewer.
    """
    if len(pair) != 2:
        raise UserError(f"data.tags has {pair!r}, but each is a pair of brackets, such as '<>'.")


def _is_spoken(letter: str) -> bool:
    """Whether it is part of a word: many scripts write vowels as marks (M) of a letter."""
    return letter.isalnum() or letter == "'" or unicodedata.category(letter).startswith("M")


def _is_unseen(letter: str) -> bool:
    """Whether it is a soft hyphen, a joiner or the like, which part no word."""
    return unicodedata.category(letter) == "Cf"
