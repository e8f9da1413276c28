"""The ranks of a collective job: their devices, and the groups they form."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchfleet.base.errors import FleetError, StrategyError
from torchfleet.base.own_device import device_of
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.meeting.rendezvous import rendezvous

AXES = ("data", "pipe", "sharding", "model")  # the last varies fastest: neighbours share a tensor


class Place(NamedTuple):
    """A rank's index among the ranks that share layers, and its device."""

    rank: int
    device: torch.device


class _Begun:
    """The role of this process in the job, known before the ranks meet: layers may need it earlier."""

    info: RoleInfo | None = None
    num_stores = 0  # requested in this process: the same number on all ranks
    place: Place | None = None  # None: no layers are shared


begun = _Begun()


class Axis(NamedTuple):
    """This rank's place among the ranks that differ from it along one axis. `group` is None if there are no others."""

    rank: int
    size: int
    group: dist.ProcessGroup | None


class Gathering(Protocol):
    """All ranks, for gathering bytes."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in rank order. All ranks call it together."""


class Aside(NamedTuple):
    """All ranks, over separate connections."""

    rank: int
    size: int
    group: dist.ProcessGroup | None

    def gather(self, data: bytes) -> list[bytes]:
        return [data] if self.group is None else _gather(data, self.size, self.group)


class World:
    """All ranks, laid out as a grid by the degrees of the strategy. `close` leaves the process group that it joined."""

    def __init__(self, info: RoleInfo, strategy: DistributedStrategy, device: torch.device | None = None) -> None:
        """`device`: where this rank computes; None: its GPU if there is one, else the CPU."""
        self.rank, self.size, self.local_rank = info.worker_index, info.num_workers, info.local_rank
        self.local_size = info.local_size  # ranks on this machine; 0: unknown
        self.degrees, self._is_sharded = degrees(strategy, self.size), bool(strategy.sharding)
        self.device = device or _take_device(info)
        self._is_ours = not dist.is_initialized()
        if self._is_ours:
            self._join(info, strategy.sync_timeout)
        if (self.rank, self.size) != (dist.get_rank(), dist.get_world_size()):
            raise FleetError(
                f"the environment says rank {self.rank} of {self.size}, the process group that exists already rank "
                f"{dist.get_rank()} of {dist.get_world_size()}: let fleet.init make the group, or make them agree"
            )
        self._mesh: DeviceMesh | None = None
        self._control: dist.ProcessGroup | None = None
        self._replicas: Axis | None = None
        self._context: Axis | None = None
        self.context_degree = degree_of_context(strategy, self.degrees)
        begun.place = Place(self.axis("model").rank, self.device) if self.degrees["model"] > 1 else None

    def _join(self, info: RoleInfo, timeout: float) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        wait = timedelta(seconds=timeout)
        is_alone = self.size == 1
        store = HashStore() if is_alone else rendezvous.next_store(info.master, self.rank, self.size, wait)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=wait)

    @property
    def mesh(self) -> DeviceMesh:
        """The grid as a DeviceMesh of those AXES that have several ranks, and of "sharding" if it is on: for any other
        axis torch would make a group of one rank, with its threads. All ranks access it together the first time.
        """
        if self._mesh is None:
            axes = tuple(axis for axis in AXES if self.degrees[axis] > 1 or (axis == "sharding" and self._is_sharded))
            shape = tuple(self.degrees[axis] for axis in axes)
            self._mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=axes)
        return self._mesh

    @property
    def control(self) -> dist.ProcessGroup:
        """A group of all ranks for tensors in host memory. All ranks access it together the first time."""
        if self._control is None:
            self._control = dist.group.WORLD if self.device.type == "cpu" else dist.new_group(backend="gloo")
        assert self._control is not None
        return self._control

    def gather(self, data: bytes) -> list[bytes]:
        """The data of every rank, in rank order. All ranks call it together."""
        return _gather(data, self.size, self.control)

    def aside(self) -> Gathering:
        """All ranks, for a thread that communicates while this one exchanges gradients. All ranks call it together."""
        return Aside(self.rank, self.size, dist.new_group(backend="gloo") if self.size > 1 else None)

    def own_store(self) -> Store | None:
        """A store that all ranks share, on a separate connection. All ranks call it together, equally often.

        None if the process group exists already and has no store to connect to.
        """
        begun.num_stores += 1
        key, shared = f"torchfleet store {begun.num_stores}", dist.distributed_c10d._get_default_store()
        inner: Any = shared
        while hasattr(inner, "underlying_store"):
            inner = inner.underlying_store
        if not (hasattr(inner, "host") and hasattr(inner, "port")):
            return None
        if self.rank == 0:
            shared.set(key, secrets.token_hex(8))  # a store may outlive a start of the job, with its old keys
        token = bytes(shared.get(key)).decode()
        return PrefixStore(token, type(inner)(inner.host, inner.port, None, False, inner.timeout))

    def axis(self, name: str) -> Axis:
        """This rank's place along the axis `name`, one of AXES. All ranks call it together the first time."""
        size = self.degrees[name]
        if size == 1:
            return Axis(0, 1, None)
        if size == self.size:
            return Axis(self.rank, size, dist.group.WORLD)
        return Axis(self.mesh.get_local_rank(name), size, self.mesh.get_group(name))

    @property
    def replicas(self) -> Axis:
        """This rank's place among the ranks with the same layers and other data: along data and sharding together.

        All ranks access it together the first time.
        """
        if self._replicas is None:
            data, sharding = self.axis("data"), self.axis("sharding")
            index, number = self._replica
            if 1 in (data.size, sharding.size):
                self._replicas = data if sharding.size == 1 else sharding
            elif number == self.size:
                self._replicas = Axis(index, number, dist.group.WORLD)
            else:
                self._replicas = Axis(index, number, self._among_replicas(number))
        return self._replicas

    def _among_replicas(self, size: int) -> dist.ProcessGroup:
        """This rank's group of `size` neighbours along data and sharding together. All ranks call it together."""
        grid = torch.arange(self.size).reshape([self.degrees[axis] for axis in AXES])
        places = [AXES.index(axis) for axis in ("pipe", "model", "data", "sharding")]
        return self._own(grid.permute(places).reshape(-1, size).tolist())

    @property
    def context(self) -> Axis:
        """This rank's place among the replicas that read the same samples, each with a part of every sequence.

        All ranks access it together the first time.
        """
        if self._context is None:
            size, replicas = self.context_degree, self.replicas
            if size in (1, replicas.size):
                self._context = replicas if size > 1 else Axis(0, 1, None)
            else:
                self._context = Axis(replicas.rank % size, size, self._among_replicas(size))
        return self._context

    @property
    def _replica(self) -> tuple[int, int]:
        data, sharding = self.axis("data"), self.axis("sharding")
        return data.rank * sharding.size + sharding.rank, data.size * sharding.size

    @property
    def data_shard(self) -> tuple[int, int]:
        """(index, number) of this rank's share of the samples.

        Equal for ranks of one pipeline or one sharded layer, and for those that have parts of the same sequences.
        """
        index, number = self._replica
        return index // self.context_degree, number // self.context_degree

    def groups(self, size: int) -> dist.ProcessGroup:
        """This rank's group of `size` neighbours: 0 … size-1, size … 2·size-1, ... All ranks call it together."""
        return self._own([list(range(start, start + size)) for start in range(0, self.size, size)])

    def groups_across(self, size: int) -> dist.ProcessGroup:
        """The ranks at the same place in every group of `size` neighbours. All ranks call it together."""
        return self._own([list(range(place, self.size, size)) for place in range(size)])

    def _own(self, partition: list[list[int]]) -> dist.ProcessGroup:
        made: list[dist.ProcessGroup] = [dist.new_group(ranks) for ranks in partition]
        return next(group for group, ranks in zip(made, partition, strict=True) if self.rank in ranks)

    def barrier(self) -> None:
        dist.barrier(device_ids=[self.local_rank] if dist.get_backend() == "nccl" else None)

    def close(self, alone: bool = False) -> None:
        """Leave the process group. All ranks call it together: one that left earlier could block another.

        `alone`: do not wait for the others.
        """
        begun.place = None
        if self._is_ours and dist.is_initialized():
            if self.size > 1 and not alone:
                self.barrier()
            dist.destroy_process_group()


def _gather(data: bytes, size: int, group: dist.ProcessGroup) -> list[bytes]:
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else own[:0]
    brought = [torch.zeros_like(own) for _ in range(size)]
    if longest:
        dist.all_gather(brought, own, group=group)
    return [message[: int(length)].numpy().tobytes() for message, length in zip(brought, lengths, strict=True)]


def degrees(strategy: DistributedStrategy, size: int) -> dict[str, int]:
    """The number of ranks along each of AXES. Raises StrategyError if their product is not the number of ranks."""
    hybrid = strategy.hybrid_configs
    model = hybrid["mp_degree"]
    if strategy.tensor_parallel:
        own = strategy.tensor_parallel_configs.tensor_parallel_degree
        model = _agreed("tensor_parallel_configs['tensor_parallel_degree']", own, "mp_degree", model)
    elif model > 1:
        raise StrategyError(f"hybrid_configs['mp_degree']={model} needs tensor_parallel=True")
    if hybrid["pp_degree"] > 1 and not strategy.pipeline:
        raise StrategyError(f"hybrid_configs['pp_degree']={hybrid['pp_degree']} needs pipeline=True")
    if hybrid["sharding_degree"] > 1 and not strategy.sharding:
        raise StrategyError(f"hybrid_configs['sharding_degree']={hybrid['sharding_degree']} needs sharding=True")
    data, pipe, sharding = hybrid["dp_degree"], hybrid["pp_degree"], 1
    rest = size // model
    if strategy.sharding:
        own = strategy.sharding_configs.sharding_degree
        sharding = _agreed("sharding_configs['sharding_degree']", own, "sharding_degree", hybrid["sharding_degree"])
        if own > 1 and own < rest // max(1, pipe) and not strategy.sharding_configs.hybrid_dp:
            raise StrategyError(
                f"sharding_configs['sharding_degree']={own} is less than the {rest // max(1, pipe)} ranks there are: "
                "set sharding_configs['hybrid_dp']=True to have several groups, or leave the degree out"
            )
        sharding = sharding if max(own, hybrid["sharding_degree"]) > 1 else max(1, rest // pipe // max(1, data))
    if strategy.pipeline and pipe == 1:
        pipe = max(1, rest // sharding // max(1, data))
    data = data or max(1, rest // sharding // pipe)
    if data * pipe * sharding * model != size:
        raise StrategyError(
            f"the degrees dp {data} × pp {pipe} × sharding {sharding} × mp {model} make "
            f"{data * pipe * sharding * model} ranks; there are {size}: change hybrid_configs or the number of ranks"
        )
    return {"data": data, "pipe": pipe, "sharding": sharding, "model": model}


def degree_of_context(strategy: DistributedStrategy, of_axes: dict[str, int]) -> int:
    """The number of ranks that share a sequence: some or all of the ranks along the data and sharding axes."""
    if not strategy.context_parallel:
        return 1
    number = of_axes["data"] * of_axes["sharding"]
    degree: int = strategy.context_parallel_configs.context_parallel_degree or number
    if number % degree:
        raise StrategyError(
            f"context_parallel_configs['context_parallel_degree']={degree} does not divide the {number} ranks that "
            f"hold the same layers (dp {of_axes['data']} × sharding {of_axes['sharding']}): change one of them"
        )
    return degree


def _agreed(name: str, own: int, other_name: str, other: int) -> int:
    if own > 1 and other > 1 and own != other:
        raise StrategyError(f"{name}={own} and hybrid_configs['{other_name}']={other} differ: give one of them")
    return max(own, other)


def _take_device(info: RoleInfo) -> torch.device:
    """The device of this rank; a GPU becomes torch's current device."""
    device = device_of(info)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
