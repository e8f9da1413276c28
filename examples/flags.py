"""Flags that several examples share, and what they mean: the mode, the optimizer, how long to train, where to save."""

from __future__ import annotations

import argparse

import torch

import torchfleet as fleet
from torchfleet.options import HelpFormatter

MODES = ["sync", "half_async", "async", "geo", "hybrid"]


def parser_of(
    doc: str | None,
    epochs: int,
    batch_size: int,
    lr: float,
    geo_lr: float | None,
    is_batch_shared: bool = True,
) -> argparse.ArgumentParser:
    """The flags of training; an example adds those of its data and model. Without a `geo_lr` there is no geo mode.

    A shared batch is cut among the workers: more of them make as many steps, of as many samples, as one does.
    """
    modes = [mode for mode in MODES if mode != "geo" or geo_lr is not None]
    rates = f"{lr:g}" if geo_lr is None else f"{lr:g} for Adagrad, {geo_lr:g} for geo's SGD"
    whose = "of all workers together" if is_batch_shared else "of each worker"
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.add_argument("--mode", default="sync", choices=modes, help="when gradients travel")
    if geo_lr is not None:
        parser.add_argument("--k_steps", type=int, default=20, help="steps between two exchanges in geo mode")
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=batch_size, help=f"samples of a step, {whose}")
    parser.add_argument("--lr", type=float, help=f"learning rate (default: {rates})")
    parser.add_argument("--save", help="a folder to save the model to")
    parser.add_argument("--seed", type=int, default=0, help="of the data, of first values and of the order of samples")
    parser.set_defaults(rates=(lr, geo_lr), is_batch_shared=is_batch_shared)
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """What was given on the command line; numbers below 1 are refused."""
    options = parser.parse_args()
    for name, value in vars(options).items():
        if name != "seed" and type(value) is int and value < 1:
            parser.error(f"--{name} must be at least 1, found {value}")
    return options


def own_batch_size(options: argparse.Namespace, num_workers: int) -> int:
    """Samples of a step on each worker."""
    if not options.is_batch_shared:
        return int(options.batch_size)
    if options.batch_size < num_workers:
        raise SystemExit(
            f"--batch_size {options.batch_size} is less than a sample for each of {num_workers} workers: give at least "
            f"{num_workers}"
        )
    return int(options.batch_size) // num_workers


def strategy_of(options: argparse.Namespace) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy(a_sync=options.mode != "sync")
    if options.mode == "geo":
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    elif options.mode in ("half_async", "hybrid"):
        strategy.a_sync_configs = {options.mode: True}
    return strategy


def optimizer_of(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Adagrad; in geo mode, where differences of workers are added up, SGD."""
    lr, geo_lr = options.rates
    if options.mode == "geo":
        return torch.optim.SGD(model.parameters(), lr=options.lr if options.lr is not None else geo_lr)
    return torch.optim.Adagrad(model.parameters(), lr=options.lr if options.lr is not None else lr)
