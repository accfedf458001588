"""The primary model: any LightningModule with ``predict_step``, trained here or from a checkpoint that runs no code."""

import pytest
import torch
from lightning.pytorch import LightningModule

from lit_epgan.errors import UserError
from lit_epgan.inspection.user_records import CHUNK, Primary, Records, labels, loaded, trained


class Linear(LightningModule):
    """Two classes by the sign of x; drops out in training, as evaluation must not."""

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(1, 2), torch.nn.Dropout(0.9)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[0].flatten().tolist())
        return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        assert not torch.is_grad_enabled()
        return self.dropout(self.layer(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def records(n):
    x = torch.linspace(-1, 1, n)[:, None]
    return Records((x, (x[:, 0] > 0).long()), torch.zeros(n).long(), 1)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"class": torch.tensor([1, 0])}, [1, 0]),
        (torch.tensor([1, 0], dtype=torch.int8), [1, 0]),
        (torch.tensor([[0.1, 0.2, 0.9], [3.0, 1.0, 2.0]]), [2, 0]),
    ],
)
def test_labels_are_found_in_what_a_model_predicts(answer, expected):
    found = labels(answer, 2)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.parametrize(
    "answer", [None, torch.zeros(2), torch.zeros(3).long(), torch.zeros(2, 2, 2), {"score": torch.zeros(2).long()}]
)
def test_what_is_no_label_is_refused(answer):
    with pytest.raises(UserError, match="predict_step gives no labels"):
        labels(answer, 2)


def test_a_model_is_asked_in_chunks_and_as_in_evaluation():
    module = Linear()
    with torch.no_grad():
        module.layer.weight.copy_(torch.tensor([[-1.0], [1.0]]))
        module.layer.bias.zero_()
    own = records(CHUNK + 10)
    predicted = Primary(module)(own)
    assert torch.equal(predicted, own.y)


def test_training_repeats_and_leaves_the_random_streams_alone():
    torch.manual_seed(5)
    before, start = torch.get_rng_state(), Linear().state_dict()
    torch.set_rng_state(before)
    runs = []
    for seed in (0, 0, 1):
        module = Linear()
        module.load_state_dict(start)
        state = torch.get_rng_state()
        runs.append(trained(module, records(12), 2, 4, seed))
        assert torch.equal(torch.get_rng_state(), state)
    first, again, other = runs
    assert first.batches == again.batches != other.batches
    assert [len(batch) for batch in first.batches] == [4] * 6
    assert sorted(x for batch in first.batches[:3] for x in batch) == pytest.approx(records(12).x.flatten().tolist())
    assert first.batches[:3] != first.batches[3:]
    assert torch.equal(Primary(first)(records(12)), records(12).y)


def test_a_checkpoint_is_loaded_as_data(tmp_path):
    torch.save({"state_dict": (own := Linear()).state_dict()}, tmp_path / "own.ckpt")
    module = loaded(Linear(), tmp_path / "own.ckpt")
    assert torch.equal(module.layer.weight, own.layer.weight)
    for name, content in (("list", [1]), ("none", {"weights": 1})):
        torch.save(content, tmp_path / name)
        with pytest.raises(UserError, match="holds no state_dict"):
            loaded(Linear(), tmp_path / name)
    torch.save({"state_dict": torch.nn.Linear(2, 2).state_dict()}, tmp_path / "other.ckpt")
    with pytest.raises(UserError, match="of another model"):
        loaded(Linear(), tmp_path / "other.ckpt")
