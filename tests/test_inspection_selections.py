"""The paper's tasks as rules: who and what is selected, by a user's own records alone."""

import pytest
import torch
from torch.utils.data import TensorDataset

from lit_epgan.inspection import (
    AllExamples,
    Ask,
    Misclassified,
    Slice,
    UnknownLabels,
    Unlabelled,
    UnlikePublic,
    UsersByAccuracy,
    Where,
)
from lit_epgan.inspection.release import ImageFeatures
from lit_epgan.inspection.selections import accuracy
from lit_epgan.inspection.user_records import Records, blocks
from lit_epgan.lib.errors import UserError
from lit_epgan.privacy import Ledger, Queries
from tests.refusals import assert_refused

LABELS = torch.tensor([0, 1, 2, 3, 0, 0, -1, 2])
USER = torch.tensor([0, 0, 0, 0, 1, 1, 1, 3])  # user 2 has no record
PREDICTED = torch.tensor([0, 1, 2, 0, 1, 1, 1, 2])
RECORDS = Records((torch.zeros(8, 1, 2, 2), LABELS, torch.arange(8.0)), USER, 4, PREDICTED)


def selected(selection, records=RECORDS):
    return [column.nonzero().flatten().tolist() for column in selection.weights(records).unbind(1)]


def test_the_rules_by_hand_users_whole():
    assert selected(AllExamples()) == [list(range(8))]
    assert selected(Misclassified()) == [[3, 4, 5, 6], [0, 1, 2, 7]]
    assert selected(UnknownLabels(3)) == [[3]]
    assert selected(Slice([0, 3])) == [[0, 3, 4, 5], [1, 2, 6, 7]]
    assert selected(Slice([7], entry=2)) == [[7], list(range(7))]
    assert selected(Where(lambda records: records.entry(2) > 5, "late")) == [[6, 7], list(range(6))]
    assert selected(Unlabelled()) == [[6]]
    assert selected(Unlabelled(), Records((torch.zeros(2, 3),), torch.tensor([0, 1]), 2)) == [[0, 1]]
    assert accuracy(RECORDS)[[0, 1, 3]].tolist() == [0.75, 0.0, 1.0]
    assert selected(UsersByAccuracy(0.5, 0.75)) == [[4, 5, 6], [0, 1, 2, 3, 7]]
    assert selected(UsersByAccuracy(0.75, 0.8)) == [[0, 1, 2, 3, 4, 5, 6], [7]]


@pytest.mark.parametrize("selection", [Misclassified(), UsersByAccuracy(0.5, 0.75), Slice([0]), UnknownLabels(2)])
def test_no_rule_looks_at_more_than_one_user(selection):
    """Each user alone, as on a client, gets the weights that all users together get."""
    together = selection.weights(RECORDS)
    for user in (0, 1, 3):
        own = user == USER
        alone = Records(tuple(e[own] for e in RECORDS.entries), torch.zeros(int(own.sum())).long(), 1, PREDICTED[own])
        assert torch.equal(selection.weights(alone), together[own])


def test_what_public_data_do_not_have_weighs_most():
    dark = -0.9 + 0.8 * torch.rand(120, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    seen, alike = dark[:80], dark[80:]
    selection = UnlikePublic(frequencies=64)
    public = Records((seen,), torch.zeros(80).long(), 1)
    selection.settle(lambda: iter(()), public, None)
    private = Records((torch.cat([alike, -alike]),), torch.arange(80), 80)
    full = selection.weights(private)[:, 0] > 1 - 1e-5  # (c / c)^8 = 1, which rounds
    assert full[40:].all()
    assert (~full[:40]).float().mean() > 0.7
    assert (selection.weights(public) > 1 - 1e-5).float().mean() < 0.2
    assert_refused("needs public data", UnlikePublic().settle, lambda: iter(()), None, None)


@pytest.mark.parametrize(("quantile", "sharpness"), [(0.05, 1.0), (0.4, 8.0)])
def test_weights_are_powers_of_the_density_by_the_equation(quantile, sharpness):
    generator = torch.Generator().manual_seed(0)
    public, private = (torch.rand(n, 1, 8, 8, generator=generator) - 0.9 for n in (20, 30))
    private[15:] *= -1
    phi = ImageFeatures.of((1, 8, 8), 256)
    mean = phi(public[0::2]).mean(0)
    c, p = (phi(public[1::2]) @ mean).quantile(quantile), phi(private) @ mean
    expected = torch.where(p <= c, 1.0, (c / p) ** sharpness)
    selection = UnlikePublic(quantile, sharpness)
    selection.settle(lambda: iter(()), Records((public,), torch.zeros(20).long(), 1), None)
    found = selection.weights(Records((private,), torch.zeros(30).long(), 1))
    torch.testing.assert_close(found, expected[:, None])
    assert (expected < 1).any()
    assert (expected == 1).any()
    assert selection.at_least == 5
    with pytest.raises(UserError, match="needs public data"):
        selection.settle(lambda: iter(()), Records((public[:19],), torch.zeros(19).long(), 1), None)


def test_a_density_that_is_estimated_below_zero_is_none(monkeypatch):
    """Features are the pixels: half of the public data have (1, 0), and the others the density -1/2."""
    monkeypatch.setattr(ImageFeatures, "of", lambda shape, frequencies: lambda x: x.flatten(1))
    public = torch.tensor([[1.0, 0.0], [-0.5, 3.0]] * 10).view(20, 1, 1, 2)
    selection = UnlikePublic(sharpness=1.0)
    selection.settle(lambda: iter(()), Records((public,), torch.zeros(20).long(), 1), None)
    private = torch.tensor([[1.0, 0.0], [0.25, 1.0], [0.0, 1.0], [-1.0, 0.0]]).view(4, 1, 1, 2)
    weights = selection.weights(Records((private,), torch.zeros(4).long(), 1))[:, 0]
    torch.testing.assert_close(weights, torch.tensor([1e-6, 4e-6, 1.0, 1.0]))


def test_quantiles_cost_their_share(tmp_path):
    """Eleven users right on 0, 1, ..., 10 of 10 examples; next to no noise."""
    right = torch.arange(11).repeat_interleave(10) > torch.arange(10).repeat(11)
    user = torch.arange(11).repeat_interleave(10)
    labels = torch.zeros(110).long()
    records = Records((torch.zeros(110, 1), labels), user, 11, torch.where(right, 0, 1))
    selection = UsersByAccuracy(quantiles=[0.25, 0.75])
    ask = Ask(Queries(Ledger(tmp_path / "ledger.jsonl")), 1e-3, "a trial").part(selection.price, "quantiles")
    selection.settle(lambda: iter([records]), None, ask)
    assert (selection.below, selection.above) == (0.25, 0.85)  # upper edges of the bins of .2 and of .8
    (account,) = ask.queries.ledger.read().accounts.values()
    assert account.releases.noise_multiplier == pytest.approx(1e-3 / 0.2**0.5)
    assert account.what == "a trial, quantiles"


def test_prices_add_up_and_records_come_block_by_block(tmp_path):
    ask = Ask(Queries(Ledger(tmp_path / "ledger.jsonl")), 2.0, "a trial")
    for share in (0.2, 0.8):
        ask.part(share, f"{share}")([torch.ones(2)])
    assert ask.queries.ledger.read().total().epsilon == pytest.approx(ask.price.epsilon)
    sizes = enumerate((3, 0, 0, 0, 0, 2, 1))
    users = {f"user {k}": TensorDataset(torch.full((n, 2), float(n)), torch.arange(n)) for k, n in sizes}
    found = list(blocks(users, 2))  # the second block has nobody with a record
    assert [each.x[:, 0].tolist() for each in found] == [[3.0] * 3, [2.0] * 2, [1.0]]
    assert [each.user.tolist() for each in found] == [[0] * 3, [1] * 2, [0]]
    (together,) = blocks(users)
    assert together.users == 7
    assert together.user.tolist() == [0, 0, 0, 5, 5, 6]
    assert together.sums(together.x)[:, 0].tolist() == [9, 0, 0, 0, 0, 4, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UsersByAccuracy(0.9, 0.2), "the smaller one first"),
        (lambda: UsersByAccuracy(0.5), "takes below and above"),
        (lambda: UsersByAccuracy(0.2, 0.9, [0.1, 0.2]), "takes below and above"),
        (lambda: UsersByAccuracy(quantiles=[0.1, 0.2], share=1.0), "share is 1.0; it must lie in"),
        (lambda: Slice([]), "values of the slice"),
        (lambda: Slice([1], entry=4).weights(RECORDS), "asks for entry 4"),
        (lambda: Misclassified().weights(Records(RECORDS.entries, USER, 4)), "give one, as primary"),
        (lambda: UnlikePublic(sharpness=0), "above 0"),
        (lambda: UnlikePublic(quantile=1.0), "quantile is 1.0; it must lie in"),
        (lambda: UnlikePublic(quantile=0.0), "quantile is 0.0; it must lie in"),
        (lambda: Records.of([TensorDataset(torch.zeros(0, 1))]), "no record"),
        (lambda: Records.of([[{"x": 1.0}]]), "tensors, or tuples"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    assert_refused(message, make)
