"""What a job of servers and workers needs and does, from measured units: memory, network, speed, saves, failures.

Nothing is fitted. A server computes one request at a time, links carry bytes at their rate, and the slowest of what a
step needs bounds the job; tests/observe/plan compares its speed with the simulator's queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchfleet.base.errors import FleetError
from torchfleet.base.network_links import Link
from torchfleet.observe.plan.units import Unit
from torchfleet.ps.tables.settings.row_format import RowFormat
from torchfleet.ps.tables.settings.rule import Rule
from torchfleet.ps.tables.settings.spec import TableSpec

Durability = Literal["backups", "log", "saves"]
_KEY, _WORD = 8, 4  # bytes
_PACKED = 48  # rows of at most this many bytes are stored in the map itself
_DAY = 86_400.0


@dataclass(frozen=True)
class JobSize:
    """The user's own numbers. Prices are per machine and hour; 0: unknown."""

    rows: float
    dim: int
    rule: str
    workers: int
    servers: int
    link: Link
    dtype: str = "float32"
    mode: Literal["hybrid", "async"] = "hybrid"
    batch: int = 1000  # of each worker
    ids_per_sample: int = 26
    durability: Durability = "backups"
    save_hours: float = 6.0
    machine_hours: float = 20_000.0  # mean hours between two failures of a machine
    worker_price: float = 0.0
    server_price: float = 0.0

    def __post_init__(self) -> None:
        for name in ("rows", "dim", "workers", "servers", "batch", "ids_per_sample", "save_hours", "machine_hours"):
            if not 0 < getattr(self, name) < 1e18:
                raise FleetError(f"--{name}: expected a number above 0, found {getattr(self, name)}")
        for name in ("worker_price", "server_price"):
            if not 0 <= getattr(self, name) < 1e9:
                raise FleetError(f"--{name}: expected a price from 0, found {getattr(self, name)}")

    @property
    def table(self) -> TableSpec:
        return TableSpec("rows", dim=self.dim, rule=Rule(self.rule), format=RowFormat(self.dtype))


@dataclass
class Plan:
    """All figures by name. Sizes are in bytes, times in seconds, rates per second."""

    size: JobSize
    units: dict[str, Unit]
    figures: dict[str, float] = field(default_factory=dict)
    bound: str = ""  # what bounds the speed

    def __getitem__(self, name: str) -> float:
        return self.figures[name]

    def unit(self, name: str) -> float:
        return self.units[name].value


def plan_of(size: JobSize, units: dict[str, Unit]) -> Plan:
    plan = Plan(size, units)
    for compute in (_memory, _traffic, _speed, _saves, _faults, _money):
        compute(plan)
    return plan


def _memory(plan: Plan) -> None:
    size, table = plan.size, plan.size.table
    payload = _KEY + _WORD * table.stored_words
    row = payload * plan.unit("packed_memory_ratio") if payload <= _PACKED else payload + plan.unit("map_bytes_per_row")
    copies = 2 if size.durability == "backups" else 1
    plan.figures |= {
        "row_bytes": row,
        "saved_row_bytes": payload,
        "table_bytes": size.rows * row,
        "server_bytes": copies * size.rows * row / size.servers,
        "copies": copies,
    }


def _traffic(plan: Plan) -> None:
    """The bytes of one worker's step, which all servers share evenly."""
    size = plan.size
    keys = size.batch * size.ids_per_sample * plan.unit("distinct_share")
    values = size.dim * {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}[size.dtype]
    plan.figures |= {
        "keys": keys,
        "to_servers": keys * (_KEY + _WORD * size.dim + plan.unit("push_bytes_beside_values")),
        "from_servers": keys * values,
    }


def _speed(plan: Plan) -> None:
    """A step's time is the longest of what runs side by side: the worker's own work, links, and servers."""
    size, link = plan.size, plan.size.link
    messages = 4 * plan.unit("message_us") * 1e-6  # a request and a reply, of a pull and of a push
    compute = size.batch / plan.unit("worker_samples_per_s")
    reduced = _WORD * plan.unit("dense_parameters")
    reduce = link.ring_seconds(int(reduced), size.workers, passes=2) if size.mode == "hybrid" else 0.0
    share = size.workers / size.servers
    seconds_of_keys = plan["keys"] * (plan.unit("pull_ns_per_key") + plan.unit("push_ns_per_key")) * 1e-9
    copies = plan["copies"]  # a primary sends each push to its backup, which applies it, too
    bounds = {
        "the workers' own work": compute + size.servers * messages / 2 + reduce,
        "the servers' processors": copies * share * seconds_of_keys + size.workers * messages / 2,
        "the workers' links": max(plan["to_servers"], plan["from_servers"]) / link.bytes_per_second,
        "the servers' links": share * max(copies * plan["to_servers"], plan["from_servers"]) / link.bytes_per_second,
    }
    plan.bound = max(bounds, key=lambda name: bounds[name])
    step = bounds[plan.bound]
    plan.figures |= {
        "compute_s": compute,
        "reduce_s": reduce,
        "step_s": step,
        "samples_per_s": size.workers * size.batch / step,
        "server_busy": bounds["the servers' processors"] / step,
        "server_link": bounds["the servers' links"] / step,
        "worker_link": bounds["the workers' links"] / step,
        "network_bytes_per_s": size.workers * (copies * plan["to_servers"] + plan["from_servers"]) / step,
    }


def _saves(plan: Plan) -> None:
    saved = plan.size.rows * plan["saved_row_bytes"]
    each = saved / plan.size.servers
    by_rows = plan.size.rows / plan.size.servers * plan.unit("load_ns_per_row") / 1e9
    plan.figures |= {
        "saved_bytes": saved,
        "save_s": each / (plan.unit("save_mb_per_s") * 1e6),
        "load_s": max(each / (plan.unit("load_mb_per_s") * 1e6), by_rows),
    }


def _faults(plan: Plan) -> None:
    """Failures of a day, and how long each stops the job. With saves alone, half an interval is lost on average."""
    size, restart = plan.size, plan.unit("restart_s")
    if size.durability == "backups":
        server = plan.unit("takeover_s")
        refill = plan["server_bytes"] / 2 / (plan.unit("refill_mb_per_s") * 1e6)
    elif size.durability == "log":
        server, refill = restart + size.rows / size.servers / 1e6 * plan.unit("recovery_s_per_million_rows"), 0.0
    else:
        server, refill = restart + plan["load_s"] + size.save_hours * 3600 / 2, 0.0
    worker = restart if size.mode == "hybrid" else restart / size.workers  # in async mode the others go on
    servers, workers = (num * 24 / size.machine_hours for num in (size.servers, size.workers))
    lost = servers * server + workers * worker
    plan.figures |= {
        "server_failures": servers,
        "worker_failures": workers,
        "server_failure_s": server,
        "worker_failure_s": worker,
        "refill_s": refill,
        "both_copies_lost": servers * refill / _DAY / (size.machine_hours / 24) if refill else 0.0,
        "lost_s": lost,
        "goodput": max(0.0, 1 - lost / _DAY),
    }


def _money(plan: Plan) -> None:
    size = plan.size
    day = 24 * (size.workers * size.worker_price + size.servers * size.server_price)
    samples = _DAY * plan["samples_per_s"] * plan["goodput"]
    plan.figures |= {"price_day": day, "price_billion_samples": day / samples * 1e9 if samples else 0.0}
