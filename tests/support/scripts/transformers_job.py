"""A tiny BERT that tells sentences apart, trained by Hugging Face's Trainer, on sentences that are made up.

`transformers_job.py OUT KIND` is a process of a job: KIND "servers", with the word embeddings on parameter servers, or
"collective". The trained model's answers are left in OUT.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import torchfleet as fleet

WORDS, LENGTH, SENTENCES, BATCH, EPOCHS = 200, 10, 64, 16, 2


class Sentences(Dataset[Any]):
    """Whose first word says what they are; some are shorter, and padded with zeros."""

    def __init__(self, num: int = SENTENCES) -> None:
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, WORDS, (num, LENGTH), generator=draw)
        self.ids[torch.rand(num, generator=draw) < 0.5, LENGTH - 3 :] = 0
        self.labels = (self.ids[:, 0] > WORDS // 2).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": self.labels[index]}


def make_model() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes, **no_dropout)
    return BertForSequenceClassification(config)


def make_optimizer(model: Any, lr: float = 0.02) -> torch.optim.Optimizer:
    """Rows without a gradient keep their value, in torch's dense tables too."""
    return torch.optim.Adagrad(model.parameters(), lr=lr)


def make_trainer(model: Any, optimizer: Any, folder: Path | str, data: Any, batch: int = BATCH, **more: Any) -> Trainer:
    """Batches come in their order, so that ranks and workers can be given halves of those of one process."""
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    # It would count this model's loss, a mean over sentences, as one over tokens of all ranks.
    more = {"average_tokens_across_devices": False, **more}
    settings = {"num_train_epochs": EPOCHS, "max_grad_norm": 0.0, "use_cpu": True, **quiet, **more}
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=batch, train_sampling_strategy="sequential", **settings
    )
    return Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None))


def answers(model: Any) -> torch.Tensor:
    sentences = Sentences()
    model.eval()
    with torch.no_grad():
        return model(sentences.ids, attention_mask=(sentences.ids > 0).long()).logits


def with_servers(out: Path) -> None:
    fleet.init()
    model = make_model()
    model.bert.embeddings.word_embeddings.sparse = True
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(make_optimizer(model))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    index, number = fleet.data_shard()
    own = Subset(Sentences(), range(index, SENTENCES, number))
    make_trainer(model, optimizer, out.parent / f"worker{index}", own, BATCH // number).train()
    fleet.barrier_worker()
    if fleet.is_first_worker():
        torch.save(answers(model), out)
    fleet.stop_worker()


def collective(out: Path) -> None:
    fleet.init(is_collective=True)
    model = fleet.distributed_model(make_model())
    optimizer = fleet.distributed_optimizer(make_optimizer(model))
    make_trainer(model, optimizer, out.parent / "ranks", Sentences(), BATCH // fleet.worker_num()).train()
    if fleet.is_first_worker():
        torch.save(answers(model.module), out)
    fleet.stop_worker()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    {"servers": with_servers, "collective": collective}[sys.argv[2]](Path(sys.argv[1]))
