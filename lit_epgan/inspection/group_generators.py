"""The groups' generators in an inspection: paid for with all that is asked, trained on what is selected, and shown."""

import math
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.federated_generator import FederatedGenerator
from lit_epgan.inspection.view import Findings, Users
from lit_epgan.randomness import derive_seed

LARGE = 20.0  # epsilons that protect nobody
HIDDEN = "the noise hides what users teach: expect nothing to be seen"


def add_generators(
    settings: FederatedGenerator,
    users: Users,
    ask: Ask,
    look: Callable[[], Findings],
    say: Callable[[str], None] = lambda sentence: None,
) -> Findings:
    """What ``look`` finds, and beside it what a generator makes for each group, but for those that it may skip.

    The generators' rounds are announced in the ledger before anything is asked, and paid for, all of them, before the
    first.

    Args:
        settings: how the generators are trained.
        users: whom.
        ask: what ``look`` asks with; its ``rounds`` are the generators'.
        look: asks what the view asks.
        say: takes a sentence on what is being done.

    Raises:
        UserError: the budget would be passed.
    """
    assert ask.rounds is not None
    with ask.queries.account(ask.rounds, f"{ask.what}, {settings.kind}s", ask.group) as release:
        findings = look()
        refused = {panel.title for panel in findings.panels if panel.refused and settings.skips_refused}
        names = [name for name in users.selection.groups if name not in refused]
        if not names:
            findings.released.append(
                f"No {settings.kind}: no group is large enough. Its rounds are not charged in the ledger."
            )
            return findings
        release(ask.rounds.count)  # all of them, whatever happens to this process
        trained = _trained(settings, users, ask, names, say)
    for place, panel in enumerate(findings.panels):
        if panel.title in trained:
            shown = settings.shown(panel, trained[panel.title])
            notes = [HIDDEN] if settings.lasting(_length(settings, ask, users)) > 1 else []
            findings.panels[place] = replace(shown, made=[*shown.made, *notes])
    findings.kept["generators"] = {name: settings.kept(module) for name, module in trained.items()}
    findings.released[-1:-1] = told(settings, ask, users)  # before the sentence that says: nothing else
    findings.reading += f" {settings.reading}"
    return findings


def told(settings: FederatedGenerator, ask: Ask, users: Users) -> list[str]:
    """What the generators' rounds have released, and under which guarantee, in sentences."""
    assert ask.rounds is not None
    t, queries, deviation = users.selection.together, ask.queries, _deviation(ask, users)
    asked = settings.users_per_round or len(users.private)
    price = queries.price(ask.rounds)
    kind, part, length = settings.kind, settings.reported, _length(settings, ask, users)
    lasting = settings.lasting(length)
    groups = "one group at most" if t == 1 else f"{t} groups at most"
    return [
        f"For each group the {part}s of {settings.rounds} rounds of {settings.method}: in a round {asked} of "
        f"{len(users.private)} users are asked, the same ones for all groups. A user trains a group's {part} on "
        "the selected examples of that group alone, and reports zeros outside of it.",
        f"Each report is clipped to {settings.bound:g}, and noise of standard deviation "
        f"{deviation * settings.bound:.3g} is added to every number of the sum, which is divided by {asked}. "
        f"{settings.server}",
        f"A user is in {groups}, so the groups share one price: the {kind}s by themselves cost "
        f"{price}; the sum by itself {queries.price(ask.releases)}."
        + (f" Such an epsilon protects nobody: these {kind}s are a simulation." if price.epsilon > LARGE else ""),
        f"In each round the noise is {length:.2g} times as long as the sum of all reports can be."
        + (f" All rounds add up, and their noise is {lasting:.2g} times as long." if settings.rounds > 1 else ""),
    ]


def _deviation(ask: Ask, users: Users) -> float:
    """Of the noise on each group's sum, in S: a user may be in several groups."""
    assert ask.rounds is not None
    return ask.rounds.noise_multiplier * math.sqrt(users.selection.together)


def _length(settings: FederatedGenerator, ask: Ask, users: Users) -> float:
    return settings.noise_length(_deviation(ask, users), len(users.private))


def _trained(
    settings: FederatedGenerator, users: Users, ask: Ask, names: list[str], say: Callable[[str], None]
) -> dict[str, Any]:
    known = ask.queries.noise_seed
    # cohorts are secret
    seed = secrets.randbits(63) if known is None else derive_seed(known, f"{settings.kind}s")
    held = settings.selected(users, seed)
    trained = {}
    for name in names:
        say(f"Training the {settings.kind} of the group “{name}”: {settings.rounds} rounds.")
        noise_seed = None if known is None else derive_seed(known, name)
        trained[name] = settings.train(held[name], _deviation(ask, users), seed, noise_seed)
    return trained
