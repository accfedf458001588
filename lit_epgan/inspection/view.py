"""What is released of users' data, and what a page shows of it: one class for each kind of data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.user_records import Records, blocks

PUBLIC = "public data"
POWER = 1.645  # standard deviations by which an alarm is missed once in twenty times


@dataclass(frozen=True)
class Users:
    """Whom an inspection looks at: each user's private records, by name, of which whatever is taken leaves through an
    ``Ask``; public records of the same kind; what is selected of them; and the model that selections ask, records ->
    labels (n,)."""

    private: Mapping[str, Dataset]
    public: Dataset | None
    selection: Selection
    primary: Callable[[Records], Tensor] | None = None

    def records(self) -> Iterator[Records]:
        """The private records, block by block, with the primary model's labels."""
        for records in blocks(self.private):
            yield records if self.primary is None else records.with_predictions(self.primary(records))


@dataclass(frozen=True)
class Panel:
    """A group as the page shows it, beside the others.

    Attributes:
        title: of the group.
        lines: what is known of it.
        picture: a PNG's bytes, if there is one.
        words: with a noised count each, if there are any.
        refused: why nothing is shown, if so.
        samples: a PNG's bytes, of what the group's GAN makes, if there is one.
        made_words: what the group's language model makes, if there is one.
        made: what is known of these.
    """

    title: str
    lines: Sequence[str] = ()
    picture: bytes | None = None
    words: Sequence[tuple[str, str]] = ()
    refused: str = ""
    samples: bytes | None = None
    made_words: Sequence[str] = ()
    made: Sequence[str] = ()


@dataclass(frozen=True)
class Check:
    """A detector as the page shows it: an estimate and its interval [low, high] against a band of ``tolerance`` around
    0, all in one unit; ``scale`` is half the width of the picture, ``note`` a sentence on rates."""

    title: str
    sides: str
    estimate: float
    low: float
    high: float
    tolerance: float
    scale: float
    alarm: bool
    note: str


@dataclass
class Findings:
    """What an inspection has found, all of it computed from what was released.

    Attributes:
        panels: the groups.
        checks: the detectors.
        released: sentences: what has left the users.
        look_next: sentences: what to look at next.
        rates: a sentence on the detectors together.
        reading: how the groups are to be read.
        kept: what was released: tensors, numbers and text, for a file.
    """

    panels: list[Panel] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    look_next: list[str] = field(default_factory=list)
    rates: str = ""
    reading: str = ""
    kept: dict[str, Any] = field(default_factory=dict)


class View(ABC):
    """One kind of data."""

    delta_share: float = 0.0  # the share of the inspection's delta that a selection of words takes (``Ask.shown``)

    @abstractmethod
    def look(self, users: Users, ask: Ask) -> Findings:
        """Ask, once or by parts of the price, and say what the answers tell."""
