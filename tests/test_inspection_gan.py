"""An inspection's GANs: what they are trained on, what one user can move, what they cost, and what is refused."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule, WritersDataModule
from lit_epgan.engine import FixedSize
from lit_epgan.federated import FedAvgGAN
from lit_epgan.inspection import Ask, FederatedGAN, Findings, Inspection, Panel, Price, Slice, Users, View
from lit_epgan.inspection.federated_generator import add_generators
from lit_epgan.inspection.group_models import selected_images, turn_loss
from lit_epgan.inspection.inspection import page
from lit_epgan.lib import tensor_file
from lit_epgan.modules import GAN, GaussianPrior
from lit_epgan.networks import MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, Releases, spent
from tests.federations import fit
from tests.ledgers import paths
from tests.refusals import assert_refused

SHAPE, SEED, NOTHING = (1, 2, 2), 3, 1e-12
PRICE = Price(noise_seed=5)
LABELS = [[0, 0, 1], [0, 0, 0, 0], [1, 1], [1, 0, 1, 1, 1], []]  # of five users' records


def gan(**options) -> GAN:
    torch.manual_seed(1)
    plain = {"objective": "wgan-gp", "optimizer": "sgd", "lr": 0.1, "lr_discriminator": 0.05}
    plain["average"] = None
    networks = MLPGenerator(SHAPE, 2, (4,)), MLPDiscriminator(SHAPE, (4,))
    return GAN(*networks, **(plain | options))


def settings(**options) -> FederatedGAN:
    usual = {"rounds": 3, "bound": 0.5, "noise_multiplier": 2.0, "batch_size": 2, "samples": 4}
    return FederatedGAN(options.pop("gan", None) or gan(), **(usual | options))


def people(labels: list[list[int]] = LABELS) -> dict[str, TensorDataset]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"user {k}": TensorDataset(torch.rand(len(own), *SHAPE, generator=generator) - 0.5, torch.tensor(own).long())
        for k, own in enumerate(labels)
    }


class Counted(View):
    def __init__(self, *refused: str) -> None:
        self.refused = refused

    def look(self, users: Users, ask: Ask) -> Findings:
        ask([torch.ones(1)] * len(users.private))
        names = users.selection.groups
        panels = [Panel(name, refused="few" if name in self.refused else "") for name in names]
        return Findings(panels, released=["a number", "Nothing else."], kept={"released": torch.zeros(1)})


def inspection(view: View | None = None, price: Price = PRICE, **options) -> Inspection:
    data = FederatedDataModule.from_datasets(list(people().values()), batch_size=2)
    return Inspection(data, view or Counted(), Slice([0]), generator=settings(**options), price=price)


def run(tmp_path, **options) -> tuple[Findings, Ask]:
    own = inspection(**options)
    ask = own.ask("look")
    return own.run(ask), ask


def generators(findings: Findings) -> dict[str, dict[str, Tensor]]:
    return findings.kept["generators"]


def test_the_selected_examples_by_hand():
    """A user needs two zeros for the first group, two others for the second; the fourth has one zero."""
    users = Users(people(), None, Slice([0], at_least=2))
    found = selected_images(users.records(), users.selection, 0)
    images = [own.tensors[0] for own in people().values()]
    expected = {
        "label 0": [images[0][:2], images[1], images[2][:0], images[3][:0], images[4]],
        "any other label": [images[0][:0], images[1][:0], images[2], images[3][[0, 2, 3, 4]], images[4]],
    }
    sizes = {name: [len(x) for x in own] for name, own in found.items()}
    assert sizes == {"label 0": [2, 4, 0, 0, 0], "any other label": [0, 0, 2, 4, 0]}
    for name, own in expected.items():
        assert all(map(torch.equal, found[name], own)), name

    class Half(Slice):
        def weights(self, records) -> Tensor:
            return 0.3 * super().weights(records)

    users = Users(people([[0] * 4000]), None, Half([0]))
    (images,) = selected_images(users.records(), users.selection, 0)["label 0"]
    assert len(images) / 4000 == pytest.approx(0.3, abs=0.03)
    rule = Slice([0])
    rule.together = 1
    users = Users(people(), None, rule)
    found = selected_images(users.records(), rule, 0)
    assert [len(x) for x in found["label 0"]] == [2, 4, 0, 1, 0]
    assert [len(x) for x in found["any other label"]] == [0, 0, 2, 0, 0]


def test_training_is_that_of_fit_on_the_selected_examples(tmp_path):
    """The same numbers as a Trainer's DP-FedAvg-GAN: clipping, noise, cohorts and the server's steps included."""
    images = [own.tensors[0] for own in people().values()][:4]
    data = FederatedDataModule.from_datasets(
        [TensorDataset(x) for x in images], batch_size=2, max_local_steps=2, clients_per_round=3, seed=SEED
    )
    theirs, mechanism = gan(), CentralNoise(0.05, 0.1, noise_seed=7)
    options = {"algorithm": FedAvgGAN(4, 2), "mechanism": mechanism, "optimizer_state": "reset"}
    fit(theirs, data, 3, tmp_path, precision="32-true", **options)
    own = settings(users_per_round=3, users=4, bound=0.05, local_steps=2, server_steps=4)
    ours = own.train(images, 0.1, SEED, 7)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6, msg=name)
    assert not torch.equal(ours.generator.layers[0].weight, gan().generator.layers[0].weight)


def test_a_groups_gan_knows_nothing_of_the_other_examples(tmp_path, monkeypatch):
    """Each group's GAN is bit by bit what it was, whatever the images of the other group; and not, whatever its own."""
    before, _ = run(tmp_path / "before")
    held = people

    def changed() -> dict[str, TensorDataset]:
        found = held()
        for own in found.values():
            x, y = own.tensors
            own.tensors = torch.where((y == 0)[:, None, None, None], x, 0.9 - x), y
        return found

    monkeypatch.setattr("tests.test_inspection_gan.people", changed)
    after, _ = run(tmp_path / "after")
    assert equal(generators(before)["label 0"], generators(after)["label 0"])
    assert not equal(generators(before)["any other label"], generators(after)["any other label"])


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_groups_start_alike_and_have_noise_of_their_own(tmp_path):
    """Two groups of the same examples: with noise that they shared, their difference would show what it hides."""

    class Twice(Slice):
        def weights(self, records) -> Tensor:
            return torch.ones(len(records.user), 2)

    own = inspection()
    twice = Inspection(own.data, own.view, Twice([0]), generator=own.generator, price=own.price)
    first, second = generators(twice.run(twice.ask("look"))).values()
    assert not equal(first, second)


def discriminators(images: dict[str, list[Tensor]]) -> Tensor:
    trained = [settings(rounds=1).train(own, NOTHING, SEED, 0) for own in images.values()]
    return torch.cat([p.detach().flatten() for each in trained for p in each.discriminator.parameters()])


@pytest.mark.parametrize("pixel", [0.5, 1e6, 1e30, math.inf, math.nan])
def test_a_user_moves_both_groups_together_by_the_stated_length(pixel):
    """By sqrt(2) S / users at most; one that is emptied reports zeros, and still counts in the divisor."""
    users = people()
    rule = Slice([0])
    nobody = TensorDataset(torch.zeros(0, *SHAPE), torch.zeros(0))
    emptied = selected_images(Users({**users, "user 3": nobody}, None, rule).records(), rule, 0)
    users["user 3"] = TensorDataset(torch.full((5, *SHAPE), pixel), users["user 3"].tensors[1])
    full = selected_images(Users(users, None, rule).records(), rule, 0)
    moved = float((discriminators(full) - discriminators(emptied)).norm())
    assert moved <= math.sqrt(2) * 0.5 / len(LABELS) * (1 + 1e-5)
    if pixel == 1e6:
        assert moved == pytest.approx(math.sqrt(2) * 0.5 / len(LABELS), rel=1e-4)


def test_users_outside_report_exact_zeros_and_count():
    """Five users are asked, one has something to tell: the mean is a fifth of its clipped change."""
    (x, _) = people()["user 1"].tensors
    images = [x, *[x[:0]] * 4]
    start, alone = settings(rounds=1).gan, settings(rounds=1).train([x], NOTHING, SEED, 0)
    five = settings(rounds=1).train(images, NOTHING, SEED, 0)
    for before, one, own in zip(*(g.discriminator.parameters() for g in (start, alone, five)), strict=True):
        torch.testing.assert_close(own - before, (one - before) / 5, rtol=1e-4, atol=1e-7)
    trained = gan()
    trained.turns = ("discriminator",)
    turn_loss(trained, [torch.zeros(0, *SHAPE)]).backward()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in trained.discriminator.parameters())
    # one optimizer holds both networks: without a gradient it must not step, also where it has momentum
    start = gan(optimizer="adam")
    trained = settings(gan=start, rounds=2).train([torch.zeros(0, *SHAPE)] * 2, NOTHING, SEED, 0)
    for before, after in zip(start.discriminator.parameters(), trained.discriminator.parameters(), strict=True):
        torch.testing.assert_close(before, after, rtol=0, atol=1e-9)


def seeds_of_cohorts(tmp_path, monkeypatch: pytest.MonkeyPatch, price: Price) -> list[int]:
    seeds: list[int] = []
    draw = FixedSize.draw

    def watched(self: FixedSize, clients: list[int], seed: int, round_: int) -> list[list[int]]:
        seeds.append(seed)
        assert len(clients) == 5
        return draw(self, clients, seed, round_)

    monkeypatch.setattr(FixedSize, "draw", watched)
    run(tmp_path, price=price, users_per_round=2, users=5)
    assert len(seeds) == 6  # of two groups, three rounds each
    return seeds


def test_all_groups_ask_the_same_secret_cohorts(tmp_path, monkeypatch):
    """So a round is one release of all groups; the seed is drawn anew for each run, unless a study names it."""
    first = set(seeds_of_cohorts(tmp_path / "first", monkeypatch, Price()))
    second = set(seeds_of_cohorts(tmp_path / "second", monkeypatch, Price()))
    assert len(first) == len(second) == 1
    assert first != second
    studies = [set(seeds_of_cohorts(tmp_path / name, monkeypatch, PRICE)) for name in ("third", "fourth")]
    assert studies[0] == studies[1]


def test_users_without_records_are_asked_too(tmp_path, monkeypatch):
    asked: list[int] = []

    def train(self: FederatedGAN, images: list[Tensor], *_) -> GAN:
        asked.append(len(images))
        return self.gan

    monkeypatch.setattr(FederatedGAN, "train", train)
    own = inspection()
    users = Users(people([[0]] * 256 + [[]] * 3), None, Slice([0]))
    ask = own.ask("look")
    assert own.generator is not None
    add_generators(own.generator, users, ask, lambda: Counted().look(users, ask))
    assert asked == [259, 259]


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
@pytest.mark.parametrize("cohort", [None, 2])
def test_the_price_is_the_accountants_and_the_ledgers(tmp_path, relation, cohort):
    price = Price(3.0, 1e-4, relation, noise_seed=1)
    found, ask = run(tmp_path, price=price, users_per_round=cohort, users=None if cohort is None else 5)
    rounds = Releases(2.0, 3) if cohort is None else Releases(2.0, 3, "fixed", 0.4, 5)
    assert ask.price == spent([Releases(ask.noise_multiplier), rounds], 1e-4, relation)
    assert spent([Releases(ask.noise_multiplier)], 1e-4, relation).epsilon == pytest.approx(3.0, rel=2e-3)
    book = ask.queries.ledger.read()
    assert [(a.what, a.made, a.ended, a.group) for a in book.accounts.values()] == [
        (f"{ask.what}, GANs", 3, True, "all users"),
        (ask.what, 1, True, "all users"),
    ]
    assert book.total().epsilon == ask.price.epsilon > 3.1
    told = " ".join(found.released)
    assert str(spent([rounds], 1e-4, relation)) in told
    assert f"{cohort or 5} of 5 users" in told


@pytest.mark.parametrize("relation", ["zero_out", "replace_one"])
def test_a_target_is_reached_by_the_smallest_noise(relation):
    own = settings(noise_multiplier=None, target_epsilon=1.5, users_per_round=2, users=50, rounds=20)
    rounds = own.releases(1e-5, relation)
    assert spent([rounds], 1e-5, relation).epsilon <= 1.5
    assert spent([rounds.with_noise(rounds.noise_multiplier / 1.01, 20)], 1e-5, relation).epsilon > 1.5
    assert (rounds.count, rounds.sampling, rounds.rate, rounds.population) == (20, "fixed", 0.04, 50)


@pytest.mark.parametrize(("refused", "made", "pictures"), [(["label 0"], 3, 1), (["label 0", "any other label"], 0, 0)])
def test_a_group_that_is_too_small_has_no_gan(tmp_path, refused, made, pictures):
    found, ask = run(tmp_path, view=Counted(*refused))
    account = next(iter(ask.queries.ledger.read().accounts.values()))
    assert (account.releases.count, account.ended) == (made, True)
    assert len([panel for panel in found.panels if panel.samples]) == pictures
    assert set(found.kept.get("generators", {})) == {"label 0", "any other label"} - set(refused)


def test_what_passes_the_budget_together_reads_no_data(folder, monkeypatch, capsys):

    def read(data) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr(WritersDataModule, "load", read)
    words = ["inspect", "--config", "inspect_digits_gan.yaml", "--price.budget", "2.5"]
    assert main(words) == 2
    told = capsys.readouterr().err
    for words in ("allows epsilon 2.5", "one release", "25 releases"):
        assert words in told
    assert not paths()


def test_the_rounds_are_announced_before_anything_is_asked(tmp_path):
    class Reads(Counted):
        def look(self, users: Users, ask: Ask) -> Findings:
            (account,) = ask.queries.ledger.read().accounts.values()
            assert (account.planned.count, account.made) == (3, 0)
            return super().look(users, ask)

    run(tmp_path, view=Reads())


def test_the_page_shows_the_samples_and_says_what_they_are(tmp_path):
    own = inspection()
    ask = own.ask("look")
    before = torch.get_rng_state()
    found = own.run(ask)
    assert torch.equal(torch.get_rng_state(), before)
    html = page(own, found, ask, "a command")
    assert html.count('alt="Samples of the GAN of the group') == html.count("data:image/png;base64,") == 2
    assert html.count("<li>samples of the group&#39;s GAN") == 2
    assert found.released[-1] == "Nothing else."
    assert "clipped to 0.5, and noise of standard deviation 1.41" in html
    assert "A user is in 2 groups at most, so the groups share one price" in html
    numbers = sum(p.numel() for p in gan().discriminator.parameters())
    length = 2.0 * math.sqrt(2) * math.sqrt(numbers) / 5
    assert f"the noise is {length:.2g} times as long" in html
    rounds = own.generator.rounds
    assert f"their noise is {length / math.sqrt(rounds):.2g} times" in html
    assert html.count("<li>the noise hides what users teach") == (2 if length > math.sqrt(rounds) else 0)


@pytest.mark.parametrize(("z", "much", "nobody"), [(100.0, True, False), (0.01, False, True)])
def test_much_noise_and_none_worth_the_name_are_called_so(tmp_path, z, much, nobody):
    found, _ = run(tmp_path, noise_multiplier=z)
    assert all(("the noise hides" in " ".join(panel.made)) == much for panel in found.panels)
    assert ("protects nobody" in " ".join(found.released)) == nobody


@pytest.mark.slow
def test_the_config_runs_and_shows_its_samples(folder, tmp_path, capsys):
    small = ["--data.clients", "60", "--data.images", "8", "--data.held_out_writers", "12", "--epochs", "2"]
    small += ["--view.frequencies", "16", "--view.points", "9", "--view.steps", "3", "--price.epsilon", "8"]
    small += ["--generator.rounds", "2", "--generator.users", "60", "--selection", "lit_epgan.inspection.AllExamples"]
    assert main(["inspect", "--config", "inspect_digits_gan.yaml", *small]) == 0
    assert "This inspection will have cost (" in capsys.readouterr().err
    html = (tmp_path / "runs" / "inspect_digits_gan" / "index.html").read_text()
    assert html.count('alt="Samples of the GAN of the group all examples: ') == 1
    released = tensor_file.load(tmp_path / "runs" / "inspect_digits_gan" / "released.pt")
    assert "layers.0.weight" in released["generators"]["all examples"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"bound": 0.0}, "bound is 0"),
        ({"target_epsilon": 1.0}, "give one of them"),
        ({"users_per_round": 3}, "generator.users None"),
        ({"users_per_round": 9, "users": 5}, "at most all"),
        ({"gan": gan(average=0.9)}, "gan.average must be null"),
        ({"gan": gan(lr_decay=0.1)}, "gan.lr_decay must be null"),
        ({"gan": gan(r1=1.0)}, "gan.r1 must be 0"),
        ({"gan": gan(noise=0.1)}, "gan.noise must be 0"),
        ({"gan": gan(optimizer="sghmc")}, "gan.optimizer must be sgd or adam"),
        ({"gan": gan(prior=GaussianPrior(1.0))}, "gan.prior must be null"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    assert_refused(words, settings, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"users": 6}, "generator.users is 6, and the data have 5"),
        (
            {"gan": GAN(MLPGenerator((1, 3, 3), 2, (4,)), MLPDiscriminator((1, 3, 3), (4,)), average=None)},
            r"\(1, 3, 3\)",
        ),
    ],
)
def test_other_users_than_was_said_are_refused_before_they_are_asked(tmp_path, options, words):
    own = inspection(**options)
    ask = own.ask("look")
    assert_refused(words, own.run, ask)
    assert not ask.queries.ledger.read().accounts
