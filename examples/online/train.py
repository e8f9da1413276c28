"""Training without end: hour after hour is evaluated, trained and saved. Started again, it goes on where it was.

python examples/online/train.py                                                    local, on generated hours
python examples/online/train.py --data clicks --model_dir model --hours 0          whatever comes, for ever
fleetrun --server_num 2 --worker_num 2 examples/online/train.py --mode sync        also async, half_async, hybrid
... --count 2 --unseen_days 1                                                      ids come late, and go
... --plot auc.png                                                                 AUC and rows of every hour
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from torchfleet import online
from torchfleet.options import HelpFormatter

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from generate import TAGS_PER_ITEM, add_options, hours, write_part

IDS = ["user", "item", "tags"]


class ClickModel(torch.nn.Module):
    """A weight per id, and a vector per id with the products of the vectors: a factorization machine."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        policies = policies_of(options)
        zeros, small = fleet.nn.Constant(0.0), fleet.nn.Uniform(-0.05, 0.05)
        self.weights = fleet.nn.SparseEmbedding(1, name="weights", initializer=zeros, **policies)
        self.vectors = fleet.nn.SparseEmbedding(options.dim, name="vectors", initializer=small, **policies)
        self.bias = torch.nn.Parameter(torch.zeros(()))

    def forward(self, batch: Any) -> torch.Tensor:
        ids = [batch[name] for name in IDS]
        vectors = self.vectors(ids)  # (n, 3, dim)
        products = vectors.sum(dim=1).square() - vectors.square().sum(dim=1)
        logits: torch.Tensor = self.bias + self.weights(ids).sum(dim=(1, 2)) + products.sum(dim=1) / 2
        return logits


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    fleet.init()
    model = fleet.distributed_model(ClickModel(options))
    optimizer = fleet.distributed_optimizer(
        torch.optim.Adagrad(model.parameters(), lr=options.lr), strategy_of(options)
    )
    if fleet.is_server():
        fleet.init_server(online.model_to_load(options.model_dir))
        fleet.run_server()
        return
    fleet.init_worker(online.model_to_load(options.model_dir))
    if options.generates and fleet.is_first_worker():
        for name in hours(options.start, options.hours):
            write_part(Path(options.data), name, options.rows, options.new_items, options.parts, options.seed)
    train(model, optimizer, options)
    if fleet.is_first_worker():
        conclude(options)
    fleet.stop_worker()


def train(model: torch.nn.Module, optimizer: Any, options: argparse.Namespace) -> None:
    until = list(hours(options.start, options.hours))[-1] if options.hours else None
    in_step = options.mode == "sync" and fleet.worker_num() > 1

    def step(batch: Any) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(model(batch), batch["click"].view(-1).float())

    def train_part(part: online.Part, files: list[str]) -> None:
        fleet.train_from_dataset(step, samples(files, options.batch_size), optimizer, print_period=0)

    def train_part_in_step(part: online.Part, files: list[str]) -> None:
        """All workers make the same number of steps: each reads all files, and takes its share of every batch."""
        for batch in fleet.prefetch(share(batch) for batch in samples(files, options.batch_size, drop_last=True)):
            step(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(part: online.Part, files: list[str]) -> fleet.metrics.AUC:
        meter = fleet.metrics.AUC()
        fleet.infer_from_dataset(
            lambda batch: {"auc": meter.update(model(batch), batch["click"])}, samples(files, 4096), print_period=0
        )
        return meter

    source = online.FolderSource(options.data, start=f"{options.start}/00" if options.generates else None, until=until)
    online.train_passes(
        source,
        options.model_dir,
        train_part_in_step if in_step else train_part,
        evaluate=evaluate,
        poll_seconds=options.poll_seconds,
        all_files=in_step,
    )


def samples(files: list[str], batch_size: int, drop_last: bool = False) -> Any:
    dataset = fleet.QueueDataset()
    ids = [fleet.Slot("user", dim=1), fleet.Slot("item", dim=1), fleet.Slot("tags", dim=TAGS_PER_ITEM)]
    use_var = [fleet.Slot("click", dim=1), fleet.Slot("show", dim=1), *ids]
    dataset.init(batch_size, use_var=use_var, drop_last=drop_last)
    dataset.set_filelist(files)
    return dataset


def share(batch: Any) -> dict[str, torch.Tensor]:
    """This worker's rows of a batch that all workers have read."""
    return {name: values[fleet.worker_index() :: fleet.worker_num()] for name, values in batch.items()}


def conclude(options: argparse.Namespace) -> None:
    """The results of all passes that the saved model keeps, those of earlier runs included."""
    history = online.history(options.model_dir)
    aucs = [result.auc for result in history if result.auc is not None]
    print(f"mean AUC {sum(aucs) / max(1, len(aucs)):.4f} over {len(aucs)} hours", flush=True)
    if options.plot:
        plot(history, options.plot)


def plot(history: list[Any], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 5))
    above.plot([result.auc for result in history])
    above.set_ylabel("AUC before training")
    below.plot([result.rows for result in history])
    below.set_ylabel("rows")
    below.set_xlabel(f"hours since {history[0].part}" if history else "hours")
    below.set_ylim(bottom=0)
    figure.tight_layout()
    figure.savefig(path)
    print(f"AUC and rows of {len(history)} hours in {path}", flush=True)


def policies_of(options: argparse.Namespace) -> dict[str, Any]:
    """Which ids get a row, and which rows go."""
    entries = []
    if options.count > 1:
        entries.append(fleet.CountFilterEntry(options.count))
    if options.probability < 1:
        entries.append(fleet.ProbabilityEntry(options.probability))
    if options.threshold is not None:
        entries.append(fleet.ShowClickEntry("show", "click"))
    asked = {"delete_after_unseen_days": options.unseen_days, "delete_threshold": options.threshold}
    asked |= {"ttl_days": options.ttl_days, "max_rows": options.max_rows}
    given = {name: value for name, value in asked.items() if value is not None}
    # The time is that of the data, so a hole in it may make all rows old at once, and that is right.
    shrink = {"shrink": fleet.Shrink(**given, every_hours=options.shrink_hours, max_share=1.0)} if given else {}
    return {**({"entry": entries} if entries else {}), **shrink}


def strategy_of(options: argparse.Namespace) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = options.mode != "sync"
    if options.mode in ("half_async", "hybrid"):
        strategy.a_sync_configs = {options.mode: True}
    return strategy


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--data", help="a folder of hourly parts, or its URL; without it they are generated")
    parser.add_argument("--model_dir", default="online_model", help="folder of the saved model")
    modes = ["sync", "async", "half_async", "hybrid"]
    parser.add_argument("--mode", default="sync", choices=modes, help="when gradients travel")
    parser.add_argument("--batch_size", type=int, default=100, help="in sync mode: of all workers together")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--dim", type=int, default=4, help="numbers per row of an embedding")
    parser.add_argument("--poll_seconds", type=float, default=1.0, help="time between two looks for new parts")
    parser.add_argument("--plot", help="an image to draw AUC and rows of every hour into")
    policies = parser.add_argument_group("which ids get a row, and which rows go")
    policies.add_argument("--count", type=int, default=1, help="a row at this appearance of an id")
    policies.add_argument("--probability", type=float, default=1.0, help="the share of ids that get a row")
    policies.add_argument("--unseen_days", type=float, help="days without an appearance after which a row goes")
    policies.add_argument("--threshold", type=float, help="rows go whose score of shows and clicks is below")
    policies.add_argument("--ttl_days", type=float, help="days after which a row goes")
    policies.add_argument("--max_rows", type=int, help="of each table")
    policies.add_argument("--shrink_hours", type=float, default=6.0, help="how often rows are looked through")
    add_options(parser)
    options = parser.parse_args()
    if options.batch_size < 1 or options.hours < 0:
        parser.error("--batch_size must be at least 1, and --hours at least 0 (0: for ever)")
    options.generates = options.data is None
    if options.generates and min(options.hours, options.rows, options.new_items, options.parts) < 1:
        parser.error("generated data needs --hours, --rows, --new_items and --parts of at least 1")
    options.data = options.data or "online_data"
    return options


if __name__ == "__main__":
    main()
