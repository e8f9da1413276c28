"""A rank in which FleetTrainer trains the model of transformers_job under one strategy after another:
`fleet_trainer_job.py OUT`. The first rank leaves the trained models' answers in OUT, by the name of the strategy."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from support import planned_models
from support.scripts import transformers_job as job
from transformers import Trainer, TrainingArguments

import torchfleet as fleet

STRATEGIES: dict[str, dict[str, Any]] = {
    "none": {},
    "amp": {"amp": True, "amp_configs": {"dtype": "bfloat16"}},
    "recompute": {"recompute": True, "recompute_configs": {"checkpoints": ["bert.encoder.layer.*"]}},
    "gradient_merge": {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}},
    "sharding 1": {"sharding": True, "sharding_configs": {"stage": 1}},
    "sharding 2": {"sharding": True, "sharding_configs": {"stage": 2}},
    "tensor_parallel": {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}},
    "sharding 3": {"sharding": True, "sharding_configs": {"stage": 3}},
    "localsgd": {"localsgd": True, "localsgd_configs": {"k_steps": 1}},
    "lamb": {"lamb": True},
}
# Ranks that train alone and are averaged do what one process does: with SGD, and with nothing clipped.
OPTIONS: dict[str, dict[str, Any]] = {"localsgd": {"optim": "sgd", "max_grad_norm": 0.0, "learning_rate": 0.1}}


def arguments(folder: Path | str, batch: int = job.BATCH, **more: Any) -> TrainingArguments:
    """A rate that stays, so that as many samples per update give the same updates; weights that decay."""
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    alike = {"average_tokens_across_devices": False, "train_sampling_strategy": "sequential", "use_cpu": True}
    steps = {"num_train_epochs": job.EPOCHS, "lr_scheduler_type": "constant", "learning_rate": 0.01}
    rules = {"weight_decay": 0.1, "max_grad_norm": 0.5}
    settings = {**quiet, **alike, **steps, **rules, **more}
    return TrainingArguments(output_dir=str(folder), per_device_train_batch_size=batch, **settings)


def trainer(folder: Path | str, name: str, batch: int, model: Any = None, **more: Any) -> Any:
    """Batches are such that one update has as many samples as that of one process."""
    size = batch // (2 if name == "gradient_merge" else 1)
    strategy = fleet.DistributedStrategy(**STRATEGIES[name])
    model = job.make_model() if model is None else model
    args = arguments(folder, size, **{**OPTIONS.get(name, {}), **more})
    adam = torch.optim.Adam(model.parameters(), lr=0.01) if name == "lamb" else None  # the Trainer itself has AdamW
    given = {"strategy": strategy, "train_dataset": job.Sentences(), "optimizers": (adam, None)}
    return fleet.transformers.FleetTrainer(model, args, **given)


class Texts(torch.utils.data.Dataset[Any]):
    """Sequences of a causal model; some of their tokens have no label."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        found = planned_models.batch("llama", index)
        return {name: value[index % 2] for name, value in found.items()}


def train_texts(folder: Path, strategy: Any = None) -> dict[str, Any]:
    """A small Llama after training by FleetTrainer, or without a strategy by transformers.Trainer."""
    args, data = arguments(folder, 4, num_train_epochs=1, max_grad_norm=0.1), Texts()
    model: Any = planned_models.made("llama")
    made: Any = Trainer(model, args, train_dataset=data)
    if strategy is not None:
        made = fleet.transformers.FleetTrainer(model, args, strategy=strategy, train_dataset=data)
    made.train()
    losses = {f"loss.{line['step']}": line["loss"] for line in made.state.log_history if "loss" in line}
    return {**losses, **{name: value.detach().clone() for name, value in model.state_dict().items()}}


def main() -> None:
    warnings.filterwarnings("ignore")  # of bfloat16, which is slow on most CPUs
    out = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")  # one for all jobs, which begin one after another
    num, found = torch.distributed.get_world_size(), {}
    for name in STRATEGIES:
        model = job.BertForSequenceClassification.from_pretrained(out.parent / "first")
        batch = job.BATCH // (1 if name == "tensor_parallel" else num)  # ranks that share layers share samples
        made = trainer(out.parent / name.replace(" ", ""), name, batch, model, save_strategy="epoch")
        made.train()
        made.save_model(str(out.parent / "last"))
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        fleet.barrier_worker()
        saved = job.BertForSequenceClassification.from_pretrained(out.parent / "last")
        found[name] = {"answers": job.answers(saved), "losses": losses}
        fleet.stop_worker()
    found["texts"] = train_texts(out.parent / "texts", fleet.DistributedStrategy(context_parallel=True))
    fleet.stop_worker()
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
