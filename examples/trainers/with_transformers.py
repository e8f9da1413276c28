"""A small BERT that tells sentences apart, trained by Hugging Face's Trainer under collective strategies.

    python examples/trainers/with_transformers.py                                                one process
    fleetrun --nproc_per_node 2 examples/trainers/with_transformers.py --sharding 2 --merge 2    ranks

The sentences are made up, and the model begins with random weights: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import torchfleet as fleet

WORDS, LENGTH = 400, 12


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """A sentence is of class 1 if a word of the upper half stands at its beginning."""

    def __init__(self, seed: int, num: int = 1024) -> None:
        self.ids = torch.randint(1, WORDS, (num, LENGTH), generator=torch.Generator().manual_seed(seed))
        self.labels = (self.ids[:, 0] > WORDS // 2).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def strategy(options: argparse.Namespace) -> fleet.DistributedStrategy:
    made = fleet.DistributedStrategy(amp=options.amp)
    if options.sharding:
        made.sharding, made.sharding_configs = True, {"stage": options.sharding}
    if options.merge > 1:
        made.gradient_merge, made.gradient_merge_configs = True, {"k_steps": options.merge}
    return made


def right(found: Any) -> dict[str, float]:
    return {"right": float((found.predictions.argmax(1) == found.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", default="transformers_run", help="of checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--sharding", type=int, default=0, help="stage 1, 2 or 3")
    parser.add_argument("--merge", type=int, default=1, help="batches whose gradients are merged")
    options = parser.parse_args()
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(
        BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes)
    )
    arguments = TrainingArguments(
        options.folder, per_device_train_batch_size=32, num_train_epochs=options.epochs, learning_rate=5e-3,
        save_strategy="epoch", save_total_limit=1, logging_steps=32, report_to=[], disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    trainer = fleet.transformers.FleetTrainer(
        model, arguments, strategy=strategy(options), train_dataset=Sentences(seed=0),
        eval_dataset=Sentences(seed=1, num=512), compute_metrics=right,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=options.resume or None)
    found = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"{found['eval_right']:.1%} of new sentences are told apart")


if __name__ == "__main__":
    main()
