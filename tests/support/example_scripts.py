"""Scripts of examples/, run in this process or by a fleet, and their training in one process of plain torch."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from support import jobs
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun
from torch.nn import functional as F

from examples.columns import Batches, Columns
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding

WORKERS = 2


def printed(script: str, *arguments: object) -> str:
    """What a script below examples/ prints, run in this process."""
    out, before, paths = io.StringIO(), sys.argv, list(sys.path)
    sys.argv = [script, *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(out), jobs.clean_facade():
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before, paths
    return out.getvalue()


def by_a_fleet(log_dir: Path, script: str, *arguments: object) -> str:
    """What worker 0 prints, of a job of two servers and two workers."""
    roles = ["--server_num", "2", "--worker_num", str(WORKERS)]
    command = [*roles, str(ROOT / "examples" / script), *map(str, arguments)]
    with forked_fleetrun(log_dir, *command, FLEET_WORKER_TIMEOUT="60") as job:
        assert job.wait() == 0, job.output
    return (log_dir / "latest" / "workerlog.0").read_text()


def number(pattern: str, output: str) -> float:
    found = re.search(pattern, output)
    assert found, output
    return float(found[1])


class KnownRows(torch.nn.Module):
    """An embedding of torch's for these ids alone, in the place of a SparseEmbedding with the same first values."""

    def __init__(self, ids: np.ndarray, rows: np.ndarray) -> None:
        super().__init__()
        self.ids = torch.from_numpy(ids)
        self.embedding = torch.nn.Embedding.from_pretrained(torch.from_numpy(rows), freeze=False, sparse=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding(torch.searchsorted(self.ids, ids))
        return found


def plain(make_model: Callable[[], torch.nn.Module], ids: torch.Tensor, seed: int = 0) -> torch.nn.Module:
    """The model with torch's embeddings for these ids; their first values are worked out without any server."""
    known, part = ids.unique().numpy(), jobs.make_part(make_model, jobs.sgd, jobs.strategy(), jobs.roles(1, 1)[0])
    torch.manual_seed(seed)
    model = make_model()
    for name, module in list(model.named_children()):
        if isinstance(module, SparseEmbedding):
            table = SparseTable(part.job.plan.sparse[name].spec, 1 << 30)
            setattr(model, name, KnownRows(known, np.array(table.pull(known.view(np.uint64)))))
    return model


def click_loss(model: torch.nn.Module, batch: Columns) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch["label"])


def train_plain(
    model: torch.nn.Module,
    loss_of: Callable[[torch.nn.Module, Columns], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    columns: Columns,
    batch_size: int,
    seed: int = 0,
) -> None:
    """One pass in one process: a step is made with the mean of the workers' losses."""
    own = [Batches(columns, batch_size, worker, WORKERS, seed) for worker in range(WORKERS)]
    for together in zip(*own, strict=True):
        optimizer.zero_grad()
        torch.stack([loss_of(model, batch) for batch in together]).mean().backward()
        optimizer.step()
    model.eval()


def assert_trained_as_by_torch(
    make_model: Callable[[], torch.nn.Module],
    loss_of: Callable[[torch.nn.Module, Columns], torch.Tensor],
    columns: Columns,
    lr: float,
    batch_size: int,
    tables: Sequence[str],
) -> None:
    """Two workers in sync mode, threads of this process, with two servers: what plain torch makes of the same batches.

    By SGD: Adagrad would blow up the rounding of gradients near zero, which it divides by their size.
    """

    def work(part: jobs.Part) -> None:
        for batch in Batches(columns, batch_size, part.index, WORKERS, seed=0):
            loss_of(part.model, batch).backward()
            part.optimizer.step()
            part.optimizer.zero_grad()

    torch.manual_seed(0)
    model = make_model()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    train_plain(model, loss_of, jobs.sgd(model, lr), columns, batch_size)
    expected = {name: value.detach() for name, value in model.named_parameters()}
    for name, value in expected.items():
        assert (value - before[name]).abs().max() > 1e-4, (
            f"{name} has hardly learned: the comparison would tell nothing"
        )
    run = jobs.run(work, make_model, lambda made: jobs.sgd(made, lr), num_workers=WORKERS, num_servers=2)
    sizes = {name: len(expected[f"{name}.weight"]) for name in tables}
    found = {f"{name}.weight" if name in tables else name: value for name, value in run.values(**sizes).items()}
    jobs.assert_equal_values(found, expected, 1e-6)
