"""Gradients of linear layers without copies of their weights: the same ones, and given up where they would not be."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_epgan.privacy.linear_layers import LinearLayers
from lit_epgan.privacy.noisy_steps import ClippedGradients
from lit_epgan.privacy.record_gradients import OuterProducts, Written
from lit_epgan.privacy.record_losses import row_by_row

RECORDS = 6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)).double()


def batch() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(RECORDS, 5, generator=generator, dtype=torch.float64)
    return [x, torch.randint(3, (RECORDS,), generator=generator)]


def entropy(net: nn.Sequential, b) -> Tensor:
    return F.cross_entropy(net(b[0]), b[1])


def without_copies(gradients: ClippedGradients) -> bool:
    """Whether the last sum was taken without copies of linear layers."""
    return bool(gradients._taken.linear.parameters)


def of_each(gradients: ClippedGradients, b) -> Tensor:
    """The gradients (records, d) of every record, as they are."""
    found, weights = gradients._of_each(b), torch.eye(len(b[0] if isinstance(b, list | tuple) else b)).double()
    return torch.stack([gradients._weighted_sum(found, each, clean=True) for each in weights])


def by_loop(net: nn.Module, loss, b) -> Tensor:
    """The gradients (records, d) by plain autograd."""
    rows = []
    for k in range(RECORDS):
        parts = torch.autograd.grad(
            loss([part[k : k + 1] for part in b]), list(net.parameters()), materialize_grads=True, allow_unused=True
        )
        rows.append(torch.cat([part.flatten() for part in parts]))
    return torch.stack(rows)


def in_place(net: nn.Sequential, b) -> Tensor:
    return F.cross_entropy(net[2](net[0](b[0]).mul_(2.0)), b[1])


def slope_beside(net: nn.Sequential, b) -> Tensor:
    logits = net(b[0])
    return F.cross_entropy(logits, b[1]) + torch.func.grad(lambda z: z.exp().sum())(logits).square().sum()


def read_in_secret(net: nn.Sequential, b) -> Tensor:
    loss = entropy(net, b)
    try:
        return loss + net[2].weight.abs().sum()
    except Exception:
        return loss


def called_in_secret(net: nn.Sequential, b) -> Tensor:
    loss = entropy(net, b)
    try:
        return loss + net[2](torch.ones(1, 7, dtype=torch.float64)).sum()
    except Exception:
        return loss


def watched(net: nn.Sequential, b) -> Tensor:
    with torch.no_grad():
        target = net(b[0])
    return (net(b[0]) - target - 1).square().sum()


def without_gradient(net: nn.Sequential, b) -> Tensor:
    with torch.no_grad():
        features = net[0](b[0])
    return F.cross_entropy(net[2](features), b[1])


def on_rows_in_turn(net: nn.Sequential, b) -> Tensor:
    both = torch.stack([b[0], 2 * b[0]])
    return torch.func.vmap(lambda row: net(row).square().sum())(both).sum()


def slope(net: nn.Sequential, b) -> Tensor:
    """A penalty of the slope at the row, as R1: from one call of the network."""
    outputs, pull = torch.func.vjp(net, b[0])
    return F.cross_entropy(outputs, b[1]) + pull(torch.ones_like(outputs))[0].square().sum()


def slope_forwards(net: nn.Sequential, b) -> Tensor:
    outputs, along = torch.func.jvp(net, (b[0],), (torch.ones_like(b[0]),))
    return F.cross_entropy(outputs, b[1]) + along.square().sum()


@pytest.mark.parametrize("loss", [entropy, in_place, slope_beside])
@pytest.mark.parametrize("at_once", [256, 4])
def test_gradients_without_copies_are_those_of_a_loop(loss, at_once):
    net, b = network(), batch()
    of_records = lambda records: loss(net, records)  # noqa: E731
    expected = by_loop(net, of_records, b)
    bound = float(expected.norm(dim=1).median())
    gradients = ClippedGradients(net, of_records, bound, at_once)
    clipped = expected * (bound / expected.norm(dim=1, keepdim=True)).clamp(max=1.0)
    torch.testing.assert_close(gradients.sum(b), clipped.sum(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_each(gradients, b), expected, rtol=1e-10, atol=1e-12)
    assert without_copies(gradients)


NOTICED = {
    "decayed": lambda net, b: entropy(net, b) + sum(p.square().sum() for p in net.parameters()),
    "read": lambda net, b: entropy(net, b) + net[2].weight.abs().sum(),
    "read in secret": read_in_secret,
    "called in secret": called_in_secret,
    "called twice": lambda net, b: entropy(net, b) + net(2 * b[0]).square().sum(),
    "watched": watched,
    "without gradient": without_gradient,
    "cut off": lambda net, b: F.cross_entropy(net[2](net[0](b[0]).detach()), b[1]),
    "on two rows": lambda net, b: net(torch.cat([b[0], 2 * b[0]])).square().sum(),
    "on no row": lambda net, b: net(b[0][0]).square().sum(),
    "on rows in turn": on_rows_in_turn,
    "slope": slope,
    "slope forwards": slope_forwards,
}


@pytest.mark.parametrize("loss", NOTICED.values(), ids=NOTICED)
def test_whatever_else_weights_do_is_noticed(loss):
    """Copies are taken then, and the gradients are right again."""
    net, b = network(), batch()
    before = dict(net[2]._parameters)
    gradients = ClippedGradients(net, lambda records: loss(net, records), 1.0)
    expected = by_loop(net, lambda records: loss(net, records), b)
    torch.testing.assert_close(of_each(gradients, b), expected, rtol=1e-10, atol=1e-12)
    assert not without_copies(gradients)
    assert net[2]._parameters == before
    assert "forward" not in vars(net[2])


def test_layers_that_are_not_by_themselves_have_copies():
    class Own(nn.Linear):
        pass

    tied, frozen = nn.Linear(4, 4), nn.Linear(4, 4)
    frozen.bias.requires_grad_(False)
    other = nn.Linear(4, 4)
    other.weight = tied.weight
    net = nn.Sequential(tied, other, frozen, Own(4, 4), nn.Linear(4, 4))
    assert LinearLayers.of(net).parameters == list(net[4].parameters())
    net = network()
    gradients = ClippedGradients(net, lambda b: entropy(net, b), 1.0)
    assert gradients.current
    net[0].bias.requires_grad_(False)
    assert not gradients.current
    net[0].bias.requires_grad_(True)
    net[2].weight = nn.Parameter(net[2].weight.detach().clone())
    assert not gradients.current


def test_under_autocast_they_are_the_same_up_to_its_rounding():
    net, (x, y) = network().float(), batch()
    seen: set[torch.dtype] = set()

    def loss(b) -> Tensor:
        logits = net(b[0])
        seen.add(logits.dtype)
        return F.cross_entropy(logits, b[1])

    gradients, general = (ClippedGradients(net, loss, 1.0) for _ in range(2))
    general._taken = general._general
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (each.sum([x.float(), y]) for each in (gradients, general))
    assert without_copies(gradients)
    assert seen == {torch.bfloat16}
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("copies", [False, True])
def test_under_autocast_no_record_passes_the_bound(copies):
    """The sum of clipped gradients is taken in their own precision."""
    net, (x, y) = network().float(), batch()
    gradients = ClippedGradients(net, lambda b: 100 * entropy(net, b), 1.0)
    if copies:
        gradients._taken = gradients._general
    with torch.autocast("cpu", torch.bfloat16):
        sums = [gradients.sum([x[k : k + 1].float(), y[k : k + 1]]) for k in range(RECORDS)]
    assert [float(each.double().norm()) for each in sums] == pytest.approx([1.0] * RECORDS, rel=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [9, 300])
def test_outer_products_are_what_is_written_out(bias, size):
    d, x = (torch.randn(RECORDS, n, generator=torch.Generator().manual_seed(n)) for n in (4, size))
    products, weights = OuterProducts(d, x, bias), torch.rand(RECORDS, dtype=torch.float64)
    outer = d[:, :, None] * x[:, None, :]
    written = [Written(outer), Written(d)] if bias else [Written(outer)]
    norms = torch.stack([each.square_norms for each in written]).sum(0)
    torch.testing.assert_close(products.square_norms, norms, rtol=1e-5, atol=0.0)
    sums = [each.weighted_sums(weights, clean=True)[0] for each in written]
    torch.testing.assert_close(products.weighted_sums(weights, clean=True), sums, rtol=1e-5, atol=1e-5)


def test_what_is_not_finite_has_no_part_and_small_weights_are_not_rounded():
    """On an accelerator it is not asked whether all is finite: a weight of 0 then takes such a record out."""
    d, x = torch.randn(RECORDS, 4), torch.randn(RECORDS, 9)
    weights = torch.rand(RECORDS, dtype=torch.float64)
    d[1, 2], x[3, 4], weights[1], weights[3] = float("nan"), float("inf"), 0.0, 0.0
    kept = torch.tensor([0, 2, 4, 5])
    for found, expected in (
        (OuterProducts(d, x, True), OuterProducts(d[kept], x[kept], True)),
        (Written(d), Written(d[kept])),
        (Written(x), Written(x[kept])),
    ):
        assert not found.square_norms.isfinite().all()
        sums = found.weighted_sums(weights, clean=False)
        torch.testing.assert_close(sums, expected.weighted_sums(weights[kept], clean=True))
    # a gradient of 1e38, clipped to 1e-3: the weight alone would lose three digits
    products = OuterProducts(torch.full((1, 1), 1e19), torch.full((1, 1), 1e19), bias=False)
    (found,) = products.weighted_sums(torch.tensor([1e-41], dtype=torch.float64), clean=True)
    torch.testing.assert_close(found, torch.full((1, 1), 1e-3), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("kind", ["written", "outer"])
def test_in_half_precision_one_record_moves_the_sum_by_no_more_than_the_bound(kind):
    """Two hundred alike gradients, each clipped to 1; their sums round to a half near 100."""
    d = torch.tensor([[0.71, 0.37, 0.53]], dtype=torch.bfloat16).repeat(200, 1)
    x = torch.tensor([[0.91, 1.13]], dtype=torch.bfloat16).repeat(200, 1)

    def total(n: int) -> torch.Tensor:
        found = Written(d[:n, :, None] * x[:n, None, :]) if kind == "written" else OuterProducts(d[:n], x[:n], False)
        return found.weighted_sums(found.square_norms.rsqrt(), clean=True)[0]

    assert float((total(200) - total(199)).norm()) <= 1 + 1e-4


def test_gradients_are_taken_as_they_lie_in_memory():
    lying = torch.randn(RECORDS, 2, 5, 3, 4).permute(0, 3, 1, 4, 2)
    weights = torch.rand(RECORDS, dtype=torch.float64)
    (found,) = Written(lying).weighted_sums(weights, clean=True)
    torch.testing.assert_close(found, (lying * weights.float().view(-1, 1, 1, 1, 1)).sum(0))
    torch.testing.assert_close(
        Written(lying).square_norms, lying.double().square().flatten(1).sum(1), rtol=1e-5, atol=0.0
    )
    (scalar,) = Written(lying[:, 0, 0, 0, 0]).weighted_sums(weights, clean=True)
    torch.testing.assert_close(scalar, (lying[:, 0, 0, 0, 0] * weights.float()).sum())


def loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return F.cross_entropy(x[None], y[None]), x[:, None] * x, torch.ones(3)


def test_it_is_vmap_of_one_row_each():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 4, generator=generator, requires_grad=True)
    y = torch.randint(4, (5,), generator=generator)
    found, expected = row_by_row(loss, x, y), torch.func.vmap(loss)(x, y)
    torch.testing.assert_close(found, list(expected))
    assert found[2].shape == (5, 3)
    for slope in (torch.autograd.grad(each[0].sum(), x)[0] for each in (found, expected)):
        torch.testing.assert_close(slope, (x.softmax(1) - F.one_hot(y, 4)).detach())
    (found,) = row_by_row(lambda x: (torch.rand(()) + 0 * x,), torch.zeros(50))
    assert len(set(found.tolist())) == 50
    x = torch.arange(3.0)
    (found,) = row_by_row(lambda row: (torch.func.grad(lambda z: z**3)(row),), x)
    torch.testing.assert_close(found, 3 * x**2)


@pytest.mark.parametrize("number", [float, bool])
def test_numbers_are_not_to_be_had_and_a_failure_leaves_nothing_behind(number):
    def failing(x: Tensor):
        return (x * number(x),)

    for _ in range(2):
        with pytest.raises(RuntimeError):
            row_by_row(failing, torch.ones(3))
    torch.testing.assert_close(row_by_row(lambda x: (2 * x,), torch.ones(3)), [torch.full((3,), 2.0)])
    assert torch.ones(3).sum().item() == 3
