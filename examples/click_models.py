"""Training and prediction of click models on Criteo rows, generated or real: the same for every such model."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn import functional as F

import torchfleet as fleet
from examples.columns import Batches, auc, predicted, split
from examples.flags import optimizer_of, parsed, parser_of, strategy_of
from examples.loop import save, train
from examples.wide_deep.data import add_options, clicks
from torchfleet.options import HelpFormatter

MakeModel = Callable[[int], torch.nn.Module]  # from --dim


def train_clicks(
    make_model: MakeModel,
    doc: str | None,
    geo_lr: float | None,
    on_device: Callable[..., torch.nn.Module] | None = None,
) -> None:
    """The whole of train.py, in any role. Without a `geo_lr` there is no geo mode. `on_device(dim, device=...)` makes
    the model with its tables on a device, for --tables.
    """
    parser = parser_of(doc, epochs=1, batch_size=256, lr=0.05, geo_lr=geo_lr)
    parser.add_argument("--dim", type=int, default=8, help="numbers in a vector")
    add_options(parser)
    if on_device is not None:
        where = "where rows are: on servers, in GPU memory (one process), or the same on the CPU"
        parser.add_argument("--tables", default="servers", choices=["servers", "cuda", "cpu"], help=where)
    options = parsed(parser)
    torch.manual_seed(options.seed)
    if on_device is not None and options.tables != "servers":
        if options.mode != "sync" or options.save:
            parser.error("--mode and --save are for --tables servers")
        train_on_device(on_device(options.dim, device=options.tables), options)
        return
    fleet.init()
    model = fleet.distributed_model(make_model(options.dim))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        return
    fleet.init_worker()
    rows, held_out = split(clicks(options))
    train(lambda batch: F.binary_cross_entropy_with_logits(model(batch), batch["label"]), optimizer, rows, options)
    if fleet.is_first_worker():
        model.eval()
        found = auc(predicted(model, held_out), held_out["label"])
        print(f"AUC {found:.4f} on {len(held_out['label']):,} held-out rows", flush=True)
        save(options)
    fleet.stop_worker()


def train_on_device(model: torch.nn.Module, options: argparse.Namespace) -> None:
    """Rows and network in the memory of one device, in a collective job: no servers."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(model)
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options))
    rows, held_out = split(clicks(options))
    device = next(model.top.parameters()).device
    for epoch in range(options.epochs):
        for step, columns in enumerate(Batches(rows, options.batch_size, 0, 1, options.seed + epoch)):
            batch = {name: column.to(device) for name, column in columns.items()}
            loss = F.binary_cross_entropy_with_logits(model(batch), batch["label"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                print(f"epoch {epoch + 1} step {step:4} loss {loss.item():.4f}", flush=True)
    model.eval()
    there = {name: column.to(device) for name, column in held_out.items()}
    found = auc(predicted(model, there).cpu(), held_out["label"])
    print(f"AUC {found:.4f} on {len(held_out['label']):,} held-out rows", flush=True)
    fleet.stop_worker()


def predict_clicks(make_model: MakeModel, doc: str | None) -> None:
    """The whole of predict.py: a plain process."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=HelpFormatter)
    parser.add_argument("--model", required=True, help="the folder that train.py --save wrote to")
    parser.add_argument("--dim", type=int, default=8, help="as given to train.py")
    parser.add_argument("--seed", type=int, default=0, help="as given to train.py")
    add_options(parser)
    options = parser.parse_args()
    model = fleet.load_inference_model(options.model, make_model(options.dim))
    _, held_out = split(clicks(options))
    scores = predicted(model, held_out)
    for chance, clicked in zip(torch.sigmoid(scores[:5]).tolist(), held_out["label"][:5].tolist(), strict=True):
        print(f"predicted {chance:.4f}, clicked {clicked:.0f}")
    print(f"AUC {auc(scores, held_out['label']):.4f} on {len(scores):,} held-out rows, from {options.model}")
