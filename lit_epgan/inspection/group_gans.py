"""The groups' GANs in an inspection: paid for with all that is asked, trained on what is selected, shown beside it."""

import math
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor

from lit_epgan.inspection.ask import Ask
from lit_epgan.inspection.federated_gan import FederatedGAN
from lit_epgan.inspection.images import picture
from lit_epgan.inspection.records import Records
from lit_epgan.inspection.release import membership
from lit_epgan.inspection.selections import Selection
from lit_epgan.inspection.statistics import image_statistics
from lit_epgan.inspection.view import Findings, Users
from lit_epgan.modules import GAN
from lit_epgan.randomness import derive_seed, generator_for

LARGE = 20.0  # epsilons that protect nobody
HIDDEN = "the noise hides what users teach: expect nothing to be seen"


def add_gans(
    settings: FederatedGAN,
    users: Users,
    ask: Ask,
    look: Callable[[], Findings],
    say: Callable[[str], None] = lambda sentence: None,
) -> Findings:
    """What ``look`` finds, and beside it samples of a GAN for each group that it does not refuse.

    The GANs' rounds are announced in the ledger before anything is asked, and paid for, all of them, before the first.

    Args:
        settings: how the GANs are trained.
        users: whom.
        ask: what ``look`` asks with; its ``rounds`` are the GANs'.
        look: asks what the view asks.
        say: takes a sentence on what is being done.

    Raises:
        UserError: the budget would be passed.
    """
    assert ask.rounds is not None
    with ask.queries.account(ask.rounds, f"{ask.what}, GANs", ask.group) as release:
        findings = look()
        refused = {panel.title for panel in findings.panels if panel.refused}
        names = [name for name in users.selection.groups if name not in refused]
        if not names:
            findings.released.append("No GAN: no group is large enough. Its rounds are not charged in the ledger.")
            return findings
        release(ask.rounds.count)  # all of them, whatever happens to this process
        gans = _trained(settings, users, ask, names, say)
    deviation = _deviation(ask, users)
    hidden = settings.noise_length(deviation, len(users.private)) > 1
    _show(findings, gans, settings.samples, [HIDDEN] if hidden else [])
    findings.released[-1:-1] = told(settings, ask, users)  # before the sentence that says: nothing else
    findings.reading += " The lower pictures are samples of a generator that never saw an image of theirs."
    return findings


def selected(users: Iterable[Records], selection: Selection, seed: int) -> dict[str, list[Tensor]]:
    """Of each group, by name, the images (n, *shape) that each user trains on; n is 0 of a user outside.

    An example of weight w is taken with probability w. A user in more groups than ``Selection.together`` counts in the
    first ones only.

    Args:
        users: their records, block by block.
        selection: the groups.
        seed: of the draws, where weights are no whole numbers.
    """
    found: dict[str, list[Tensor]] = {name: [] for name in selection.groups}
    for number, records in enumerate(users):
        weights = selection.weights(records).double().clamp(0, 1)
        _, inside = membership(records, weights, selection.at_least)
        inside &= inside.cumsum(1) <= selection.together
        drawn = torch.rand(weights.shape, generator=generator_for(seed, "examples", number), dtype=torch.float64)
        taken = (drawn < weights) & inside[records.user]
        for own, column in zip(found.values(), taken.unbind(1), strict=True):
            own += records.x[column].split(records.sums(column).long().tolist())
    return found


def told(settings: FederatedGAN, ask: Ask, users: Users) -> list[str]:
    """What the GANs' rounds have released, and under which guarantee, in sentences."""
    assert ask.rounds is not None
    t, queries, deviation = users.selection.together, ask.queries, _deviation(ask, users)
    asked = settings.users_per_round or len(users.private)
    length = settings.noise_length(deviation, len(users.private))
    price = queries.price(ask.rounds)
    groups = "one group at most" if t == 1 else f"{t} groups at most"
    return [
        f"For each group the discriminators of {settings.rounds} rounds of DP-FedAvg-GAN: in a round {asked} of "
        f"{len(users.private)} users are asked, the same ones for all groups. A user trains a group's discriminator on "
        "the selected examples of that group alone, and reports zeros outside of it.",
        f"Each report is clipped to {settings.bound:g}, and noise of standard deviation "
        f"{deviation * settings.bound:.3g} is added to every number of the sum, which is divided by {asked}. The "
        "generators are trained on the server against these discriminators, and see no image.",
        f"A user is in {groups}, so the groups share one price: the GANs by themselves cost "
        f"{price}; the sum by itself {queries.price(ask.releases)}."
        + (" Such an epsilon protects nobody: these GANs are a simulation." if price.epsilon > LARGE else ""),
        f"In each round the noise is {length:.2g} times as long as the sum of all reports can be.",
    ]


def _deviation(ask: Ask, users: Users) -> float:
    """Of the noise on each group's sum, in S: a user may be in several groups."""
    assert ask.rounds is not None
    return ask.rounds.noise_multiplier * math.sqrt(users.selection.together)


def _trained(
    settings: FederatedGAN, users: Users, ask: Ask, names: list[str], say: Callable[[str], None]
) -> dict[str, GAN]:
    known = ask.queries.noise_seed
    seed = secrets.randbits(63) if known is None else derive_seed(known, "GANs")  # cohorts are secret
    images = selected(users.records(), users.selection, seed)
    gans = {}
    for name in names:
        say(f"Training the GAN of the group “{name}”: {settings.rounds} rounds.")
        own = images[name] + [next(iter(images[name]))[:0]] * (len(users.private) - len(images[name]))
        gans[name] = settings.train(
            own, _deviation(ask, users), seed, None if known is None else derive_seed(known, name)
        )
    return gans


def _show(findings: Findings, gans: dict[str, GAN], samples: int, notes: list[str]) -> None:
    for place, panel in enumerate(findings.panels):
        if panel.title in gans:
            made = gans[panel.title].sample(samples, generator_for("samples"))
            lines = ["samples of the group's GAN"]
            lines += [f"{each.title} {float(each.of(made).mean()):+.2f}" for each in image_statistics(0.0)]
            findings.panels[place] = replace(panel, samples=picture(made), made=lines + notes)
    findings.kept["generators"] = {name: gan.generator.state_dict() for name, gan in gans.items()}
