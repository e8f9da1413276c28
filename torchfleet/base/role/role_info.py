"""What a process knows of its role: worker or server, its index, the addresses of all others."""

from __future__ import annotations

from dataclasses import dataclass

WORKER, SERVER = "worker", "server"
SETTINGS = ("none", "log")  # of FLEET_DURABILITY
LOSS_END, LOSS_WAIT, GO_ON = "end", "wait", "go_on"
LOSS_RULES = (LOSS_END, LOSS_WAIT, GO_ON)  # of FLEET_ON_WORKER_LOSS


@dataclass(frozen=True)
class RoleInfo:
    """The role, the index and the addresses of all processes. Without servers: one local worker."""

    role: str = WORKER
    worker_index: int = 0
    num_workers: int = 1  # of an elastic job: the most
    server_index: int = 0
    server_endpoints: tuple[str, ...] = ()
    worker_endpoints: tuple[str, ...] = ()
    key_dir: str | None = None
    insecure: bool = False
    socket_dir: str | None = None  # the servers' sockets are files in it, and their addresses only names
    address_book: str | None = None  # a file that says where servers are now that moved
    status_file: str | None = None
    restart: int = 0  # how often this role was started before
    asks_restart: bool = False  # nobody here knows that: the servers are asked
    start_timeout: float = 1800.0  # seconds that a worker waits for a server that gives no sign
    worker_timeout: float = 10.0  # seconds of silence after which those who wait for a worker are told
    orphan_timeout: float = 1800.0  # seconds after the last sign of any worker when a server ends; 0: never
    min_workers: int = 0  # of an elastic job: so many begin, others come and go; 0: the number of workers is fixed
    on_worker_loss: str = LOSS_END  # what the loss of a worker means to those who wait for it: one of LOSS_RULES
    durability: str = "none"  # how servers keep what they promise: "none", or "log" on disk
    log_store: str | None = None  # folder of the servers' logs
    log_run: str = ""  # the run of a launcher that servers belong to; another one's workers are not waited for
    fsync_ms: float = 10.0  # changes that a loss of power may take; 0: none
    save_on_stop: str | None = None  # where worker 0 saves when the job is asked to end
    debug: bool = False
    verbose: bool = False  # tell every setting, not only those that differ from their defaults
    num_threads: int = 0  # of torch; 0: as torch decides
    is_collective: bool = False
    local_rank: int = 0  # among the ranks of this machine
    local_size: int = 0  # ranks of this machine; 0: not known
    replica: int = 0  # of a server: which of the addresses of its shard is its own
    coordinator: str | None = None  # of servers with replicas: where it is decided which is primary
    master: str = ""  # host:port where the ranks of a collective job meet; "": as MASTER_ADDR and MASTER_PORT say

    @property
    def is_local(self) -> bool:
        """Whether one process does everything, with the servers inside it."""
        return not self.server_endpoints and not self.is_collective

    @property
    def is_elastic(self) -> bool:
        """Whether workers come and go."""
        return self.min_workers > 0

    @property
    def num_servers(self) -> int:
        return max(1, len(self.server_endpoints))

    @property
    def server_places(self) -> list[str]:
        """host:port of every process that is a server, those that begin as backups included."""
        return [place for shard in self.server_endpoints for place in shard.split("|")]

    @property
    def replica_places(self) -> list[str]:
        """Of a server: host:port of all replicas of its shard; one if it has no backup."""
        return self.server_endpoints[self.server_index].split("|")
