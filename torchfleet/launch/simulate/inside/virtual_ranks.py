"""torch.distributed in a simulated process: a process group and a store whose operations take virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import message_seconds
from torchfleet.launch.simulate.inside.actors import NEVER, Mailbox, Schedule
from torchfleet.launch.simulate.packets import COORDINATOR
from torchfleet.launch.simulate.rank_meetings import Question, Visit

BACKEND = "sim"
VARIABLE = "FLEET_DIST_BACKEND"  # selects the backend of a job
_FIRST_BOX = 1 << 20  # above the mailboxes of channels
_boxes = itertools.count(_FIRST_BOX)
_torch: Any = dist  # its stubs lack some names, and do not allow these classes as bases


class VirtualRanks:
    """Replaces every backend by the virtual one. `waited` receives the seconds that training waited for other ranks."""

    def __init__(self, schedule: Schedule, waited: Callable[[float], None]) -> None:
        self._schedule, self._waited = schedule, waited
        self._stores: list[VirtualStore] = []  # torch keeps only the C++ part of an object alive

    def install(self, rank: int, size: int) -> None:
        """Make all process groups of this process virtual from now on, whatever backend they request."""
        dist.Backend.register_backend(BACKEND, self._group, extended_api=True, devices=["cpu"])
        really_init = dist.init_process_group

        def init_process_group(backend: str | None = None, init_method: str | None = None, **options: Any) -> None:
            options = {"rank": rank, "world_size": size, **{k: v for k, v in options.items() if v not in (-1, None)}}
            really_init(BACKEND, **{**options, "store": options.get("store") or self.store()})

        really_new_group = dist.new_group

        def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *more: Any, **named: Any) -> Any:
            return really_new_group(ranks, timeout, BACKEND, *more, **named)

        _torch.new_group = _torch.distributed_c10d.new_group = new_group
        _torch.init_process_group = _torch.distributed_c10d.init_process_group = init_process_group
        _torch.rendezvous = lambda *_, **__: iter([(self.store(), rank, size)])
        _torch.TCPStore = _torch.distributed_c10d.TCPStore = self._any_store
        torch_c: Any = torch._C
        torch_c._distributed_c10d.TCPStore = self._any_store

    def _any_store(self, *place: Any, **settings: Any) -> VirtualStore:
        """Return a virtual store for any address: all processes share the same keys."""
        return self.store()

    def store(self) -> VirtualStore:
        self._stores.append(VirtualStore(self._schedule))
        return self._stores[-1]

    def _group(self, options: Any, _: Any) -> VirtualGroup:
        return VirtualGroup(self._schedule, options.group_rank, options.group_size, options.group_id, self._waited)


class VirtualWork(_torch._Work):  # type: ignore[misc]
    """A running operation. `wait` writes its result into the outputs."""

    def __init__(
        self,
        schedule: Schedule,
        mailbox: Mailbox,
        outputs: Sequence[torch.Tensor],
        waited: Callable[[float], None],
        forget: Callable[[VirtualWork], None],
    ) -> None:
        super().__init__()
        self._schedule, self._mailbox, self._outputs = schedule, mailbox, outputs
        self._waited, self._forget = waited, forget
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self._is_done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._is_done:
            return True
        begun = self._schedule.reach()
        packet = self._mailbox.take(NEVER)
        assert packet is not None
        self._waited(self._schedule.current.time - begun)
        self._mailbox.close()
        with torch.no_grad():
            for output, frame in zip(self._outputs, packet.frames, strict=True):
                if output.numel():
                    output.copy_(torch.frombuffer(frame, dtype=output.dtype).view(output.shape))
        self._is_done = True
        self._future.set_result(list(self._outputs))
        self._forget(self)
        self._schedule.go_on()
        return True

    def _finish(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._is_done

    def is_success(self) -> bool:
        return self._is_done

    def result(self) -> list[torch.Tensor]:
        return list(self._outputs)

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a future. Within a backward pass it completes at the end of the pass: DistributedDataParallel waits
        for it after the pass, where no other thread could run. Elsewhere it is already complete."""
        if not self._is_done and torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        else:
            self.wait()
        return self._future


class VirtualGroup(_torch.ProcessGroup):  # type: ignore[misc]
    """A group of ranks that includes this process. The coordinator matches its operations with those of other ranks."""

    def __init__(self, schedule: Schedule, rank: int, size: int, name: str, waited: Callable[[float], None]) -> None:
        super().__init__(rank, size)
        self._schedule, self._own_rank, self._num_ranks, self._waited = schedule, rank, size, waited
        self._own_name, self._num_operations = name, 0
        self._under_way: list[VirtualWork] = []

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any = None) -> VirtualWork:
        return self._meet("all_reduce", _flat(tensors), _flat(tensors), _reduction(opts))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any) -> VirtualWork:
        outputs = _flat(tensors) if opts.rootRank == self._own_rank else []
        return self._meet("reduce", _flat(tensors), outputs, _reduction(opts), opts.rootRank)

    def broadcast(self, tensors: Any, opts: Any) -> VirtualWork:
        inputs = _flat(tensors) if opts.rootRank == self._own_rank else []
        return self._meet("broadcast", inputs, _flat(tensors), root=opts.rootRank)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> VirtualWork:
        return self._meet("all_gather", _flat(inputs), _flat(outputs))

    def all_gather_single(self, output: Any, given: Any, opts: Any = None) -> VirtualWork:
        return self._meet("all_gather", [given], list(output.chunk(self._num_ranks)))

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> VirtualWork:
        return self._meet("gather", _flat(inputs), _flat(outputs), root=opts.rootRank)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> VirtualWork:
        return self._meet("scatter", _flat(inputs), _flat(outputs), root=opts.rootRank)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> VirtualWork:
        return self._meet("reduce_scatter", _flat(inputs), _flat(outputs), _reduction(opts))

    def reduce_scatter_single(self, output: Any, given: Any, opts: Any = None) -> VirtualWork:
        return self._meet("reduce_scatter", list(given.chunk(self._num_ranks)), [output], _reduction(opts))

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> VirtualWork:
        return self._meet("all_to_all", _flat(inputs), _flat(outputs))

    def all_to_all_single(self, output: Any, given: Any, to: Any, of: Any, opts: Any = None) -> VirtualWork:
        inputs = given.split(of) if of else given.chunk(self._num_ranks)
        outputs = output.split(to) if to else output.chunk(self._num_ranks)
        return self._meet("all_to_all", list(inputs), list(outputs))

    def barrier(self, opts: Any = None) -> VirtualWork:
        return self._meet("barrier", [], [])

    # The names that older versions of torch call.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def _meet(self, operation: str, inputs: Any, outputs: Any, reduction: str = "", root: int = 0) -> VirtualWork:
        schedule, name = self._schedule, self._own_name
        schedule.reach()
        mailbox = Mailbox(schedule, next(_boxes), f"the other ranks of {name}, operation {self._num_operations}")
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in inputs]
        visit = Visit(name, self._num_operations, operation, self._own_rank, self._num_ranks, dtypes, reduction, root)
        self._num_operations += 1
        frames = [msgspec.msgpack.encode(visit), *(_bytes(tensor) for tensor in inputs)]
        schedule.spend(message_seconds(len(frames), sum(len(frame) for frame in frames)))
        schedule.post((COORDINATOR, 0), mailbox.number, frames, hops=1)
        work = VirtualWork(schedule, mailbox, outputs, self._waited, self._under_way.remove)
        self._under_way.append(work)
        schedule.go_on()
        return work


class VirtualStore(_torch.Store):  # type: ignore[misc]
    """Keys that all simulated processes share."""

    def __init__(self, schedule: Schedule) -> None:
        super().__init__()
        self._schedule = schedule

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask("get", [key])[0]

    def add(self, key: str, value: int) -> int:
        return int(self._ask("add", [key], amount=value)[0])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask("get", keys)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys)[0])

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key])[0])

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignored: a get waits until the simulation detects a deadlock."""

    def _ask(self, action: str, keys: list[str], value: bytes = b"", amount: int = 0) -> list[bytes]:
        schedule = self._schedule
        schedule.reach()
        mailbox = Mailbox(schedule, next(_boxes), f"keys {', '.join(keys)} of the store")
        question = Question(action, list(keys), value, amount)
        schedule.post((COORDINATOR, 1), mailbox.number, [msgspec.msgpack.encode(question)], hops=1)
        packet = mailbox.take(NEVER)
        assert packet is not None
        mailbox.close()
        schedule.go_on()
        return [bytes(frame) for frame in packet.frames]


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for inner in tensors for tensor in _flat(inner)]


def _reduction(options: Any) -> str:
    if options is None:
        return "SUM"
    operation = options.reduceOp
    name = str(getattr(operation, "op", operation)).rpartition(".")[2]
    if name not in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        raise FleetError(f"{name}: a simulated group reduces by SUM, AVG, PRODUCT, MIN and MAX only")
    return name


def _bytes(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""
