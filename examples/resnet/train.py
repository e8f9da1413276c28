"""A residual network on images, by ranks that train together; every collective strategy is a flag.

python examples/resnet/train.py --model small                                             one process
fleetrun --nproc_per_node 2 examples/resnet/train.py --model small --epochs 2 --amp       two ranks, mixed precision
fleetrun --nproc_per_node 8 examples/resnet/train.py --model resnet50 --data imagenet --epochs 90 --schedule cosine:5
... --save model                                                                          save, and go on from there
... --localsgd --localsgd_configs k_steps=8                                               see --help for all of them
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from torchfleet import options as strategies

sys.path.insert(0, str(Path(__file__).parent))
from data import datasets, loader
from model import resnet50, resnet_small


class Meter:
    """Counts over a part of an epoch; `loss` is the loss function that counts as it goes."""

    def __init__(self) -> None:
        self.start, self.num_batches = time.perf_counter(), 0
        self._sums = torch.zeros(4)  # images, loss, right, right among the five best

    def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        with torch.no_grad():  # and without .item(), for which a GPU would have to be waited for
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            counts = [len(labels) * loss.new_ones(()), len(labels) * loss, best[:, 0].sum(), best.any(1).sum()]
            self._sums = self._sums.to(loss.device) + torch.stack([count.float() for count in counts])
        return loss

    def summary(self) -> tuple[float, float, float]:
        """(loss, acc1, acc5) over all ranks; of a pipeline only the last stage has counted."""
        num, loss, first, five = fleet.util.all_reduce(self._sums.double()).tolist()
        return loss / num, 100 * first / num, 100 * five / num


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init(is_collective=True, strategy=options.chosen)
    train_data, test_data, num_classes = datasets(options.data, options.images, options.classes, options.image_size)
    made = resnet50(num_classes) if options.model == "resnet50" else resnet_small(num_classes, options.blocks)
    model = fleet.distributed_model(made)
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options))
    batches = loader(train_data, options.batch_size, True, options.seed, options.processes)
    test_batches = loader(test_data, options.batch_size, False, options.seed, options.processes)
    first_epoch, step = resume(options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(options, len(batches)), last_epoch=step - 1)
    for epoch in range(first_epoch, options.epochs):
        batches.sampler.set_epoch(epoch)
        train(model, optimizer, schedule, batches, epoch, options)
        say(f"epoch {epoch + 1}: test loss {{:.4f}}, acc1 {{:.2f}} %, acc5 {{:.2f}} %", *evaluate(model, test_batches))
        if options.save:
            fleet.save(options.save, extra={"epoch": epoch + 1, "step": (epoch + 1) * len(batches)})
    say("final accuracy: acc1 {1:.2f} %, acc5 {2:.2f} %", *evaluate(model, test_batches))
    fleet.stop_worker()


def train(model: Any, optimizer: Any, schedule: Any, batches: Any, epoch: int, options: argparse.Namespace) -> None:
    model.train()
    device, meter = next(model.parameters()).device, Meter()
    for step, (images, labels) in enumerate(batches, 1):
        model.train_batch(images.to(device, non_blocking=True), labels.to(device, non_blocking=True), meter.loss)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        meter.num_batches += 1
        if step % options.print_period == 0 or step == len(batches):
            loss, acc1, acc5 = meter.summary()
            fleet.report(loss=loss, acc1=acc1)
            num = meter.num_batches * options.batch_size * fleet.data_shard()[1]
            rate = num / (time.perf_counter() - meter.start)
            say(
                f"epoch {epoch + 1} step {step}/{len(batches)}: loss {{:.4f}}, acc1 {{:.2f}} %, acc5 {{:.2f}} %, "
                "{:,.0f} images/s, lr {:.4g}", loss, acc1, acc5, rate, schedule.get_last_lr()[0],
            )  # fmt: skip
            meter = Meter()


def evaluate(model: Any, batches: Any) -> tuple[float, float, float]:
    """(loss, acc1, acc5) on the test images, over all ranks."""
    model.eval()
    device, meter = next(model.parameters()).device, Meter()
    for images, labels in batches:
        logits = model.eval_batch(images.to(device))
        if logits is not None:  # only the last stage of a pipeline has them
            meter.loss(logits, labels.to(device))
    return meter.summary()


def optimizer_of(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Momentum SGD or Adam; no weight decay for biases and batch norms."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": options.weight_decay, "initial_lr": options.lr},
        {"params": others, "weight_decay": 0.0, "initial_lr": options.lr},
    ]  # initial_lr is what a schedule that begins in the middle starts from
    if options.optimizer == "adam":
        return torch.optim.Adam(groups, lr=options.lr)
    return torch.optim.SGD(groups, lr=options.lr, momentum=0.9)


def rate_of(options: argparse.Namespace, steps_per_epoch: int) -> Any:
    """The learning rate over steps, as a share of --lr."""
    name, _, warm_up = options.schedule.partition(":")
    begin, total = round(float(warm_up or 0) * steps_per_epoch), options.epochs * steps_per_epoch

    def share(step: int) -> float:
        if step < begin:
            return (step + 1) / begin
        done = min(1.0, (step - begin) / max(1, total - begin))
        if name == "cosine":
            return (1 + math.cos(math.pi * done)) / 2
        return 0.1 ** sum(done >= part for part in (1 / 3, 2 / 3, 8 / 9)) if name == "step" else 1.0

    return share


def resume(options: argparse.Namespace) -> tuple[int, int]:
    """The epoch and the step to begin with: after those that --save has seen."""
    if not options.save or not Path(options.save).exists():
        return 0, 0
    extra = fleet.load(options.save)
    say(f"going on from {options.save}, after epoch {extra['epoch']}, step {extra['step']}")
    return extra["epoch"], extra["step"]


def say(text: str, *values: float) -> None:
    if fleet.is_first_worker():
        print(text.format(*values), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=strategies.HelpFormatter)
    parser.add_argument("--model", default="small", choices=["small", "resnet50"], help="the network")
    parser.add_argument(
        "--blocks", type=int, default=3, help="of the small model, in each of 3 stages: 6 · 3 + 2 layers"
    )
    parser.add_argument("--data", help="a folder with train/<class>/<image> and val/<class>/<image>; else made up")
    parser.add_argument("--images", type=int, default=2048, help="made-up images to train with; a fourth more to test")
    parser.add_argument("--classes", type=int, default=10, help="of made-up images")
    parser.add_argument("--image_size", type=int, help="pixels each way (default: 32 for small, 224 for resnet50)")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=64, help="of each rank (of a pipeline: of all its ranks)")
    parser.add_argument("--lr", type=float, help="(default: 0.1 for SGD, 1e-3 for Adam)")
    parser.add_argument("--weight_decay", type=float, help="(default: 1e-4; --lars and --lamb have their own)")
    parser.add_argument("--optimizer", choices=["sgd", "adam"], help="(default: adam with --lamb, else sgd)")
    parser.add_argument("--schedule", default="cosine", help="constant, cosine or step; cosine:5 warms up for 5 epochs")
    parser.add_argument("--save", help="save to this folder after every epoch; go on from there if it has a model")
    parser.add_argument("--print_period", type=int, default=20, help="batches between two lines of progress")
    parser.add_argument("--processes", type=int, default=0, help="that read images for a rank; 0: the rank itself")
    parser.add_argument("--seed", type=int, default=0, help="of first values and of the order of samples")
    strategies.add_arguments(parser)
    options = parser.parse_args()
    check(parser, options)
    options.optimizer = options.optimizer or ("adam" if options.chosen.lamb else "sgd")
    options.lr = options.lr if options.lr is not None else {"sgd": 0.1, "adam": 1e-3}[options.optimizer]
    if options.weight_decay is None:
        options.weight_decay = 0.0 if options.chosen.lars or options.chosen.lamb else 1e-4
    options.image_size = options.image_size or {"small": 32, "resnet50": 224}[options.model]
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Say what is wrong before anything starts."""
    name, _, warm_up = options.schedule.partition(":")
    if name not in ("constant", "cosine", "step") or not (warm_up or "0").replace(".", "", 1).isdigit():
        parser.error(f"--schedule must be constant, cosine or step, perhaps with :EPOCHS, found '{options.schedule}'")
    for number in ("images", "classes", "epochs", "batch_size", "blocks", "print_period"):
        if getattr(options, number) < 1:
            parser.error(f"--{number} must be at least 1, found {getattr(options, number)}")
    try:
        options.chosen = strategies.strategy_of(options)
    except fleet.FleetError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
