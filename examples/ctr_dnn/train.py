"""CTR-DNN on Criteo rows: train, watch, save, resume. prepare.py makes data; without any, some is generated.

python examples/ctr_dnn/train.py                                                  local, one thread
python examples/ctr_dnn/train.py --threads 2                                      local, two training threads
fleetrun --server_num 2 --worker_num 2 examples/ctr_dnn/train.py --mode sync      also async, half_async, geo, hybrid
... --row_rule rowwise_adagrad                                                    another rule for rows: docs/rows.md
... --row_dtype bfloat16                                                          narrower rows: docs/rows.md
... --table_memory 8GB --table_path /nvme/rows                                     rows on disk: docs/tiered.md
... --tables cuda                                                                 rows in GPU memory: docs/gpu.md
... --save model                                                                  save after every epoch
... --init_model model                                                            go on from a saved model
... --reader pipe                                                                 read through `python reader.py`
... --reader parquet --data ctr_parquet                                           what to_parquet.py wrote
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import torchfleet as fleet
from torchfleet.options import HelpFormatter

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from model import CTRDNN, log_scale_of, loss_of, slots
from prepare import parts
from reader import CriteoReader


class MetricsPrinter(fleet.FetchHandler):
    """Prints every few seconds, from a thread of its own."""

    def handler(self, values: dict[str, Any]) -> None:
        print(f"watch: loss {values['loss']:.4f}, AUC of all {values['auc']:.4f}", flush=True)


def main() -> None:
    options = parse()
    torch.manual_seed(options.seed)
    if options.tables != "servers":
        train_on_device(options)
        return
    fleet.init()
    storage = fleet.Tiered(options.table_memory, options.table_path) if options.table_memory else None
    dtype, _, step = options.row_dtype.partition("-")
    model = fleet.distributed_model(CTRDNN(storage=storage, dtype=dtype, step=step or None, wire=options.row_wire))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options), strategy_of(options))
    if fleet.is_server():
        fleet.init_server(options.init_model)
        fleet.run_server()
        return
    fleet.init_worker(options.init_model)
    train(model, optimizer, options)
    fleet.stop_worker()


def train(model: torch.nn.Module, optimizer: Any, options: argparse.Namespace) -> None:
    data, test = dataset_of(options, "train"), dataset_of(options, "test")
    in_step = options.mode in ("local", "sync") and options.threads == 1
    meter = fleet.metrics.AUC()

    curve: list[str] = []  # samples seen, and the AUC of the last 20 batches before they were trained on

    def step(batch: Any) -> dict[str, Any]:
        batch = share(batch) if in_step else batch
        logits = model(batch)
        values = {"loss": loss_of(logits, batch), "auc": meter.update(logits, batch["label"])}
        if options.curve and len(batch["label"]):
            curve.append(f"{len(batch['label'])} {meter.compute()[1]:.5f}\n")
        return values

    files = parts(options.data, "train")
    data.set_filelist(files if in_step else fleet.util.get_file_shard(files))
    test.set_filelist(fleet.util.get_file_shard(parts(options.data, "test")))
    data.load_into_memory()
    for epoch in range(options.epochs):
        # All workers of a step must cut the same batches: one seed, one order. Otherwise each has its own samples.
        data.local_shuffle(options.seed + epoch) if in_step else data.global_shuffle(options.seed + epoch)
        meter.reset()
        watch = MetricsPrinter({"loss": "loss", "auc": "auc"}, period_secs=5)
        result = fleet.train_from_dataset(
            step, data, optimizer, thread=options.threads, print_period=options.print_period, fetch_handler=watch
        )
        print(f"epoch {epoch + 1}: {result.samples_per_s:,.0f} samples/s, AUC while training {meter.compute()[0]:.4f}")
        fleet.flush()
        fleet.barrier_worker()
        print(f"epoch {epoch + 1}: test AUC {evaluate(model, test):.6f}", flush=True)
        if options.curve and fleet.is_first_worker():
            Path(options.curve).write_text("".join(curve))
        if options.save and fleet.is_first_worker():
            fleet.save_persistables(options.save, extra={"log_scale": options.log_scale})
            print(f"epoch {epoch + 1}: saved to {options.save}")


def train_on_device(options: argparse.Namespace) -> None:
    """Rows and network in the memory of one device, in a collective job: no servers."""
    fleet.init(is_collective=True)
    model = fleet.distributed_model(CTRDNN(device=options.tables))
    optimizer = fleet.distributed_optimizer(optimizer_of(model, options))
    device = next(model.tower.parameters()).device
    data, test = dataset_of(options, "train"), dataset_of(options, "test")
    data.set_filelist(parts(options.data, "train"))
    test.set_filelist(parts(options.data, "test"))
    data.load_into_memory()
    for epoch in range(options.epochs):
        data.local_shuffle(options.seed + epoch)
        for read in data:
            batch = {name: values.to(device, non_blocking=True) for name, values in read.items()}
            loss_of(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        meter = fleet.metrics.AUC()
        with torch.no_grad():
            for read in test:
                batch = {name: values.to(device) for name, values in read.items()}
                meter.update(model(batch), batch["label"])
        print(f"epoch {epoch + 1}: test AUC {meter.compute()[0]:.6f}", flush=True)
    fleet.stop_worker()


def evaluate(model: torch.nn.Module, test: Any) -> float:
    """The AUC over all workers' test files; ids that were never trained on read as zeros."""
    meter = fleet.metrics.AUC()
    fleet.infer_from_dataset(lambda batch: {"auc": meter.update(model(batch), batch["label"])}, test, print_period=0)
    *_, positive, negative = meter.compute()[2]
    return fleet.metrics.auc(positive, negative)


def share(batch: Any) -> dict[str, torch.Tensor]:
    """This worker's rows of a batch that all workers have read."""
    return {name: values[fleet.worker_index() :: fleet.worker_num()] for name, values in batch.items()}


def dataset_of(options: argparse.Namespace, name: str) -> Any:
    kind = fleet.InMemoryDataset if name == "train" else fleet.QueueDataset
    dataset = kind()
    scaled = "--log_scale" if options.log_scale else "--no-log_scale"
    readers = {
        "fast": {"data_format": fleet.CriteoFormat(log_scale=options.log_scale)},
        "pipe": {"pipe_command": shlex.join([sys.executable, str(HERE / "reader.py"), scaled])},
        "generator": {"pipe_command": CriteoReader(options.log_scale)},
        "parquet": {"data_format": fleet.ParquetFormat()},
    }
    whole_batches = name == "train" and options.mode in ("local", "sync") and options.threads == 1
    size = options.batch_size if name == "train" else 4096
    dataset.init(size, options.reading_threads, slots(), drop_last=whole_batches, **readers[options.reader])
    return dataset


def optimizer_of(model: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    rows = {"row_rule": options.row_rule} if options.row_rule else {}
    groups: Iterator[Any] | list[Any] = [
        {"params": model.embedding.parameters(), "lr": options.embedding_lr, **rows},
        {"params": model.tower.parameters(), "lr": options.lr},
    ]
    return torch.optim.SGD(groups) if options.mode == "geo" else torch.optim.Adam(groups)


def strategy_of(options: argparse.Namespace) -> fleet.DistributedStrategy:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync = options.mode in ("async", "half_async", "geo", "hybrid") or options.threads > 1
    if options.mode in ("half_async", "hybrid"):
        strategy.a_sync_configs = {options.mode: True}
    elif options.mode == "geo":
        strategy.a_sync_configs = {"k_steps": options.k_steps}
    given = {name: getattr(options, name) for name in ("send_queue_size", "gather", "max_staleness", "quorum")}
    strategy.a_sync_configs |= {name: value for name, value in given.items() if value is not None}
    return strategy


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument(
        "--mode",
        default="local",
        choices=["local", "sync", "async", "half_async", "geo", "hybrid"],
        help="when gradients travel; all but local need fleetrun with servers",
    )
    parser.add_argument("--data", help="the folder that prepare.py made (default: ctr_data, generated if need be)")
    parser.add_argument(
        "--reader",
        default="fast",
        choices=["fast", "pipe", "generator", "parquet"],
        help="how rows are read: by the fast parser, a pipe, a generator in process, or from Parquet",
    )
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data")
    parser.add_argument("--batch_size", type=int, default=128, help="in sync mode: of all workers together")
    parser.add_argument("--threads", type=int, default=1, help="training threads")
    parser.add_argument("--reading_threads", type=int, default=1, help="threads that read files")
    parser.add_argument("--lr", type=float, help="of the network (default: 5e-4 for Adam, 0.05 for geo's SGD)")
    parser.add_argument("--embedding_lr", type=float, help="(default: 2e-4 for Adam, 5 for geo's SGD)")
    parser.add_argument(
        "--row_rule",
        choices=["sgd", "adagrad", "adam", "rowwise_adagrad", "ftrl", "rmsprop", "lion"],
        help="how servers update rows, with a rate of --embedding_lr (default: adam)",
    )
    parser.add_argument(
        "--row_dtype",
        default="float32",
        choices=["float32", "bfloat16", "float16", "int8", "int8-learned"],
        help="of rows on servers and in saves; int8-learned: with a step per row that is learned",
    )
    parser.add_argument(
        "--row_wire",
        choices=["float32", "bfloat16", "float16", "int8"],
        help="of rows and their gradients on the network (default: rows as stored, gradients float32)",
    )
    parser.add_argument("--table_memory", help="memory for rows on each server, such as 8GB; others are on disk")
    parser.add_argument("--table_path", default="rows", help="folder on each server's disk for --table_memory")
    parser.add_argument(
        "--tables",
        default="servers",
        choices=["servers", "cuda", "cpu"],
        help="where rows are: on servers, in GPU memory (one process), or the same on the CPU",
    )
    parser.add_argument("--k_steps", type=int, default=20, help="steps between two exchanges in geo mode")
    parser.add_argument("--send_queue_size", type=int, help="steps that may wait to be sent in async mode (default: 2)")
    parser.add_argument("--gather", type=int, help="pushes whose mean is one update, in async and half_async mode")
    parser.add_argument("--quorum", type=int, help="workers that a step of hybrid mode waits for (default: all)")
    parser.add_argument("--max_staleness", type=int, help="updates that the network may be old in async mode")
    parser.add_argument(
        "--log_scale",
        action=argparse.BooleanOptionalAction,
        help="numbers as log(1 + x) (default: yes; as a save or files of Parquet say)",
    )
    parser.add_argument("--print_period", type=int, default=100, help="batches between two lines of progress")
    parser.add_argument("--curve", help="a file for worker 0's sliding AUC: a line per step, with its batch size")
    parser.add_argument("--save", help="a folder to save the model to after every epoch")
    parser.add_argument("--init_model", help="a saved model to go on from")
    parser.add_argument("--seed", type=int, default=0, help="of first values and of the order of samples")
    options = parser.parse_args()
    check(options, parser)
    options.log_scale = log_scale_for(options)
    geo = options.mode == "geo"
    options.lr = options.lr if options.lr is not None else 0.05 if geo else 5e-4
    options.embedding_lr = options.embedding_lr if options.embedding_lr is not None else 5.0 if geo else 2e-4
    return options


def log_scale_for(options: argparse.Namespace) -> bool:
    """Whether numbers are read as log(1 + x). Ends the script if the command line, a save and files disagree."""
    found = options.log_scale
    if options.init_model:
        found = log_scale_of(options.init_model, found)
    if options.reader == "parquet":
        from to_parquet import log_scale_in  # imports pyarrow, an extra

        file = parts(options.data, "train")[0]
        written = log_scale_in(file)
        if written is None:
            raise SystemExit(f"{file} does not say how numbers were scaled: write it by to_parquet.py")
        if found is not None and found != written:
            raise SystemExit(f"{file} has log_scale={written}, and the command line or the save says {found}")
        found = written
    return True if found is None else bool(found)


def check(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options that do not fit together."""
    if options.send_queue_size is not None and options.mode != "async":
        parser.error("--send_queue_size is for --mode async")
    if options.max_staleness is not None and options.mode != "async":
        parser.error("--max_staleness is for --mode async")
    if options.gather is not None and options.mode not in ("async", "half_async"):
        parser.error("--gather is for --mode async and half_async")
    if options.quorum is not None and options.mode != "hybrid":
        parser.error("--quorum is for --mode hybrid")
    for name in ("mode", "threads", "save", "init_model", "table_memory", "row_dtype", "row_wire", "curve"):
        if options.tables != "servers" and getattr(options, name) != parser.get_default(name):
            parser.error(f"--{name} is for --tables servers")
    if options.mode in ("sync", "hybrid") and options.threads > 1:
        parser.error(f"--threads: in {options.mode} mode a worker makes one step at a time")
    if options.row_rule not in (None, "sgd") and options.mode == "geo":
        parser.error("--row_rule: geo training works with sgd only")
    if options.mode == "geo" and (options.row_dtype != "float32" or options.row_wire):
        parser.error("--row_dtype, --row_wire: geo training exchanges differences in float32")
    if options.epochs < 1 or options.batch_size < 1:
        parser.error("--epochs and --batch_size must be at least 1")


if __name__ == "__main__":
    main()
