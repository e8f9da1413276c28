"""Narrower rows: what they cost in AUC, and what they save in memory, on the network and in time.

python -m benchmarks.row_dtypes --json                    all parts; the Criteo rows of ../shared/data where they are
python -m benchmarks.row_dtypes --only auc --dtypes bfloat16 --json    one part, one type beside float32
python -m benchmarks.row_dtypes --only link --json        a link held at 1 Gbit/s by tc; needs root
python -m benchmarks.row_dtypes --quick --json            small, to see that it works

auc: CTR-DNN of examples/ctr_dnn in one process, two epochs, three seeds; `auc_difference` is that of the mean to
float32. speed: training in one process, 26 ids x dim 16 summed, batch 4096, Zipf 1.15, row-wise Adagrad, types in
turns; bytes per row are those of the table, map included. wire: bytes of all messages of the same batches, per sample.
link: the same batches by a worker and a server whose link is held at --rate.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import torchfleet as fleet
from benchmarks.links import LinkError
from benchmarks.row_dtypes_link import BATCH, DIM, SLOTS, on_link, steps, zipf_batches
from benchmarks.timing import interleave, log, report
from examples.ctr_dnn.model import CTRDNN, loss_of, slots
from torchfleet.ps.net.transport import InProcess, InProcessChannel
from torchfleet.ps.net.wire import Frame
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.worker.client.client import Client

ROOT = Path(__file__).parent.parent
CRITEO = ROOT.parent / "shared" / "data" / "criteo" / "kaggle.txt.xz"
EXAMPLE = ROOT / "examples" / "ctr_dnn"
DTYPES = ("float32", "bfloat16", "float16", "int8", "int8-learned")
PARTS = ("auc", "speed", "wire", "link")
# rows as stored and gradients of float32; and both in the table's type
WIRES = {"as stored": False, "both ways": True}

Figures = dict[str, Any]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.row_dtypes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES, help="beside float32")
    parser.add_argument("--data", help="the folder that examples/ctr_dnn/prepare.py made")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--row_rule", default="rowwise_adagrad", help="of the part auc (default: %(default)s)")
    parser.add_argument("--embedding_lr", type=float, default=0.002, help="of the part auc (default: %(default)s)")
    parser.add_argument("--num_ids", type=int, default=1_000_000)
    parser.add_argument("--num_batches", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s of the link (default: %(default)s)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args(arguments)
    chosen.dtypes = ["float32", *(dtype for dtype in chosen.dtypes if dtype != "float32")]
    if chosen.quick:
        chosen.seeds, chosen.epochs, chosen.num_ids, chosen.num_batches, chosen.rounds = 1, 1, 20_000, 3, 1
    if min(chosen.seeds, chosen.epochs, chosen.num_batches, chosen.rounds) < 1 or chosen.num_ids < 1000:
        parser.error("--seeds, --epochs, --num_batches and --rounds must be at least 1, --num_ids at least 1000")
    return chosen


def settings_of(dtype: str, both_ways: bool = False) -> dict[str, Any]:
    """As SparseEmbedding takes them."""
    name, _, step = dtype.partition("-")
    return {"dtype": name, "step": step or None, "wire": name if both_ways else None}


def spec_of(dtype: str, both_ways: bool) -> TableSpec:
    given = {name: value for name, value in settings_of(dtype, both_ways).items() if value is not None}
    rule, first = Rule("rowwise_adagrad", lr=0.01), Initializer("uniform", -0.01, 0.01)
    return TableSpec("rows", dim=DIM, rule=rule, initializer=first, format=RowFormat(**given))


def measure_auc(chosen: argparse.Namespace) -> Figures:
    """Test AUC by type and seed."""
    found: dict[str, list[float]] = {dtype: [] for dtype in chosen.dtypes}
    speed: dict[str, list[float]] = {dtype: [] for dtype in chosen.dtypes}
    with tempfile.TemporaryDirectory() as folder:
        data = chosen.data or prepared(Path(folder) / "data", chosen.quick)
        samples = {name: Samples(data, name) for name in ("train", "test")}
    for seed in range(chosen.seeds):
        for dtype in chosen.dtypes:
            auc, rate = trained(chosen, samples, dtype, seed)
            found[dtype].append(round(auc, 6))
            speed[dtype].append(rate)
            log(f"  seed {seed}, {dtype}: AUC {auc:.6f}, {rate:,.0f} samples/s")
    mean = fmean(found["float32"])
    return {
        "auc": found,
        "auc_difference": {dtype: round(fmean(values) - mean, 6) for dtype, values in found.items()},
        "ctr_samples_per_s": {dtype: round(fmean(values)) for dtype, values in speed.items()},
        "is_real_data": chosen.data is None and CRITEO.exists() and not chosen.quick,
    }


def prepared(folder: Path, is_quick: bool) -> str:
    """The Criteo rows, or generated ones of the same shape."""
    what = ["--data", str(CRITEO)] if CRITEO.exists() and not is_quick else ["--rows", "3000" if is_quick else "24000"]
    command = [sys.executable, str(EXAMPLE / "prepare.py"), *what, "--out", str(folder)]
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return str(folder)


class Samples:
    """All samples of a folder in memory."""

    def __init__(self, data: str, name: str) -> None:
        files = sorted(str(path) for path in (Path(data) / name).glob("part-*"))
        how = fleet.CriteoFormat(log_scale=True)
        batches = list(fleet.data.FileBatches(files, batch_size=1 << 16, use_var=slots(), data_format=how))
        self._all = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
        self.labels = self._all["label"].view(-1)

    def batches(self, size: int, order: torch.Tensor | None = None) -> Iterator[dict[str, torch.Tensor]]:
        places = torch.arange(len(self.labels)) if order is None else order
        for some in torch.split(places, size):
            yield {key: values[some] for key, values in self._all.items()}


def trained(chosen: argparse.Namespace, samples: dict[str, Samples], dtype: str, seed: int) -> tuple[float, float]:
    """(test AUC after the last epoch, samples/s of all epochs), as examples/ctr_dnn/train.py in one process."""
    torch.manual_seed(seed)
    fleet.reset()
    fleet.init()
    model: Any = fleet.distributed_model(CTRDNN(**settings_of(dtype), seed=seed))
    rows = {"params": model.embedding.parameters(), "lr": chosen.embedding_lr, "row_rule": chosen.row_rule}
    groups = [rows, {"params": model.tower.parameters(), "lr": 5e-4}]
    optimizer = fleet.distributed_optimizer(torch.optim.Adam(groups))
    fleet.init_worker()
    orders = [torch.randperm(len(samples["train"].labels)) for _ in range(chosen.epochs)]
    start = time.perf_counter()
    for order in orders:
        for batch in samples["train"].batches(128, order):
            torch.autograd.backward(loss_of(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
    rate = chosen.epochs * len(orders[0]) / (time.perf_counter() - start)
    model.eval()
    with torch.no_grad():
        logits = torch.cat([model(batch) for batch in samples["test"].batches(4096)])
    fleet.stop_worker()
    fleet.reset()
    return exact_auc((logits[:, 1] - logits[:, 0]).numpy(), samples["test"].labels.numpy()), rate


def exact_auc(scores: npt.NDArray[Any], labels: npt.NDArray[Any]) -> float:
    """The share of pairs of a click and another sample that are in the right order; equal scores count half."""
    places, counts = np.unique(scores, return_inverse=True, return_counts=True)[1:]
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    num = int(labels.sum())
    return float((ranks[labels > 0].sum() - num * (num + 1) / 2) / (num * (len(labels) - num)))


class Bags(torch.nn.Module):
    """A row for each bag of ids: their sum."""

    def __init__(self, **rows: Any) -> None:
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(DIM, name="rows", initializer=fleet.nn.Uniform(-0.01, 0.01), **rows)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.rows(ids, offsets)  # type: ignore[no-any-return]


@contextlib.contextmanager
def job(dtype: str) -> Iterator[Callable[[list[torch.Tensor], torch.Tensor], None]]:
    """A step per batch in one process. The gradient of a batch's rows is given."""
    fleet.reset()
    fleet.init()
    model = fleet.distributed_model(Bags(**settings_of(dtype)))
    optimizer = fleet.distributed_optimizer(fleet.optim.RowWiseAdagrad(model.parameters(), lr=0.01))
    fleet.init_worker()
    offsets = torch.arange(0, BATCH * SLOTS, SLOTS)

    def train(data: list[torch.Tensor], grad: torch.Tensor) -> None:
        for ids in data:
            model(ids, offsets).backward(grad)
            optimizer.step()
            optimizer.zero_grad()

    try:
        yield train
    finally:
        fleet.stop_worker()
        fleet.reset()


def measure_speed(chosen: argparse.Namespace) -> Figures:
    data = [torch.from_numpy(ids) for ids in zipf_batches(chosen.num_ids, chosen.num_batches)]
    grad = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(0)) / BATCH
    sizes: dict[str, float] = {}

    def timed(dtype: str) -> float:
        with job(dtype) as train:
            train(data, grad)  # rows are made
            start = time.perf_counter()
            train(data, grad)
            seconds = time.perf_counter() - start
            table = fleet.stats()["servers"][0]["tables"]["rows"]
            sizes[dtype] = round(table["bytes"] / table["rows"], 1)
        return BATCH * len(data) / seconds

    found = interleave(chosen.rounds, {dtype: partial(timed, dtype) for dtype in chosen.dtypes})
    return {
        "samples_per_s": {dtype: round(value) for dtype, value in found.items()},
        "bytes_per_row": sizes,
        "stored_bytes": {dtype: 4 * spec_of(dtype, False).stored_words for dtype in chosen.dtypes},
    }


class CountingChannel(InProcessChannel):
    """Counts the bytes of all frames."""

    num_sent = num_received = 0

    def send(self, frames: Sequence[Frame]) -> bool:
        self.num_sent += sum(memoryview(frame).nbytes for frame in frames)
        return super().send(frames)

    def deliver(self, frames: Sequence[Frame]) -> None:
        self.num_received += sum(memoryview(frame).nbytes for frame in frames)
        super().deliver(frames)


def measure_wire(chosen: argparse.Namespace) -> Figures:
    data = [np.unique(ids) for ids in zipf_batches(chosen.num_ids, chosen.num_batches)]
    figures: dict[str, dict[str, float]] = {"pulled": {}, "pushed": {}}
    for dtype in chosen.dtypes:
        for name, both_ways in WIRES.items():
            channel = CountingChannel(InProcess(Server(1 << 30)))
            client = Client([channel])
            client.create_table(spec_of(dtype, both_ways))
            channel.num_sent = channel.num_received = 0
            num = sum(steps(client, [ids]) for ids in data)
            figures["pulled"][f"{dtype}, {name}"] = round(channel.num_received / num, 1)
            figures["pushed"][f"{dtype}, {name}"] = round(channel.num_sent / num, 1)
    return {"wire_bytes_per_sample": figures}


def measure_link(chosen: argparse.Namespace) -> Figures:
    """Samples/s and bytes per sample through a link of --rate; skipped, with the reason, where none can be made."""
    specs = {f"{dtype}, {name}": spec_of(dtype, both) for dtype in chosen.dtypes for name, both in WIRES.items()}
    specs.pop("float32, both ways")
    try:
        return {"link": on_link(chosen, specs), "link_mbit_per_s": chosen.rate}
    except LinkError as error:
        log(f"without the part link: {error}")
        return {"link": None, "why_no_link": str(error)}


def main() -> None:
    chosen = options()
    parts = {"auc": measure_auc, "speed": measure_speed, "wire": measure_wire, "link": measure_link}
    result: Figures = {"seeds": chosen.seeds, "row_rule": chosen.row_rule, "threads": torch.get_num_threads()}
    for name, measure in parts.items():
        if chosen.only in (None, name):
            log(f"{name}:")
            result |= measure(chosen)
    report(result, chosen.json)


if __name__ == "__main__":
    main()
