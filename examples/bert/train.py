"""A masked language model, trained by all ranks together: every strategy is a flag.

python examples/bert/train.py                                                          one process, a generated text
fleetrun --nproc_per_node 2 examples/bert/train.py --size tiny --amp --recompute
fleetrun --nproc_per_node 8 examples/bert/train.py --size large --text text8.xz --amp --sharding --save model
fleetrun --nproc_per_node 2 examples/bert/train.py --pipeline --pipeline_configs accumulate_steps=4
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet

sys.path.insert(0, str(Path(__file__).parent))
from data import Batch, Batches, Text, generated, read_text
from model import SIZES, Bert, Output, masked_loss

from torchfleet.collective.world import degrees
from torchfleet.errors import FleetError
from torchfleet.options import HelpFormatter, add_arguments, strategy_of

_HELD_OUT = 0.05  # of the text, its end
_MOMENTUM = ("lars", "dgc", "localsgd", "adaptive_localsgd")  # strategies that are made for momentum SGD


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init(is_collective=True)
    strategy = with_defaults(strategy_of(options), SIZES[options.size].layers)
    train_text, test_text = texts(options)
    model = fleet.distributed_model(
        Bert(SIZES[options.size], train_text.vocab_size, options.length, options.dropout), strategy
    )
    optimizer = fleet.distributed_optimizer(optimizer_of(model, strategy, options))
    job = Job(model, optimizer, strategy.pipeline)
    first = resumed(options.save)
    torch.manual_seed(options.seed + fleet.data_shard()[0])  # dropout: ranks with different samples, different masks
    shared = (options.batch_size, options.length, options.seed, *fleet.data_shard())
    train(job, Batches(train_text, *shared), first, options)
    loss, accuracy = evaluate(job, Batches(test_text, *shared))
    if fleet.is_first_worker():
        print(f"held out: loss {loss:.4f}, {accuracy:.1%} of the masked words told", flush=True)
    fleet.stop_worker()


class Job:
    """A step and a prediction, with and without a pipeline, whose ranks run the model together."""

    def __init__(self, model: Any, optimizer: Any, is_pipeline: bool) -> None:
        self.model, self.optimizer, self._is_pipeline = model, optimizer, is_pipeline
        self._device = torch.device("cuda") if next(model.parameters()).is_cuda else torch.device("cpu")

    def step(self, batch: Batch) -> torch.Tensor | None:
        """The loss; in a pipeline only its last stage has one."""
        batch = self._on_device(batch)
        if self._is_pipeline:
            target = batch.pop("labels")
            loss = self.model.train_batch(batch, target, lambda output, labels: masked_loss(logits_of(output), labels))
        else:
            loss = self.model(**batch).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None if loss is None else loss.detach()

    @torch.no_grad()
    def told(self, batch: Batch) -> tuple[float, float, int]:
        """Sum of losses, words told, words asked for; zeros where a pipeline's rank does not know."""
        batch = self._on_device(batch)
        labels = batch.pop("labels")
        output = self.model.eval_batch(batch) if self._is_pipeline else self.model(**batch)
        if output is None:
            return 0.0, 0.0, 0
        logits = logits_of(output).float()
        right = (logits.argmax(-1) == labels).sum().item()
        return masked_loss(logits, labels).item() * labels.numel(), right, labels.numel()

    def _on_device(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.items()}


def train(job: Job, batches: Batches, first: int, options: argparse.Namespace) -> None:
    job.model.train()
    since, loss = time.monotonic(), None
    for step in range(first, options.steps):
        for group in job.optimizer.param_groups:
            group["lr"] = options.lr * rate(step, options)
        loss = job.step(batches.at(step))
        done = step + 1
        if done % options.log_every == 0 or done == options.steps:
            say(loss, done, step + 1 - max(first, done - options.log_every), since, options)
            since = time.monotonic()
        if options.save and (done % options.save_every == 0 or done == options.steps):
            fleet.save(options.save, {"step": done})
            since = time.monotonic()


def say(loss: torch.Tensor | None, done: int, num: int, since: float, options: argparse.Namespace) -> None:
    """By the first rank that knows the loss."""
    if loss is None:
        return
    value = loss.item()  # waits for the GPU: after it, the time is that of all the steps
    fleet.report(loss=value)
    tokens = num * options.batch_size * options.length
    speed = tokens / (time.monotonic() - since)
    if fleet.is_first_worker() or options.pipeline:
        print(f"step {done:5} loss {value:.4f} | {speed:,.0f} tokens/s of this reader", flush=True)


def evaluate(job: Job, batches: Batches) -> tuple[float, float]:
    """(loss, share of masked words told) on held-out text, over all ranks."""
    job.model.eval()
    found = [job.told(batches.at(step)) for step in range(min(20, batches.steps_per_epoch))]
    loss, right, num = fleet.util.all_reduce([sum(column) for column in zip(*found, strict=True)])
    return float(loss / num), float(right / num)


def logits_of(output: Any) -> torch.Tensor:
    """A pipeline that was traced returns its only tensor."""
    found = output.logits if isinstance(output, Output) else output
    assert isinstance(found, torch.Tensor)
    return found


def with_defaults(strategy: fleet.DistributedStrategy, layers: int) -> fleet.DistributedStrategy:
    """What only the model's author knows: which modules to recompute, and where a pipeline may be cut."""
    if strategy.recompute and not strategy.recompute_configs["checkpoints"]:
        strategy.recompute_configs = {**strategy.recompute_configs, "checkpoints": ["encoder.layer.*"]}
    if strategy.pipeline and not strategy.pipeline_configs["stages"]:
        num = degrees(strategy, fleet.worker_num())["pipe"]
        if num > layers:
            raise FleetError(f"{layers} layers cannot be cut into a pipeline of {num} stages: use a larger --size")
        names = [f"encoder.layer.{stage * layers // num}" for stage in range(1, num)]
        strategy.pipeline_configs = {**strategy.pipeline_configs, "stages": names}
    return strategy


def optimizer_of(
    model: torch.nn.Module, strategy: fleet.DistributedStrategy, options: argparse.Namespace
) -> torch.optim.Optimizer:
    if any(getattr(strategy, name) for name in _MOMENTUM):
        options.lr = options.lr or 0.5
        return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    options.lr = options.lr or (1e-3 if options.size in ("tiny", "small") else 1e-4)
    if strategy.lamb:
        return torch.optim.Adam(model.parameters(), lr=options.lr)
    return torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.01)


def rate(step: int, options: argparse.Namespace) -> float:
    """Up over the warm-up, then down to nothing, in straight lines."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    return (options.steps - step) / max(1, options.steps - options.warmup)


def resumed(folder: str | None) -> int:
    """The step to begin with."""
    if folder is None or not (Path(folder) / "manifest.json").exists():
        return 0
    step = int(fleet.load(folder)["step"])
    if fleet.is_first_worker():
        print(f"going on after step {step}, from {folder}", flush=True)
    return step


def texts(options: argparse.Namespace) -> tuple[Text, Text]:
    if options.text:
        text = read_text(options.text, options.vocab_size, options.max_bytes)
    else:
        text = generated(options.num_words, min(options.vocab_size, 1000), options.seed)
    cut = len(text.ids) - int(_HELD_OUT * len(text.ids))
    return Text(text.ids[:cut], text.vocab_size), Text(text.ids[cut:], text.vocab_size)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="of the network")
    add("--text", help="a text, for example text8; .xz .gz .zst .bz2 are read as they are; default: a generated one")
    add("--max_bytes", type=int, help="of the text, only so much of its beginning")
    add("--num_words", type=int, default=500_000, help="of a generated text")
    add("--vocab_size", type=int, default=30_000, help="most frequent words; a generated text has at most 1,000")
    add("--length", type=int, default=64, help="words of a sequence")
    add("--batch_size", type=int, default=32, help="sequences of a step, for each reader of data")
    add("--steps", type=int, default=300, help="steps to train")
    add("--lr", type=float, help="default: 1e-3 (base and large 1e-4) for Adam, 0.5 for SGD")
    add("--warmup", type=int, default=20, help="steps until the learning rate is there")
    add("--dropout", type=float, default=0.1, help="share of activations that are dropped")
    add("--save", help="a folder for the model; if there is one already, training goes on from it")
    add("--save_every", type=int, default=100, help="steps")
    add("--log_every", type=int, default=20, help="steps")
    add("--seed", type=int, default=0, help="of first values and of the order of samples")
    add_arguments(parser)
    options = parser.parse_args()
    for name in ("vocab_size", "length", "batch_size", "steps", "save_every", "log_every", "num_words"):
        least = {"vocab_size": 10, "length": 8}.get(name, 1)
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, found {getattr(options, name)}")
    if options.text and not Path(options.text).is_file():
        parser.error(f"--text {options.text}: no such file; leave it out to train on a generated text")
    return options


if __name__ == "__main__":
    try:
        main()
    except FleetError as error:
        raise SystemExit(f"train.py: {error}") from None
