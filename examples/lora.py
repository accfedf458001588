"""LoRA adapters of a Hugging Face model over three clinics; nothing but adapters travels.  python examples/lora.py"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import TensorDataset
from torchmetrics.classification import BinaryAccuracy
from transformers import BertConfig, BertForSequenceClassification

from lit_epgan.callbacks import FederationCallback
from lit_epgan.datamodules import FederatedDataModule

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
WORDS = ["[CLS]", "no", "fracture", "left", "right", "wrist", "hip", "seen", "after", "fall", "today"]
CLINICS = {"city": ("wrist", 200), "coast": ("hip", 200), "islands": ("wrist", 12)}


def reports(part: str, n: int) -> TensorDataset:
    """Sentences, int64 (n, 11), each with the word `fracture`; and whether there is one: `no` before it says no."""
    words = torch.randint(3, len(WORDS), (n, 11))
    words[:, 0], words[:, 10] = WORDS.index("[CLS]"), WORDS.index(part)
    rows, place, broken = torch.arange(n), torch.randint(2, 9, (n,)), torch.rand(n) < 0.5
    words[rows, place] = WORDS.index("fracture")
    words[rows[~broken], place[~broken] - 1] = WORDS.index("no")
    return TensorDataset(words, broken.long())


class Reader(LightningModule):
    """A BERT that stays as it is; adapters of rank 8 and the head are trained."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
        base = BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), num_labels=2, **sizes))
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
        self.model, self.accuracy = get_peft_model(base, lora), BinaryAccuracy()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[1]).loss

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.accuracy(self.model(input_ids=batch[0]).logits.argmax(1), batch[1])
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


for title, names in {"islands alone": ["islands"], "together": list(CLINICS)}.items():
    seed_everything(0, verbose=False)
    train, test = {name: reports(*CLINICS[name]) for name in names}, {"islands": reports("wrist", 500)}
    data = FederatedDataModule.from_datasets(train, batch_size=20, local_epochs=1, test_dataset=test)
    trainer = Trainer(max_epochs=15, callbacks=[FederationCallback()], accelerator="cpu", **QUIET)
    trainer.fit(module := Reader(), datamodule=data)
    sent, whole = trainer.callback_metrics["client/bytes_up"], sum(p.numel() * 4 for p in module.parameters())
    print(f"{title}: a clinic sends {sent / 1e3:.1f} kB a round of a model of {whole / 1e3:.1f} kB")
    accuracy = trainer.test(module, datamodule=data, verbose=False)[0]["accuracy"]
    print(f"{title}: {100 * accuracy:.1f} % of the islands' reports are read rightly")
