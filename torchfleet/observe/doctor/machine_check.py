"""Findings about a machine and its software."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence

from torchfleet.base.pages import page
from torchfleet.observe.doctor.finding import NOTE, SLOWS, STOPS, Finding
from torchfleet.observe.doctor.machine_facts import MachineFacts
from torchfleet.observe.doctor.software_facts import SoftwareFacts
from torchfleet.observe.watch.figures import size

_MB, _GB = 10**6, 10**9
_FEW_KERNELS = 20
_WORKER_BYTES = 600 * 10**6  # of a process with torch, before it has read data
_SERVER_BYTES = 250 * 10**6  # of a server without rows


def check_machine(facts: MachineFacts) -> Iterator[Finding]:
    """Yield the problems of this machine for a job."""
    yield from _memory(facts)
    yield from _cores(facts)
    yield from _limits(facts)
    yield from _network(facts)
    if facts.is_synchronized is False:
        yield Finding(
            NOTE,
            "the clock of this machine is not synchronized",
            "run chrony or systemd-timesyncd: times in logs, and passes by the hour, are compared among machines",
        )


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    if facts.memory_left is not None and facts.memory_left < _GB:
        yield Finding(
            STOPS,
            f"{size(facts.memory_left)} of memory are left",
            "end other processes, or raise the limit of the container: a worker with torch takes about 0.5 GB",
            90,
        )
    if facts.swap_used is not None and facts.memory and facts.swap_used > facts.memory / 20:
        yield Finding(
            SLOWS,
            f"{size(facts.swap_used)} of memory are swapped out",
            "give tables room in memory: a row that is read from disk takes a thousand times as long",
            80,
        )
    if facts.overcommit == 2:
        yield Finding(
            STOPS,
            "the system counts reserved memory (vm.overcommit_memory = 2), and tables reserve their largest size",
            "give --max_table_bytes, or set vm.overcommit_memory to 0",
            60,
        )
    if facts.shared_memory_free is not None and facts.shared_memory_free < 512 * _MB:
        yield Finding(
            SLOWS if facts.shared_memory_free >= 64 * _MB else STOPS,
            f"/dev/shm has {size(facts.shared_memory_free)} free",
            "DataLoader workers and NCCL pass tensors through it: start the container with --shm-size 2g or more",
            40,
        )
    if facts.temporary_free is not None and facts.temporary_free < _GB:
        yield Finding(
            SLOWS if facts.temporary_free >= 100 * _MB else STOPS,
            f"/tmp has {size(facts.temporary_free)} free",
            "make room there, or set TMPDIR: downloads, sockets of private jobs and traces lie there",
            30,
        )
    if facts.huge_pages == "never":
        yield Finding(
            SLOWS,
            "transparent huge pages are switched off",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: lookups in large tables miss the TLB less",
            20,
        )


def _cores(facts: MachineFacts) -> Iterator[Finding]:
    if facts.load > 1.5 * facts.num_cores:
        yield Finding(
            SLOWS,
            f"other processes want the cores: load {facts.load:.1f} on {facts.num_cores}",
            "wait for them, or use another machine",
            70,
        )
    if facts.cpu_limit is not None and facts.cpu_limit < facts.num_processors:
        yield Finding(
            NOTE,
            f"the container may use {facts.cpu_limit:g} of {facts.num_processors} cores",
            "fleetrun counts with that; a script that asks os.cpu_count() does not",
        )
    if facts.num_cores < 2:
        yield Finding(SLOWS, "one core is all there is", "a server and a worker want one each", 50)
    if facts.governor == "powersave":
        yield Finding(
            SLOWS,
            "the processor saves power (governor powersave)",
            "cpupower frequency-set -g performance, or schedutil",
            35,
        )


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    if 0 <= facts.open_files < 4096:
        yield Finding(
            STOPS if facts.open_files < 256 else SLOWS,
            f"a process may have {facts.open_files:,} files open",
            "ulimit -n 65536: a server needs one for each connection, several for each worker",
            55,
        )
    if 0 <= facts.processes < 1024:
        yield Finding(
            STOPS, f"this user may have {facts.processes:,} processes and threads", "ulimit -u 16384 or more", 50
        )
    if facts.gpus and 0 <= facts.locked_memory < 64 * _MB:
        yield Finding(
            SLOWS,
            f"{size(facts.locked_memory)} of memory may be locked, and this machine has GPUs",
            "ulimit -l unlimited: NCCL over InfiniBand and pinned buffers lock memory",
            30,
        )


def _network(facts: MachineFacts) -> Iterator[Finding]:
    if facts.somaxconn is not None and facts.somaxconn < 1024:
        yield Finding(
            NOTE,
            f"{facts.somaxconn} connections may wait to be accepted (net.core.somaxconn)",
            "sysctl net.core.somaxconn=4096, if hundreds of workers start together",
        )
    most = min(facts.tcp_read_most or 1 << 62, facts.tcp_write_most or 1 << 62)
    if most < 4 * _MB:
        yield Finding(
            SLOWS,
            f"a TCP connection has at most {size(most)} under way (net.ipv4.tcp_rmem, tcp_wmem)",
            "sysctl net.ipv4.tcp_rmem='4096 131072 6291456', the same for tcp_wmem: a fast link with latency needs it",
            25,
        )
    if facts.num_ports is not None and facts.num_ports < 10_000:
        yield Finding(
            NOTE,
            f"{facts.num_ports:,} ports are there for connections (net.ipv4.ip_local_port_range)",
            "sysctl net.ipv4.ip_local_port_range='32768 60999'",
        )


def check_software(facts: SoftwareFacts, gpus: Sequence[str]) -> Iterator[Finding]:
    """Yield the problems of this Python installation."""
    for text in facts.unmet:
        yield Finding(STOPS, text, "pip install --upgrade torchfleet, or that package", 100)
    if not facts.has_curve:
        yield Finding(STOPS, "this libzmq has no CURVE: there are no keys", "install pyzmq from its wheels", 45)
    torch = facts.packages.get("torch", "")
    if gpus and "+cpu" in torch:
        yield Finding(STOPS, f"torch {torch} cannot use the GPUs of this machine", "install torch with CUDA", 95)
    if not facts.kernel_folder:
        yield Finding(
            SLOWS,
            "compiled kernels cannot be kept: every process compiles them again, for half a minute or more",
            "set NUMBA_CACHE_DIR to a folder to which only you can write",
            75,
        )
    elif facts.num_kernels < _FEW_KERNELS:
        yield Finding(
            NOTE,
            f"{facts.num_kernels} kernels are compiled yet: the first job takes a minute longer to start",
            "nothing; or run fleet compile first",
        )


def check_ports(ports: Sequence[int]) -> Iterator[Finding]:
    """Yield the ports of this machine on which a job could not listen."""
    for port in ports:
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("", port))
            except OSError as error:
                yield Finding(STOPS, f"port {port} cannot be listened on: {error.strerror}", "choose another", 65)


def row_bytes(dim: int, rule: str) -> int:
    """Return the bytes of one row in a server: values, the rule's state, the map, lists. See docs/online.md.

    Raises TableError for an unknown rule or an invalid dim.
    """
    from torchfleet.ps.tables.settings.spec import Rule, TableSpec  # compiled kernels are loaded with it

    return 4 * (2 + TableSpec("rows", dim=dim, rule=Rule(rule)).num_words) + 18


def check_fit(
    facts: MachineFacts, num_servers: int, num_workers: int, num_rows: float, dim: int, rule: str
) -> Iterator[Finding]:
    """Yield whether a job of this size fits, with all its servers and workers on this machine."""
    rows = num_rows * row_bytes(dim, rule)
    needed = rows + num_servers * _SERVER_BYTES + num_workers * _WORKER_BYTES
    table = f"{num_rows:,.0f} rows of dim {dim} with {rule} take {size(rows)}" if num_rows else "without rows"
    left = facts.memory_left
    parts = f"{table}; with {num_servers} servers and {num_workers} workers {size(needed)}"
    if left is None:
        yield Finding(NOTE, f"{parts}; how much memory is left is not known", "look at free -h")
    elif needed > left:
        machines = -(-needed // left)
        yield Finding(
            STOPS,
            f"{parts}, and {size(left)} are left",
            f"use {machines:.0f} machines like this one, a smaller dim, sgd in the place of adam, or admission and "
            f"eviction of rows ({page('online')})",
            85,
        )
    else:
        yield Finding(NOTE, f"{parts}; {size(left)} are left: it fits", "nothing")
    num = num_servers + num_workers
    if num > facts.num_cores:
        yield Finding(
            SLOWS,
            f"{num} processes share {facts.num_cores} cores",
            f"at most {facts.num_cores} together; --server_num auto chooses",
            45,
        )
