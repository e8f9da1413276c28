"""What a pull and a push cost a server in processor time: in its process, and behind sockets with few or many clients.

python -m benchmarks.server --json            1 and 8 clients; half a minute
python -m benchmarks.server --quick --json    smaller, to see that it works

Processor time says more than speed on a machine that does other things too. The roof is the kernels alone, called on
the same table. Linux only: the times of threads come from /proc.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.timing import log, report
from torchfleet.ps.kernels.merge import unique
from torchfleet.ps.net.wire import VERSIONS, Array, Command, Frame, Message, Role, encode, pack
from torchfleet.ps.server.job.process import ServerProcess
from torchfleet.ps.server.job.warm import warm_up
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import Initializer, Rule, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

Batch = tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]  # distinct keys, and gradients for them
_RATES = Array(0, np.array([[np.nan, 1.0]]))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.server", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("batch", 4096), ("slots", 26), ("dim", 16), ("num_ids", 2_000_000), ("num_batches", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--clients", default="1,8", help="numbers of clients, separated by commas")
    parser.add_argument("--steps", type=int, default=200, help="pulls and pushes of one measurement")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.num_ids, chosen.num_batches, chosen.steps = 100_000, 5, 20
    return chosen


def batches(chosen: argparse.Namespace) -> list[Batch]:
    rng = np.random.default_rng(1)
    cumulative = np.cumsum(1.0 / np.arange(1, chosen.num_ids + 1) ** 1.15)
    names = rng.permutation(chosen.num_ids).astype(np.uint64)
    made = []
    for _ in range(chosen.num_batches):
        ranks = np.searchsorted(cumulative, rng.random(chosen.batch * chosen.slots) * cumulative[-1])
        keys = unique(names[ranks])[0].copy()
        made.append((keys, rng.standard_normal((len(keys), chosen.dim), np.float32)))
    return made


class Caller:
    """One client's requests as frames, numbered as a client numbers them."""

    def __init__(self, number: int, spec: TableSpec) -> None:
        self._number, self._table, self._calls = number, spec.number, itertools.count(1)
        self.create = self._frames(Command.CREATE_TABLE, [pack(spec)])

    def pull(self, batch: Batch) -> list[Frame]:
        return self._frames(Command.PULL, [Array(self._table, batch[0])], VERSIONS)

    def push(self, batch: Batch) -> list[Frame]:
        return self._frames(Command.PUSH, [_RATES, *(Array(self._table, array) for array in batch)])

    def _frames(self, command: Command, arrays: list[Array], flags: int = 0) -> list[Frame]:
        call = next(self._calls)
        return encode(Message(command, Role.LAUNCHER, flags, 0, self._number, call, call, call, arrays))


def cpu_ms(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return 1000 * (time.thread_time() - start)


def in_process(spec: TableSpec, data: list[Batch], steps: int) -> dict[str, float]:
    """Medians of milliseconds, through Server.handle; and of the kernels that it calls."""
    warm_up()
    server, caller = Server(1 << 32), Caller(1, spec)
    server.handle(0, caller.create, None)
    times: dict[str, list[float]] = {name: [] for name in ("pull", "push", "kernels_pull", "kernels_push")}
    for step in range(len(data) + steps):
        pull, push = caller.pull(data[step % len(data)]), caller.push(data[step % len(data)])
        taken = [cpu_ms(partial(server.handle, 0, frames, None)) for frames in (pull, push)]
        if step >= len(data):  # every row is there
            times["pull"].append(taken[0])
            times["push"].append(taken[1])
            for name, kernel in _kernels(server.state.tables[spec.number], data[step % len(data)]):
                times[name].append(cpu_ms(kernel))
    return {f"{name}_ms": statistics.median(found) for name, found in times.items()}


def _kernels(table: Any, batch: Batch) -> Iterator[tuple[str, Callable[[], Any]]]:
    assert isinstance(table, SparseTable)
    keys, grads = batch
    at, out = np.empty(len(keys), np.int64), np.empty(grads.shape, np.float32)
    index: Any = table.index
    layout = index.width, index.offset
    rule = table.spec.rule
    yield "kernels_pull", lambda: index.read(keys, at, out)
    yield "kernels_push", lambda: rule.row_rule.apply_to_rows(rule, index.store, layout, at, grads, 1e-3, 9)


def behind_sockets(spec: TableSpec, data: list[Batch], steps: int, num_clients: int) -> dict[str, float]:
    """Per pull and push: milliseconds of the server's loop, of its other threads, and page faults."""
    with ServerProcess() as server, zmq.Context() as context:
        clients = []
        for number in range(num_clients):
            connection = context.socket(zmq.DEALER)
            connection.set(zmq.LINGER, 0)
            connection.set(zmq.RCVTIMEO, 60_000)
            connection.connect(server.endpoint)
            clients.append((connection, Caller(100 + number, spec)))
        clients[0][0].send_multipart(clients[0][1].create)
        clients[0][0].recv_multipart()
        _ask(clients, data, len(data))
        before = _threads(server.pid)
        _ask(clients, data, steps)
        after = _threads(server.pid)
        for connection, _ in clients:
            connection.close()
    spent = {thread: [now - then for now, then in zip(after[thread], before[thread], strict=True)] for thread in before}
    others = [values for thread, values in spent.items() if thread != server.pid]
    return {
        "loop_ms": spent[server.pid][0] / steps,
        "other_threads_ms": sum(values[0] for values in others) / steps,
        "page_faults": sum(values[1] for values in spent.values()) / steps,
    }


def _ask(clients: list[tuple[Any, Caller]], data: list[Batch], steps: int) -> None:
    """Pulls and pushes of all clients in turns, at least two steps under way."""
    under_way: deque[Any] = deque()
    for step in range(steps):
        connection, caller = clients[step % len(clients)]
        for frames in (caller.pull(data[step % len(data)]), caller.push(data[step % len(data)])):
            connection.send_multipart(frames, copy=False)
        under_way.append(connection)
        if len(under_way) >= max(2, len(clients)):
            _take(under_way.popleft())
    while under_way:
        _take(under_way.popleft())


def _take(connection: Any) -> None:
    for _ in range(2):
        connection.recv_multipart(copy=False)


def _threads(pid: int) -> dict[int, tuple[float, int]]:
    """(milliseconds computed, page faults) by thread."""
    found = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        computed = int((folder / "schedstat").read_text().split()[0]) / 1e6
        found[int(folder.name)] = (computed, int(fields[7]))
    return found


def main() -> None:
    chosen = options()
    data = batches(chosen)
    spec = TableSpec("rows", dim=chosen.dim, rule=Rule("adam"), initializer=Initializer("uniform", -0.01, 0.01))
    result: dict[str, Any] = {"keys": float(np.mean([len(keys) for keys, _ in data]))}
    result |= in_process(spec, data, chosen.steps)
    log(f"  in process: pull {result['pull_ms']:.2f} ms, push {result['push_ms']:.2f} ms")
    for num_clients in map(int, chosen.clients.split(",")):
        found = behind_sockets(spec, data, chosen.steps, num_clients)
        log(f"  {num_clients} clients: " + ", ".join(f"{name} {value:.2f}" for name, value in found.items()))
        result |= {f"{name}_{num_clients}_clients": value for name, value in found.items()}
    report(result, chosen.json)


if __name__ == "__main__":
    main()
