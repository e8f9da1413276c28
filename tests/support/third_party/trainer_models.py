"""Hugging Face's Trainer with BERT, and pytorch-forecasting under Lightning."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from support.third_party.case import SEED, Case, Outcome, Port, adagrad, auc, recorded_losses
from torch.utils.data import Dataset, Subset

WORDS, LENGTH, SENTENCES, BATCH, EPOCHS = 300, 10, 512, 32, 3


class Sentences(Dataset[Any]):
    """What a sentence is, its first word says."""

    def __init__(self, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, WORDS, (SENTENCES, LENGTH), generator=draw)
        self.labels = (self.ids[:, 0] > WORDS // 2).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def bert(port: Port) -> Outcome:
    """BertForSequenceClassification under Trainer, with a callback, on this worker's share of the sentences."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]
        num = 0

        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            self.num += 1

    torch.manual_seed(SEED)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=2, **sizes, **no_dropout)
    model: Any = BertForSequenceClassification(config)
    model, optimizer = port(model, adagrad(model, 0.02))
    index, num = port.share()
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder, recorded_losses() as losses:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH // num,
            num_train_epochs=EPOCHS,
            max_grad_norm=0.0,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            average_tokens_across_devices=False,
        )
        own = Subset(Sentences(), range(index, SENTENCES, num))
        Trainer(model, arguments, train_dataset=own, optimizers=(optimizer, None), callbacks=[steps]).train()
    assert steps.num == len(losses)
    port.finish()
    model.eval()
    test = Sentences(1)
    with torch.no_grad():
        logits = model(input_ids=test.ids).logits
    return Outcome(losses, auc(logits[:, 1] - logits[:, 0], test.labels))


def forecasting(port: Port) -> Outcome:
    """DecoderMLP under Lightning with early stopping, a monitor of rates and checkpoints; its error on later weeks."""
    import lightning
    import numpy as np
    import pandas
    from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger
    from pytorch_forecasting import DecoderMLP, TimeSeriesDataSet
    from pytorch_forecasting.metrics import MAE

    torch.manual_seed(SEED)
    series, weeks = np.meshgrid(np.arange(SERIES), np.arange(WEEKS), indexing="ij")
    draw = np.random.default_rng(0)
    level = draw.normal(size=SERIES)
    value = level[series] + np.sin(weeks / 3) + 0.1 * draw.normal(size=series.shape)
    table = pandas.DataFrame(
        {
            "series": [str(one) for one in series.ravel()],
            "week": weeks.ravel(),
            "value": value.ravel().astype("float32"),
        }
    )
    options: dict[str, Any] = {"time_idx": "week", "target": "value", "group_ids": ["series"]}
    data = TimeSeriesDataSet(
        table[table.week < WEEKS - 6],
        **options,
        max_encoder_length=8,
        max_prediction_length=2,
        static_categoricals=["series"],
        time_varying_known_reals=["week"],
    )
    later = TimeSeriesDataSet.from_dataset(data, table, min_prediction_idx=WEEKS - 6)
    model: Any = DecoderMLP.from_dataset(data, hidden_size=16, n_hidden_layers=1, dropout=0.0, loss=MAE())
    size = len(data) // STEPS // 2 * 2
    loader: Any = data.to_dataloader(train=True, batch_size=size // port.num_workers, shuffle=False)
    other: Any = later.to_dataloader(train=False, batch_size=64)
    model, optimizer, loader = port(model, adagrad(model, 0.05), loader)
    model.configure_optimizers = lambda: optimizer
    with tempfile.TemporaryDirectory() as folder, recorded_losses() as losses:
        callbacks = [
            EarlyStopping("val_loss", patience=5),
            LearningRateMonitor(),
            ModelCheckpoint(folder, monitor="val_loss"),
        ]
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=CSVLogger(folder),
            callbacks=callbacks,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, loader, other)
        assert os.path.exists(trainer.checkpoint_callback.best_model_path)
    port.finish()
    model.eval()
    with torch.no_grad():
        parts = [(model(x)["prediction"].squeeze(-1) - y[0]).abs() for x, y in other]
    return Outcome(losses, torch.cat(parts).mean().item())


SERIES, WEEKS, STEPS = 320, 30, 20
CASES = (
    Case("BERT, Trainer with a callback", "transformers", bert, hybrid_band=0.1),
    Case(
        "DecoderMLP, Lightning with three callbacks",
        "pytorch_forecasting",
        forecasting,
        relative=1e-5,
        hybrid_band=0.2,
    ),
)
