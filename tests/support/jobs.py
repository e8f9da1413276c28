"""Whole jobs to test with: several workers of one job as threads of this process, their servers in it or behind
sockets; a model that uses every kind of lookup; and the same training in one process of plain torch.

A test describes a job by two functions, `make_model()` and `make_optimizer(model)`, and gives what a worker does as
a function of its `Part`. Models are made in the main thread, each worker's from another seed, so that a job in which
worker 0's first values do not reach everybody cannot pass.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support import processes
from support.paths import ROOT
from torch.nn import functional as F

from torchfleet.api import current_job
from torchfleet.api.job.ps_job import ParameterServerJob
from torchfleet.api.job.server_role import ServerRole
from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.base.role.role_info import SERVER, WORKER, RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.ps.net.transport import Channel, InProcess, InProcessChannel
from torchfleet.ps.net.wire import Command, Frame, Role, decode
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.sparse_table import SparseTable
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

torch.set_num_threads(1)

SECONDS = 60.0  # no wait in these tests is longer, on busy cores either
MAX_TABLE_BYTES = 1 << 26
MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "half_async": {"a_sync": True, "a_sync_configs": {"half_async": True}},
    "async": {"a_sync": True},
    "geo": {"a_sync": True, "a_sync_configs": {"k_steps": 1}},
    "hybrid": {"a_sync": True, "a_sync_configs": {"hybrid": True}},
}

Batch = dict[str, torch.Tensor]
MakeModel = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[torch.nn.Module], Any]  # an optimizer, or a list of several


def strategy(
    mode: str = "sync", rpc_timeout: float = SECONDS, sync_mean: str = "samples", **configs: Any
) -> DistributedStrategy:
    """The strategy of a mode, with `configs` among its a_sync_configs and waits that end within a test."""
    fields = {**MODES[mode], "sync_mean": sync_mean}
    fields["a_sync_configs"] = {**fields.get("a_sync_configs", {}), **configs}
    return DistributedStrategy(sync_timeout=SECONDS, rpc_timeout=rpc_timeout, **fields)


class CountingServer(Server):
    """A server that counts its requests by command."""

    def __init__(self, num_workers: int) -> None:
        super().__init__(MAX_TABLE_BYTES, num_workers)
        self.counts: Counter[str] = Counter()

    def handle(self, peer: Any, frames: Sequence[Frame], role: Role | None) -> Any:
        self.counts[Command(decode(frames).command).name] += 1
        return super().handle(peer, frames, role)


class GatedChannel(InProcessChannel):
    """A push waits at the gate, before it reaches the server."""

    gate: threading.Event

    def send(self, frames: Sequence[Frame]) -> bool:
        if decode(frames).command == Command.PUSH:
            assert self.gate.wait(SECONDS), "the gate stayed closed"
        return super().send(frames)


class GatedTransport(InProcess):
    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.gate = threading.Event()
        self.gate.set()

    def connect(self) -> GatedChannel:
        channel = GatedChannel(self)
        channel.gate = self.gate
        return channel


class Servers:
    """Servers in this process, shared by all workers of a job."""

    def __init__(self, num_servers: int = 1, num_workers: int = 1) -> None:
        self.servers = [CountingServer(num_workers) for _ in range(num_servers)]
        self._transports = [GatedTransport(server) for server in self.servers]

    def __len__(self) -> int:
        return len(self.servers)

    def make_tables(self, job: ParameterServerJob) -> None:
        """As ServerRole does before it serves; again for the same tables does no harm."""
        for index, server in enumerate(self.servers):
            for spec in job.plan.specs:
                server.state.add_table(spec.for_shard(index, job.info.num_servers))

    def connect(self) -> list[Channel]:
        return [transport.connect() for transport in self._transports]

    def hold_pushes(self) -> None:
        """From now on pushes wait in the thread that sends them."""
        for transport in self._transports:
            transport.gate.clear()

    def release_pushes(self) -> None:
        for transport in self._transports:
            transport.gate.set()

    def counts(self, command: str) -> list[int]:
        """Requests of one kind so far, per server."""
        return [server.counts[command] for server in self.servers]

    def table(self, name: str, server: int = 0) -> Any:
        """The table itself, as the server has it."""
        return next(table for table in self.servers[server].state.tables.values() if table.spec.name == name)

    def num_rows(self, name: str) -> int:
        return sum(self.table(name, server).stats()["rows"] for server in range(len(self)))

    def staleness(self, name: str, server: int = 0) -> dict[int, int]:
        return dict(self.table(name, server).stats()["staleness"])


class Worker(WorkerRole):
    """A worker whose servers are `servers`."""

    def __init__(self, job: ParameterServerJob, servers: Servers) -> None:
        self._servers = servers
        super().__init__(job)

    def _connect(self, worker: int | None = None) -> Client:
        role = Role.FIRST_WORKER if self.info.worker_index == 0 else Role.WORKER
        number = self.info.worker_index if worker is None else worker
        client = Client(self._servers.connect(), worker=number, role=role, patience=Patience(SECONDS, 2))
        for spec in self._plan.specs:
            client.attach(spec)
        return client


@dataclass
class Part:
    """One worker's side of a job."""

    index: int
    model: torch.nn.Module
    optimizer: Any
    job: ParameterServerJob
    worker: WorkerRole = field(init=False)

    def rows(self, table: str, ids: Iterable[int] | torch.Tensor) -> torch.Tensor:
        """What the servers hold; zeros where there is no row."""
        wanted = np.asarray(ids if isinstance(ids, torch.Tensor) else list(ids), np.int64)
        return torch.from_numpy(self.worker.client.pull(table, wanted, create=False).result())

    def flush(self) -> None:
        self.worker.communicator.flush()

    def barrier(self) -> None:
        self.worker.barrier()

    def stats(self) -> dict[str, Any]:
        return self.worker.stats()["worker"]

    def prefetch(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self.worker.engine.prefetch(loader)

    def step(self, batch: Batch) -> float:
        """One step of an ordinary loop."""
        loss = loss_of(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Turns:
    """Steps of workers that do not wait for each other, in one order: of worker 0, of worker 1 and so on, then the next
    step of each. A step begins when the gradients of the one before are applied. Its dense values are those of the
    worker's own last step, without what the others did since. So a job ends with the same numbers every time, whatever
    else the cores have to do. All workers make equally many steps."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers, self._turn, self._changed = num_workers, 0, threading.Condition()

    @contextlib.contextmanager
    def of(self, part: Part, end: Callable[[Part], None] | None = None) -> Iterator[None]:
        """Around one step. `end`: how its gradients are applied, if not by a flush."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._turn == part.index, SECONDS), "the worker before makes no step"
        yield
        (end or Part.flush)(part)
        with self._changed:
            self._turn = (self._turn + 1) % self._num_workers
            self._changed.notify_all()


def make_part(
    make_model: MakeModel, make_optimizer: MakeOptimizer, settings: DistributedStrategy, info: RoleInfo
) -> Part:
    """Model and optimizer, or a list of several, of one process, not connected yet."""
    torch.manual_seed(info.worker_index)
    job = ParameterServerJob(info, settings)
    model = job.distribute_model(make_model())
    made = make_optimizer(model)
    several = [job.distribute_optimizer(one) for one in made] if isinstance(made, list) else None
    return Part(info.worker_index, model, several or job.distribute_optimizer(made), job)


def roles(num_workers: int, num_servers: int) -> list[RoleInfo]:
    places = tuple(f"127.0.0.1:{port}" for port in range(1, num_servers + 1))  # never connected to
    # A busy machine may keep a thread from its signs of life for longer than the ten seconds that jobs wait by default.
    return [RoleInfo(WORKER, i, num_workers, 0, places, worker_timeout=SECONDS) for i in range(num_workers)]


@dataclass
class Run:
    """A job that has come to its end: what each worker returned, and what the servers hold."""

    parts: list[Part]
    results: list[Any]
    servers: Servers

    def rows(self, table: str, num: int) -> torch.Tensor:
        """Rows of the ids 0 to `num`."""
        client = Client(self.servers.connect())
        client.attach(self.parts[0].job.plan.sparse[table].spec)
        return torch.from_numpy(client.pull(table, np.arange(num), create=False).result())

    def values(self, **tables: int) -> dict[str, torch.Tensor]:
        """All dense parameters, as worker 0 has them, and the first rows of these tables."""
        dense = {name: value.detach().clone() for name, value in self.parts[0].model.named_parameters() if len(value)}
        return {**dense, **{name: self.rows(name, num) for name, num in tables.items()}}


def run(
    body: Callable[[Part], Any],
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    *,
    mode: str = "sync",
    num_workers: int = 1,
    num_servers: int = 1,
    servers: Servers | None = None,
    delays: Sequence[float] = (),
    **configs: Any,
) -> Run:
    """Run `body` in every worker, from init_worker (after its delay) to stop_worker."""
    shared = servers or Servers(num_servers, num_workers)
    parts = [
        make_part(make_model, make_optimizer, strategy(mode, **configs), info)
        for info in roles(num_workers, len(shared))
    ]

    shared.make_tables(parts[0].job)

    def work(index: int) -> Any:
        part = parts[index]
        time.sleep(delays[index] if delays else 0)
        part.worker = Worker(part.job, shared)
        result = body(part)
        part.worker.stop()
        return result

    return Run(parts, in_threads(work, num_workers), shared)


@contextlib.contextmanager
def one_worker(
    model: torch.nn.Module,
    make_optimizer: MakeOptimizer | None = None,
    *,
    mode: str = "sync",
    num_servers: int = 1,
    servers: Servers | None = None,
    **configs: Any,
) -> Iterator[Part]:
    """A worker in this thread. It is stopped at the end, unless the test failed."""
    shared = servers or Servers(num_servers)
    part = make_part(lambda: model, make_optimizer or sgd, strategy(mode, **configs), roles(1, len(shared))[0])
    shared.make_tables(part.job)
    had_group = dist.is_initialized()
    try:
        part.worker = Worker(part.job, shared)
        yield part
        part.worker.stop()
    finally:
        if dist.is_initialized() and not had_group:  # of hybrid mode, whose worker has failed
            dist.destroy_process_group()


def sgd(model: torch.nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def in_threads(work: Callable[[int], Any], num: int) -> list[Any]:
    """work(0) ... work(num - 1), all at once. The first error is raised at once; the others may still be waiting."""
    finished: queue.Queue[tuple[int, Any, BaseException | None]] = queue.Queue()

    def guarded(index: int) -> None:
        try:
            finished.put((index, work(index), None))
        except BaseException as error:  # handed on to the thread that waits
            finished.put((index, None, error))

    for index in range(num):
        threading.Thread(target=guarded, args=(index,), daemon=True).start()
    results: list[Any] = [None] * num
    deadline = time.monotonic() + 2 * SECONDS
    for _ in range(num):
        index, result, error = finished.get(timeout=max(0.1, deadline - time.monotonic()))
        if error is not None:
            raise error
        results[index] = result
    return results


def loaded_server(job: ParameterServerJob, dirname: str | None, var_names: list[str] | None = None) -> Server:
    """A server with the tables of a job and, if `dirname` is given, a saved model in them; it listens nowhere."""
    role = ServerRole(job)
    if dirname is not None:
        role.load(dirname, var_names)
    return role._server


class SocketServers:
    """The servers of a job as ServerRole runs them, in threads of this process, on loopback ports."""

    def __init__(self, make_model: MakeModel, make_optimizer: MakeOptimizer, num: int, num_workers: int) -> None:
        from torchfleet.launch.roles import free_ports

        self.endpoints = tuple(f"127.0.0.1:{port}" for port in free_ports(num))
        self._jobs, self._threads = [], []
        for index in range(num):
            info = RoleInfo(SERVER, 0, num_workers, index, self.endpoints)
            self._jobs.append(ServerRole(make_part(make_model, make_optimizer, strategy(), info).job))
            self._threads.append(threading.Thread(target=self._jobs[-1].run, daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        for job, thread in zip(self._jobs, self._threads, strict=True):
            job.end()
            if thread.ident is not None:
                thread.join(SECONDS)

    def is_over(self, seconds: float = SECONDS) -> bool:
        """They end by themselves when all workers have left."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def info(self, worker: int, num_workers: int) -> RoleInfo:
        return RoleInfo(WORKER, worker, num_workers, 0, self.endpoints)


@contextlib.contextmanager
def clean_facade() -> Iterator[None]:
    """torchfleet.api.current_job holds one job per process: whatever a test leaves there is taken away."""
    try:
        yield
    finally:
        current_job.current.job = None


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not so: {what}"
        time.sleep(0.002)


def command(arguments: Sequence[str], seconds: float) -> str:
    """The output of `python ARGUMENTS`, run from the root of the checkout; its whole group ends with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FLEET_", "PADDLE_"))}
    process = processes.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()  # fleetrun ends its children
        process.communicate(timeout=SECONDS)
        raise
    assert process.returncode == 0, output
    return output


# A model with every kind of lookup, and its training in plain torch

NUM_ITEMS, NUM_WORDS, NUM_TAGS = 40, 30, 20
TABLES = {"items": NUM_ITEMS, "words": NUM_WORDS, "tags": NUM_TAGS}


class Net(torch.nn.Module):
    """One row per id with a padding id; bags of equal length, averaged; bags given by offsets, summed; a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.items = torch.nn.Embedding(NUM_ITEMS, 4, padding_idx=0, sparse=True)
        self.words = torch.nn.EmbeddingBag(NUM_WORDS, 3, mode="mean", sparse=True)
        self.tags = torch.nn.EmbeddingBag(NUM_TAGS, 2, mode="sum", sparse=True)
        self.hidden = torch.nn.Linear(2 * 4 + 3 + 2 + 5, 6)
        self.out = torch.nn.Linear(6, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        parts = [
            self.items(batch["items"]).flatten(1),
            self.words(batch["words"]),
            self.tags(batch["tags"], batch["offsets"]),
            batch["x"],
        ]
        return self.out(torch.tanh(self.hidden(torch.cat(parts, dim=1)))).squeeze(1)


def loss_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return F.mse_loss(model(batch), batch["y"])


def make_batch(seed: int, size: int = 8) -> Batch:
    """Ids repeat within the batch; some bags are empty."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, size)
    batch = {
        "items": rng.integers(0, NUM_ITEMS // 2, (size, 2)),
        "words": rng.integers(0, NUM_WORDS, (size, 4)),
        "tags": rng.integers(0, NUM_TAGS, lengths.sum()),
        "offsets": np.cumsum(lengths) - lengths,
        "x": rng.normal(size=(size, 5)).astype(np.float32),
        "y": rng.normal(size=size).astype(np.float32),
    }
    return {name: torch.from_numpy(np.asarray(value)) for name, value in batch.items()}


def worker_batches(worker: int, num: int, size: int = 8) -> list[Batch]:
    return [make_batch(1000 * worker + i, size) for i in range(num)]


def combined(batches: Sequence[Batch]) -> Batch:
    """The workers' batches of one step as one batch."""
    shifts = np.cumsum([0, *(len(batch["tags"]) for batch in batches)])
    shifted = [
        {**batch, "offsets": batch["offsets"] + int(shift)} for batch, shift in zip(batches, shifts, strict=False)
    ]
    return {name: torch.cat([batch[name] for batch in shifted]) for name in batches[0]}


def split_parameters(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """(dense, sparse) parameters, of a plain or of a distributed model."""
    from torchfleet.nn import SparseEmbedding

    kinds = (torch.nn.Embedding, torch.nn.EmbeddingBag, SparseEmbedding)
    sparse = {
        id(module.weight) for module in model.modules() if isinstance(module, kinds) and getattr(module, "sparse", True)
    }
    parameters = list(model.parameters())
    return [p for p in parameters if id(p) not in sparse], [p for p in parameters if id(p) in sparse]


def plain_optimizers(rule: str, model: torch.nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    """torch's own: Adam has a class of its own for sparse gradients."""
    dense, sparse = split_parameters(model)
    if rule == "adam":
        made: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, **options)] if dense else []
        return [*made, torch.optim.SparseAdam(sparse, **options)] if sparse else made
    return [{"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad}[rule](model.parameters(), **options)]


def fleet_optimizer(rule: str, **options: Any) -> MakeOptimizer:
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[rule]
    return lambda model: kind(model.parameters(), **options)


def plain_step(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], batch: Batch) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A plain model's parameters, under the names that `Run.values` gives them."""
    sparse = {id(p) for p in split_parameters(model)[1]}
    named = model.named_parameters()
    return {name.removesuffix(".weight") if id(p) in sparse else name: p.detach() for name, p in named}


# A problem whose answer can be learned: clicks that depend on three ids and two numbers


class Clicks(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Embedding(90, 1, sparse=True)
        self.numbers = torch.nn.Linear(2, 1)
        torch.nn.init.zeros_(self.wide.weight)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.wide(batch["ids"]).sum(dim=(1, 2)) + self.numbers(batch["x"]).squeeze(1)


def clicks(seed: int, num: int) -> Batch:
    """The effects of ids and numbers are the same for all seeds."""
    effects = np.random.default_rng(99).normal(size=90)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 30, (num, 3)) + np.array([0, 30, 60])
    x = rng.normal(size=(num, 2))
    clicked = rng.random(num) < 1 / (1 + np.exp(-effects[ids].sum(axis=1) - x @ [0.5, -1.0]))
    return {
        "ids": torch.from_numpy(ids),
        "x": torch.from_numpy(x.astype(np.float32)),
        "y": torch.from_numpy(clicked.astype(np.float32)),
    }


def click_batches(seed: int, num: int, size: int = 50) -> list[Batch]:
    rows = clicks(seed, num * size)
    return [{name: value[i * size : (i + 1) * size] for name, value in rows.items()} for i in range(num)]


def click_loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    return F.binary_cross_entropy_with_logits(model(batch), batch["y"])


def click_step(model: torch.nn.Module, optimizers: Sequence[Any], batch: Batch) -> None:
    click_loss(model, batch).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def click_scores(model: torch.nn.Module) -> tuple[float, float]:
    """(loss, AUC) on 4,000 held-out rows."""
    rows = clicks(12345, 4000)
    model.eval()
    with torch.no_grad():
        logits = model(rows)
    model.train()
    loss = F.binary_cross_entropy_with_logits(logits, rows["y"]).item()
    ranks = logits.double().argsort().argsort().double() + 1  # hardly any ties: the numbers are continuous
    positive = rows["y"] > 0
    num = int(positive.sum())
    return loss, float((ranks[positive].sum() - num * (num + 1) / 2) / (num * (len(ranks) - num)))


def first_rows(part: Part, table: str, ids: Iterable[int]) -> torch.Tensor:
    """What new rows of a table start with, worked out without any server."""
    spec = part.job.plan.sparse[table].spec
    return torch.from_numpy(SparseTable(spec, MAX_TABLE_BYTES).pull(np.asarray(list(ids), np.int64).view(np.uint64)))


def assert_equal_values(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0
) -> None:
    """All parameters, each to `tolerance` times its largest number, or times 0.1 where that is less (a single bias may
    happen to be near zero; weights of a layer are about 0.1). Tolerance 0: to the bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name] - value).abs().max().item()
        scale = max(0.1, value.abs().max().item())
        assert found[name].shape == value.shape, name
        assert error <= tolerance * scale, f"{name} is off by {error:.3g}, at a scale of {scale:.3g}"
