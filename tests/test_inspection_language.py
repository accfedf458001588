"""An inspection's language models: what they are trained on, what one user can move, what they cost, and the page."""

import math
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lit_epgan.cli.main import main
from lit_epgan.datamodules import FederatedDataModule
from lit_epgan.datamodules.text import Text
from lit_epgan.federated import FedAvgM
from lit_epgan.inspection import (
    Ask,
    FederatedGAN,
    FederatedLanguageModel,
    Findings,
    Inspection,
    OutsideVocabulary,
    Panel,
    Price,
    Selection,
    Users,
    View,
)
from lit_epgan.inspection.group_models import selected_words
from lit_epgan.inspection.inspection import page
from lit_epgan.lib import tensor_file
from lit_epgan.lib.errors import UserError
from lit_epgan.lib.symbols import ByteSymbols
from lit_epgan.modules import GAN, LanguageModel
from lit_epgan.networks import CIFGLanguageNetwork, MLPDiscriminator, MLPGenerator
from lit_epgan.privacy import CentralNoise, Releases, spent
from tests.federations import fit
from tests.ledgers import the_ledger
from tests.refusals import assert_refused
from tests.test_inspection_words_view import VOCABULARY, text

START, LATER = "at the start of a sentence", "later in a sentence"
SEED, NOTHING = 3, 1e-12
PRICE = Price(noise_seed=5)


def people() -> dict[str, Text]:
    own = [text("a b.x.is", "c d.the.x"), text("a b.the"), text("the.zebra", "is.x.y"), text("q.r", "q.s"), text()]
    return {f"user {k}": each for k, each in enumerate(own)}


def model(symbols: int = 258, **options) -> LanguageModel:
    torch.manual_seed(1)
    network = CIFGLanguageNetwork(symbols, 4, 12)
    return LanguageModel(network, partial(options.pop("optimizer", torch.optim.SGD), **({"lr": 0.5} | options)))


def settings(**options) -> FederatedLanguageModel:
    usual = {"rounds": 3, "bound": 0.5, "noise_multiplier": 2.0, "batch_size": 2, "samples": 50}
    return FederatedLanguageModel(options.pop("model", None) or model(), **(usual | options))


class Counted(View):
    def look(self, users: Users, ask: Ask) -> Findings:
        ask([torch.ones(1)] * len(users.private))
        panels = [Panel(name, refused="no word is shown") for name in users.selection.groups]
        return Findings(panels, released=["a number", "Nothing else."], kept={"released": torch.zeros(1)})


def inspection(rule=None, price=PRICE, users=people, **options):
    data = FederatedDataModule.from_datasets(list(users().values()), batch_size=2)
    options["users"] = options.pop("said", None)
    return Inspection(data, Counted(), rule or OutsideVocabulary(), generator=settings(**options), price=price)


def run(tmp_path, **options) -> tuple[Findings, Ask]:
    own = inspection(**options)
    ask = own.ask("look")
    return own.run(ask), ask


def held(users: dict[str, Text], rule: Selection | None = None):
    return settings().selected(Users(users, None, rule or OutsideVocabulary()), 0)


def vector(trained: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])


def test_the_selected_words_by_hand():
    """Each as often as it occurs; a user needs two words of a group where the rule says so."""
    rule = OutsideVocabulary()
    assert selected_words(people().values(), rule, 0) == {
        START: [["a b", "c d"], ["a b"], [], ["q", "q"], []],
        LATER: [["x", "x"], [], ["zebra", "x", "y"], ["r", "s"], []],
    }
    twice = OutsideVocabulary(at_least=2)
    assert selected_words(people().values(), twice, 0)[START] == [["a b", "c d"], [], [], ["q", "q"], []]
    rule.together = 1
    assert selected_words(people().values(), rule, 0)[LATER] == [[], [], ["zebra", "x", "y"], [], []]

    class Half(OutsideVocabulary):
        def weights(self, records) -> Tensor:
            return 0.3 * super().weights(records)

    ((words,), _) = selected_words([text(*["x"] * 4000)], Half(), 0).values()
    assert len(words) / 4000 == pytest.approx(0.3, abs=0.03)


def test_words_are_bytes_and_users_outside_report_zeros():
    own = settings(longest=4).selected(Users({"one": text("aé", "return")}, None, OutsideVocabulary()), 0)[START][0]
    symbols, mask = settings().batch(own, torch.tensor([0, 1]))
    assert symbols[0].tolist() == [256, *"aé".encode(), 257]
    assert symbols[1].tolist() == [256, *b"retu"]  # it was cut, so its end is not there
    assert mask.sum(1).tolist() == [5, 5]
    # five users are asked, one has something to tell: the mean is a fifth of its clipped change
    own = held(people())[START]
    start, alone = vector(model()), vector(settings(rounds=1).train(own[:1], NOTHING, SEED, 0))
    five = vector(settings(rounds=1).train([own[0], *[own[2]] * 4], NOTHING, SEED, 0))
    torch.testing.assert_close(five - start, (alone - start) / 5, rtol=1e-4, atol=1e-7)
    adam = settings(rounds=2, model=model(optimizer=torch.optim.Adam))
    torch.testing.assert_close(vector(adam.train([own[2]] * 3, NOTHING, SEED, 0)), start, rtol=0, atol=1e-9)


def test_training_is_that_of_fit_on_the_selected_words(tmp_path):
    """The same numbers as a Trainer's FedAvgM: clipping, noise, momentum and cohorts included."""
    own = [each for each in held(people())[START] if len(each)]
    data = FederatedDataModule.from_datasets(own, batch_size=2, max_local_steps=2, clients_per_round=2, seed=SEED)
    theirs, mechanism = model(), CentralNoise(0.05, 0.1, noise_seed=7)
    options = {"algorithm": FedAvgM(momentum=0.5), "mechanism": mechanism, "optimizer_state": "reset"}
    fit(theirs, data, 3, tmp_path, precision="32-true", **options)
    ours = settings(users_per_round=2, users=3, bound=0.05, local_steps=2, momentum=0.5).train(own, 0.1, SEED, 7)
    torch.testing.assert_close(vector(ours), vector(theirs), rtol=1e-5, atol=1e-6)
    assert float((vector(ours) - vector(model())).norm()) > 0.05


def test_a_groups_model_knows_nothing_of_the_other_words(tmp_path):
    """Each group's is bit by bit what it was, whatever the words of the other group; and not, whatever its own."""

    def changed() -> dict[str, Text]:
        return {
            name: Text([[*own[:1], *(f"{w}!" for w in own[1:])] for own in each.sentences], VOCABULARY, [], 0, 1, 1)
            for name, each in people().items()
        }

    before, after = (run(tmp_path / name, users=users)[0].kept["generators"]
                     for name, users in (("before", people), ("after", changed)))  # fmt: skip
    same = {name: all(torch.equal(before[name][key], after[name][key]) for key in before[name]) for name in before}
    assert same == {START: True, LATER: False}


def test_it_learns_whether_words_are_joined():
    """Three users, all of whose words hold a space, or none: what is made tells which."""
    shares = []
    for word in ("a b", "ab"):
        own = settings(rounds=25, bound=5.0, batch_size=4, momentum=0.7, model=model(lr=4.0))
        words = {f"user {k}": text(*[word] * 16) for k in range(3)}
        trained = own.train(own.selected(Users(words, None, OutsideVocabulary()), 0)[START], NOTHING, SEED, 0)
        made = own.shown(Panel("all"), trained).made[1]
        shares.append(int(re.search(r": (\d+) %", made)[1]))
    assert shares[0] > 60
    assert shares[1] < 10


@pytest.mark.parametrize("lr", [10.0, 1e6, 1e30])
def test_a_user_moves_both_groups_together_by_the_stated_length(lr):
    """By sqrt(2) S / users at most; one that is emptied reports zeros, and still counts in the divisor."""

    def trained(users: dict[str, Text]) -> Tensor:
        own = settings(rounds=1, bound=0.1, model=model(lr=lr))
        return torch.cat([vector(own.train(each, NOTHING, SEED, 0)) for each in held(users).values()])

    moved = float((trained(people()) - trained(people() | {"user 0": text()})).norm())
    stated = math.sqrt(2) * 0.1 / len(people())
    assert moved == pytest.approx(stated, rel=1e-4) or (lr == 1e30 and moved <= stated)  # where it is not finite


def test_the_noise_on_a_groups_sum_is_the_stated_one(tmp_path, monkeypatch):
    """z S sqrt(2), where a user may be in both groups; and each group has noise of its own."""
    seen: list[dict[str, float]] = []
    begin = CentralNoise.begin

    def watched(self: CentralNoise, plan) -> None:
        begin(self, plan)
        seen.append(self.deviations(["parameters"]))

    monkeypatch.setattr(CentralNoise, "begin", watched)
    found, _ = run(tmp_path, users=lambda: {f"user {k}": text() for k in range(4)} | {"one": text("q")}, rounds=1)
    assert seen == [{"parameters": pytest.approx(2.0 * 0.5 * math.sqrt(2))}] * 2
    start = vector(model())
    for state in found.kept["generators"].values():
        moved = torch.cat([value.flatten() for value in state.values()]) - start
        assert float(moved.std()) == pytest.approx(2.0 * 0.5 * math.sqrt(2) / 5, rel=0.05)
    first, second = (state["network.output.bias"] for state in found.kept["generators"].values())
    assert not torch.allclose(first, second)


@pytest.mark.parametrize(("first", "relation"), [(0, "zero_out"), (1, "replace_one")])
def test_the_price_is_the_accountants_and_that_of_one_group(tmp_path, relation, first):
    price = Price(3.0, 1e-4, relation, noise_seed=1)
    found, ask = run(tmp_path, rule=OutsideVocabulary(first), price=price, users_per_round=2, said=5)
    rounds = Releases(2.0, 3, "fixed", 0.4, 5)
    assert ask.price == spent([Releases(ask.noise_multiplier), rounds], 1e-4, relation)
    book = ask.queries.ledger.read()
    accounts = [(a.what, a.made, a.ended) for a in book.accounts.values()]
    assert accounts == [(f"{ask.what}, language models", 3, True), (ask.what, 1, True)]
    assert book.total().epsilon == ask.price.epsilon > 3.1
    told = " ".join(found.released)
    assert str(spent([rounds], 1e-4, relation)) in told
    assert "2 of 5 users" in told
    assert ("A user is in one group at most" in told) == (first == 0)


def test_all_rounds_are_charged_before_the_first(tmp_path, monkeypatch):
    made: list[int] = []

    def train(self: FederatedLanguageModel, *_) -> LanguageModel:
        made.append(next(iter(the_ledger().read().accounts.values())).made)
        return self.model

    monkeypatch.setattr(FederatedLanguageModel, "train", train)
    found, _ = run(tmp_path)
    assert made == [3, 3]  # also of groups none of whose words is shown
    assert set(found.kept["generators"]) == {START, LATER}


def making(*words: str):
    return lambda self, count, longest, generator: [ByteSymbols().encode(words[k % len(words)]) for k in range(count)]


def test_the_page_shows_what_is_made_once_and_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModel, "sample", making("<b>x y", "z", "z", "\x1b\u202e", "k"))
    own = inspection(listed=3, samples=40)
    ask = own.ask("look")
    before = torch.get_rng_state()
    found = own.run(ask)
    assert torch.equal(torch.get_rng_state(), before)
    assert [panel.made_words for panel in found.panels] == [["<b>x␣y", "z", "\\x1b\\u202e"]] * 2  # "k" is the fourth
    html = page(own, found, ask, "a command")
    assert html.count("<code>&lt;b&gt;x␣y</code>") == 2
    assert "<b>x" not in html
    assert html.count("8 of 40 words made hold a space: 20 % (95 %: 9 to 36 %)") == 2  # of Clopper and Pearson's table
    assert "A user is in 2 groups at most, so the groups share one price" in html
    assert found.released[-1] == "Nothing else."


def test_noise_counts_over_all_rounds(tmp_path):
    """Sixteen rounds: the noise is four times as long, what they teach sixteen times."""
    own = settings(rounds=16)
    numbers = sum(parameter.numel() for parameter in own.model.parameters())
    assert own.noise_length(3.0, 50) == pytest.approx(3 * math.sqrt(numbers) / 50)
    assert own.lasting(6.0) == 1.5
    found, _ = run(tmp_path, rounds=4)
    length = own.noise_length(2.0 * math.sqrt(2), 5)
    assert f"the noise is {length:.2g} times" in found.released[-2]
    assert f"their noise is {length / 2:.2g} times" in found.released[-2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rounds": 0}, "at least 1"),
        ({"longest": 0}, "must be at least 1"),
        ({"listed": 0}, "must be at least 1"),
        ({"batch_size": 0}, "generator.batch_size"),
        ({"bound": 0.0}, "bound is 0"),
        ({"momentum": 1.0}, "momentum is 1"),
        ({"target_epsilon": 1.0}, "give one of them"),
        ({"users_per_round": 3}, "generator.users None"),
        ({"model": model(symbols=11)}, "has 11 symbols, and bytes have 258"),
        ({"model": model(weight_decay=0.1)}, "moves parameters whose gradient is zero"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    assert_refused(words, settings, **options)


def images() -> dict[str, TensorDataset]:
    return {f"user {k}": TensorDataset(torch.zeros(2, 1, 8, 8), torch.zeros(2)) for k in range(5)}


def test_users_without_text_are_refused_before_they_are_asked(tmp_path):
    own = inspection(users=images)
    ask = own.ask("look")
    assert_refused("are a TensorDataset: give a", own.run, ask)
    assert not ask.queries.ledger.read().accounts
    gan = GAN(MLPGenerator((1, 2, 2), 2, (4,)), MLPDiscriminator((1, 2, 2), (4,)), average=None)
    own = Text([["the", "q"]], VOCABULARY, [[0, 2]], 0, 1, 5)
    with pytest.raises(UserError, match=r"generator.gan makes images \(1, 2, 2\), and the users' are \(4,\)"):
        FederatedGAN(gan, 1, 1.0, 1.0).check_users({"one": own})


CONFIG = [
    "inspect",
    "--config",
    "inspect_words_model.yaml",
    "--data.class_path",
    "tests.test_inspection_words_view.Few",
]
CONFIG += ["--data.vocabulary", "3", "--data.held_out_users", "4", "--data.joined", "1", "--price.noise_seed", "1"]


def test_the_config_runs_and_shows_what_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*CONFIG, "--price.epsilon", "8", "--generator.rounds", "1"]) == 0
    folder = tmp_path / "runs" / "inspect_words_model"
    html = (folder / "index.html").read_text()
    assert html.count('<p class="made">') == html.count("of 1000 words made hold a space") == 2
    assert "return␣the" in html
    states = tensor_file.load(folder / "released.pt")["generators"]
    assert states[START]["network.output.bias"].shape == (258,)
