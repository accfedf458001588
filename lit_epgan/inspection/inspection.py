"""An inspection from its settings to its page: the price first, then the data."""

import base64
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from lightning.pytorch import LightningModule
from torch.utils.data import ConcatDataset, Dataset

from lit_epgan.datamodules.base import FederatedDataModule
from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.federated_generator import FederatedGenerator, add_generators
from lit_epgan.inspection.selections import AllExamples, Selection
from lit_epgan.inspection.user_records import Primary, Records, loaded, trained
from lit_epgan.inspection.view import Check, Findings, Users, View
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy.accountant import MOVES, RELATIONS, Relation, Releases, Spent, noise_multiplier_for
from lit_epgan.privacy.ledger import EVERYONE, Ledger, default_path
from lit_epgan.privacy.payments import check_units
from lit_epgan.privacy.queries import Queries

WIDTH = 100.0  # of an interval's picture


@dataclass(frozen=True)
class Price:
    """What an inspection may cost.

    Attributes:
        epsilon: of the whole inspection but its generators, which have one of their own; its noise is the smallest that
            keeps it.
        delta: for which epsilon is stated; below one over the number of users.
        relation: which data sets are neighbours, ``zero_out`` or ``replace_one``.
        ledger: the data set's, which everybody who looks at it shares; by default one for each data set and user of the
            machine (``$LIT_EPGAN_LEDGERS``).
        budget: the largest epsilon that the ledger allows; null for no limit.
        group: the users, as the ledger names them.
        noise_seed: repeats the noise, for studies: then there is no guarantee in real use.
    """

    epsilon: float = 2.0
    delta: float = 1e-5
    relation: Relation = "zero_out"
    ledger: str | None = None
    budget: float | None = None
    group: str = EVERYONE
    noise_seed: int | None = None


@dataclass(frozen=True)
class Inspection:
    """Looks at what users' data are like without looking at them.

    Attributes:
        data: the users, a client each; its validation data are taken to be public.
        view: what is released and shown.
        selection: what of the users' data is looked at; by default everything.
        primary: the model that is asked what it gets right; any LightningModule with ``predict_step``.
        generator: trains a GAN or a language model for each group, beside what the view releases; null for none.
        checkpoint: of the primary model. Without one it is trained on the public data.
        epochs, batch_size: of that training.
        price: in epsilon.
        title, description: for the page.
        seed: of that training.
    """

    data: FederatedDataModule
    view: View
    selection: Selection | None = None
    primary: LightningModule | None = None
    generator: FederatedGenerator | None = None
    checkpoint: str | None = None
    epochs: int = 15
    batch_size: int = 32
    price: Price = Price()
    title: str = "An inspection"
    description: str = ""
    seed: int = 0

    @property
    def rule(self) -> Selection:
        """The selection, or the one of everything."""
        return self.selection or AllExamples()

    def ask(self, name: str) -> Ask:
        """The question that the inspection may ask, by its name in the ledger; the noise follows from its price.
        UserError: the price is none, or would pass the budget, or a model is missing: before any data are read."""
        if self.rule.asks_primary and self.primary is None:
            raise UserError(f"{self.rule.task} asks what a model gets right: give it, as primary")
        price = self.price
        ledger = Ledger(price.ledger or default_path(self.data.origin, "user"))
        queries = Queries(ledger, price.delta, price.relation, price.budget, price.noise_seed)
        own = self.view.delta_share * price.delta / MOVES[price.relation]
        z = noise_multiplier_for(price.epsilon, price.delta, lambda z: [Releases(z, delta=own)], price.relation)
        rounds = None if self.generator is None else self.generator.releases(price.delta, price.relation)
        ask = Ask(queries, z, f"inspection {name} ({self.rule})", price.group, own, rounds)
        queries.refuse_beyond_budget(ask.planned, price.group)
        return ask

    def run(self, ask: Ask, say: Callable[[str], None] = lambda sentence: None) -> Findings:
        """Read the data, ask, and say what the answers tell; ``say`` takes a sentence on what is being done. UserError:
        the data, the primary model and the selection do not go together."""
        self.data.prepare_data()
        data = self.data.data
        public = ConcatDataset(list(data.val.values())) if isinstance(data.val, Mapping) else data.val
        users = Users(data.train, public, self.rule, self._primary(public, say))
        check_units("price", self.price.delta, len(data.train), "user")
        if self.generator is not None:
            self.generator.check_users(users.private)
        say(f"Asking {len(data.train)} users: {self.rule}.")
        if self.generator is None:
            return self.view.look(users, ask)
        return add_generators(self.generator, users, ask, lambda: self.view.look(users, ask), say)

    def _primary(self, public: Dataset | None, say: Callable[[str], None]) -> Primary | None:
        if self.primary is None:
            return None
        if self.checkpoint is not None:
            return Primary(loaded(self.primary, self.checkpoint))
        if public is None:
            raise UserError(
                "there are no public data to train the primary model on: give checkpoint, or a data module that has "
                "validation data"
            )
        say("Training the primary model on the public data.")
        return Primary(trained(self.primary, Records.of([public]), self.epochs, self.batch_size, self.seed))


def paid(ask: Ask) -> tuple[Spent, Spent]:
    """What the inspection has cost, and what the ledger has of its users in all."""
    return ask.price, ask.queries.ledger.read().spent(ask.group)


def page(inspection: Inspection, findings: Findings, ask: Ask, command: str) -> str:
    """The page's HTML; ``command`` repeats the inspection, at the same price."""
    environment = Environment(
        loader=PackageLoader("lit_epgan.inspection", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    cost, total = paid(ask)
    budget = ask.queries.ledger.read().budget
    html = environment.get_template("inspection.html").render(
        inspection=inspection,
        findings=findings,
        verdict=verdict(findings.checks),
        drawn=[drawn(check) for check in findings.checks],
        pictures=[panel.picture and uri(panel.picture) for panel in findings.panels],
        samples=[panel.samples and uri(panel.samples) for panel in findings.panels],
        cost=cost,
        total=total,
        relation=RELATIONS[cost.relation],
        left=None if budget.epsilon is None else max(0.0, budget.epsilon - total.epsilon),
        accounts=list(ask.queries.ledger.read().accounts.values()),
        ledger=ask.queries.ledger.path,
        seeded=ask.queries.noise_seed is not None,
        command=command,
        facts=[
            ("epsilon", f"{cost.epsilon:.3g}"),
            ("delta", f"{cost.delta:g}"),
            ("unit", "a user"),
            ("noise multiplier", f"{ask.noise_multiplier:.3g}"),
            ("selection", str(inspection.rule)),
            ("written", datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")),
            ("with", f"Python {platform.python_version()}, PyTorch {torch.__version__}"),
        ],
    )
    return html.encode(errors="backslashreplace").decode()  # a path may hold bytes that are not UTF-8


def verdict(checks: Sequence[Check]) -> str:
    """The detectors' answer in a few words."""
    alarms = sum(check.alarm for check in checks)
    if not checks:
        return "Nothing could be compared"
    if not alarms:
        return f"No alarm from {len(checks)} detectors"
    return f"{alarms} of {len(checks)} detectors raise an alarm"


def drawn(check: Check) -> dict[str, float]:
    """Where an interval, its estimate and the band of tolerance stand, from 0 to ``WIDTH``."""

    def place(value: float) -> float:
        return round(WIDTH / 2 * (1 + max(-1.0, min(1.0, value / check.scale))), 2)

    ends = {"low": check.low, "high": check.high, "estimate": check.estimate}
    return {name: place(value) for name, value in ends.items()} | {
        "band_low": place(-check.tolerance),
        "band_high": place(check.tolerance),
    }


def uri(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()
