"""A hybrid job that tests start: it trains on batches made up from seeds, and writes down what every process did.

Of a worker, to worker-N.npz: per step the rows that it looked up; the network before and after. To push-N-R-P.npz:
what it pushes as number P, before it does, after R restarts. Of the server, to server.npz: worker and client of every
push in their order, and all rows at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchfleet as fleet
from torchfleet.ps.net.wire import Command, decode
from torchfleet.ps.server.server import Server

NUM_IDS, DIM, STEPS, BATCH = 30, 4, 6, 8


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = fleet.nn.SparseEmbedding(DIM, name="items")
        self.tower = torch.nn.Sequential(torch.nn.Linear(2 * DIM, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.rows = self.items(ids)
        return self.tower(self.rows.flatten(1)).squeeze(1)


def batches(worker: int, num: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    made = []
    for step in range(num):
        rng = np.random.default_rng(1000 * worker + step)
        ids, y = rng.integers(0, NUM_IDS, (BATCH, 2)), rng.normal(size=BATCH).astype(np.float32)
        made.append((torch.from_numpy(ids), torch.from_numpy(y)))
    return made


def make_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "rmsprop":
        groups = [{"params": model.tower.parameters()}, {"params": model.items.parameters(), "row_rule": "adagrad"}]
        return torch.optim.RMSprop(groups, lr=0.05)
    made = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[kind]
    return made(model.parameters(), lr=0.05)


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    fleet.init()
    model = fleet.distributed_model(Model().to(options.device))
    settings = {"a_sync": True, "a_sync_configs": {"hybrid": True}, "sync_timeout": 60.0, **options.settings}
    strategy = fleet.DistributedStrategy(**settings)
    optimizer = fleet.distributed_optimizer(make_optimizer(options.optimizer, model), strategy)
    if fleet.is_server():
        serve(options)
        return
    trained, again = Path(options.out) / "worker-0.npz", Path(options.out) / "again"
    if options.one_by_one and num_restarts():
        wait_for(trained)
    fleet.init_worker(options.load)
    if num_restarts():
        print(f"worker {fleet.worker_index()} starts again with {model.tower[0].weight.sum().item():.6f}", flush=True)
        again.touch()
    train(model, optimizer, options)
    if options.one_by_one:
        wait_for(again)
    if options.save and fleet.is_first_worker():
        fleet.save_persistables(options.save)
    fleet.barrier_worker()
    fleet.stop_worker()


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


def train(model: Any, optimizer: Any, options: argparse.Namespace) -> None:
    worker = fleet.worker_index()
    notes: dict[str, Any] = {f"before.{name}": value for name, value in network(model).items()}
    pushed = record_pushes(worker, options.out)
    for step, (ids, y) in enumerate(loop(options, batches(worker, options.steps + options.more * worker))):
        output = by_parts(model, ids) if options.parts else model(ids)
        loss = (output - y.to(options.device)).square().mean()
        notes[f"rows.{step}"] = model.rows.detach().cpu().numpy().copy()
        loss.backward()
        if worker == options.die and step == 2 and not num_restarts():
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
    fleet.flush()
    notes.update({f"after.{name}": value for name, value in network(model).items()})
    print(f"worker {worker} made {step + 1} steps, pushed {len(pushed)}", flush=True)
    np.savez(Path(options.out) / f"worker-{worker}.npz", **notes)


def by_parts(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The same as a call of the model, in two calls of its modules."""
    model.rows = model.items(ids)
    return model.tower(model.rows.flatten(1)).squeeze(1)


def loop(options: argparse.Namespace, made: list[Any]) -> Iterator[Any]:
    return iter(made) if options.no_prefetch else fleet.prefetch(made)


def network(model: Any) -> dict[str, Any]:
    return {name: value.detach().cpu().numpy().copy() for name, value in model.tower.named_parameters()}


def num_restarts() -> int:
    return int(os.environ.get("FLEET_RESTART", "0"))


def record_pushes(worker: int, folder: str) -> list[Path]:
    """The files of what is handed over from now on."""
    from torchfleet.api import current_job

    communicator = current_job.get_worker().communicator
    step, pushed = communicator.step, []

    def recording(gradients: Any) -> None:
        keys, grads = gradients.sparse["items"]
        pushed.append(Path(folder) / f"push-{worker}-{num_restarts()}-{len(pushed)}.npz")
        np.savez(pushed[-1], keys=keys, grads=grads)
        step(gradients)

    communicator.step = recording  # type: ignore[method-assign]
    return pushed


def serve(options: argparse.Namespace) -> None:
    order: list[tuple[int, int]] = []
    kept: list[Server] = []
    handle = Server.handle

    def recording(self: Server, peer: Any, frames: Any, role: Any) -> Any:
        kept[:] = [self]
        message = decode(frames)
        if message.command == Command.PUSH:
            order.append((message.worker, message.client))
        return handle(self, peer, frames, role)

    Server.handle = recording  # type: ignore[method-assign]
    fleet.init_server(options.load)
    fleet.run_server()
    table = next(t for t in kept[0].state.tables.values() if t.spec.name == "items")
    rows = table.pull(np.arange(NUM_IDS, dtype=np.uint64), False, None)
    np.savez(Path(options.out) / "server.npz", order=np.array(order, np.uint64), rows=rows)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="the folder to write to")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--device", default="cpu", help="of the network")
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--more", type=int, default=0, help="batches that worker 1 has more than worker 0")
    parser.add_argument("--parts", action="store_true", help="call the model's modules instead of the model")
    parser.add_argument("--no_prefetch", action="store_true")
    parser.add_argument("--die", type=int, default=-1, help="the worker that is killed at its third step, once")
    parser.add_argument(
        "--one_by_one", action="store_true", help="a worker that was started again begins when worker 0 has trained"
    )
    parser.add_argument("--save")
    parser.add_argument("--load")
    return parser.parse_args()


if __name__ == "__main__":
    import without_compiler  # noqa: F401

    main()
