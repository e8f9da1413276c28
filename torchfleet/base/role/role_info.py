"""RoleInfo: the role of a process (worker, server or heter worker), its index and the addresses of all others."""

from __future__ import annotations

from dataclasses import dataclass

WORKER, SERVER, HETER_WORKER = "worker", "server", "heter_worker"
SETTINGS = ("none", "log")  # values of FLEET_DURABILITY
LOSS_END, LOSS_WAIT, GO_ON = "end", "wait", "go_on"
LOSS_RULES = (LOSS_END, LOSS_WAIT, GO_ON)  # values of FLEET_ON_WORKER_LOSS


@dataclass(frozen=True)
class RoleInfo:
    """The role, the index and the addresses of all processes. Without servers: one local worker."""

    role: str = WORKER
    worker_index: int = 0
    num_workers: int = 1  # of an elastic job: the maximum
    server_index: int = 0
    server_endpoints: tuple[str, ...] = ()
    worker_endpoints: tuple[str, ...] = ()
    key_dir: str | None = None
    insecure: bool = False
    socket_dir: str | None = None  # folder of the servers' Unix sockets; server addresses are then only names
    address_book: str | None = None  # a file with the current addresses of servers that moved
    status_file: str | None = None
    restart: int = 0  # how often this role was started before
    max_restart: int = 0  # how often the launcher starts this role again
    asks_restart: bool = False  # the number of restarts is unknown here: ask the servers
    start_timeout: float = 1800.0  # seconds that a worker waits for a server that does not respond
    worker_timeout: float = 10.0  # seconds of silence after which processes that wait for a worker are told
    orphan_timeout: float = 1800.0  # seconds from the last heartbeat of any worker until a server ends; 0: never
    min_workers: int = 0  # of an elastic job: the number that starts it; 0: the number of workers is fixed
    on_worker_loss: str = LOSS_END  # what happens to processes that wait for a lost worker: one of LOSS_RULES
    durability: str = "none"  # how servers persist acknowledged changes: "none", or "log" on disk
    log_store: str | None = None  # folder of the servers' logs
    log_run: str = ""  # the launcher's run that the servers belong to; workers of other runs are not waited for
    fsync_ms: float = 10.0  # milliseconds of changes that a power failure may lose; 0: none
    save_on_stop: str | None = None  # where worker 0 saves when the job is asked to end
    debug: bool = False
    verbose: bool = False  # print every setting, not only those that differ from their defaults
    num_threads: int = 0  # threads of torch; 0: torch decides
    is_collective: bool = False
    local_rank: int = 0  # among the ranks on this machine
    local_size: int = 0  # ranks on this machine; 0: unknown
    replica: int = 0  # of a server: the index of its own address among those of its shard
    coordinator: str | None = None  # of servers with replicas: the address of the process that chooses the primary
    waits_for_backups: bool = True  # with replicas: workers begin when every server has its backup
    heter_endpoints: tuple[str, ...] = ()  # of the heter workers, which compute blocks for the workers
    heter_index: int = 0  # of a heter worker
    master: str = ""  # host:port where the ranks of a collective job meet; "": MASTER_ADDR and MASTER_PORT

    @property
    def is_local(self) -> bool:
        """Whether this is a job of one process, with the servers inside it."""
        return not self.server_endpoints and not self.is_collective

    @property
    def is_elastic(self) -> bool:
        """Whether workers may join and leave during the job."""
        return self.min_workers > 0

    @property
    def index_on_machine(self) -> int:
        """The index of a worker, or heter worker, among those on its host; its index in the job if the hosts are
        unknown."""
        endpoints, index = self.worker_endpoints, self.worker_index
        if self.role == HETER_WORKER:
            endpoints, index = self.heter_endpoints, self.heter_index
        hosts = [endpoint.rpartition(":")[0] for endpoint in endpoints]
        return hosts[:index].count(hosts[index]) if hosts else index

    @property
    def num_servers(self) -> int:
        return max(1, len(self.server_endpoints))

    @property
    def server_places(self) -> list[str]:
        """host:port of every server process, including backups."""
        return [place for shard in self.server_endpoints for place in shard.split("|")]

    @property
    def replica_places(self) -> list[str]:
        """Of a server: host:port of all replicas of its shard; a single one without backups."""
        return self.server_endpoints[self.server_index].split("|")
