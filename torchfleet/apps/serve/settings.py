"""The settings of a serving process, as the command line gives them and as its processes hand them on."""

from __future__ import annotations

import os
import re
import ssl

import msgspec

from torchfleet.base.errors import FleetError

FAILED = 3  # exit status: the model cannot be served, so starting again is of no use
LONGEST_TIMEOUT = 3600.0  # seconds


class ServeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See `fleet serve --help`."""

    model: str  # a folder or URL
    name: str = ""  # of the model, in paths; the folder's by default
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 0  # 0: no gRPC
    follow: str = ""  # "files", servers=HOST:PORT,... or the folder of a job's logs; "": none
    followed: tuple[str, ...] = ()  # addresses of the servers to follow, as `follow` says
    workdir: str = ""  # a folder for the files of versions, which all processes map; "": this process makes its own
    workers: int = 1
    batch_wait_ms: float = 2.0
    max_batch: int = 1024  # samples of a request, and of a batch
    max_queue: int = 8192  # samples that wait
    max_queue_s: float = 0.5  # seconds of work that wait, and never more than timeout_s
    max_body: int = 16 << 20  # bytes of a request
    max_connections: int = 1024  # of each process
    timeout_s: float = 10.0  # for a request to come in, and to be answered
    threads: int = 1  # of each process, for the network
    network: str = ""  # FILE.py:FACTORY
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""
    access_log: str = ""  # a file; "-" for stdout
    shards: str = ""  # HOST:PORT[,HOST:PORT] of read-only servers, by shard; "": rows are in this process
    backups: str = ""  # a second server of each shard
    row_cache: str = "256MB"  # memory for the rows that were read last from these servers; "0": no cache
    key_dir: str = ""  # the folder of the keys that the servers require

    def checked(self) -> ServeSettings:
        """With a name. Raises FleetError for settings that contradict each other or are out of range."""
        self._check_ranges()
        if not 0 <= self.batch_wait_ms < 1000 * self.timeout_s:
            raise FleetError(f"--batch_wait_ms {self.batch_wait_ms:g} must be less than --timeout_s {self.timeout_s:g}")
        if self.follow not in ("", "files") and self.shards:
            raise FleetError(
                f"--follow {self.follow} and --shards exclude each other: beside the rows of read-only servers, saves "
                "can be followed alone. Give --follow files"
            )
        if not 0 <= self.grpc_port < 1 << 16 or (self.grpc_port and self.grpc_port == self.port):
            raise FleetError(f"--grpc_port: expected a port other than --port {self.port}, found {self.grpc_port}")
        if self.backups and not self.shards:
            raise FleetError("--backups are second servers of shards: add --shards")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise FleetError("--tls_cert and --tls_key go together: give both files, or none")
        for field in ("tls_cert", "tls_key", "token_file"):
            path = getattr(self, field)
            if path and not os.path.isfile(path):
                raise FleetError(f"--{field}: there is no file {path}")
        name = self.name or re.split(r"[/:]", self.model.rstrip("/"))[-1] or "model"
        if not re.fullmatch(r"[\w.-]{1,128}", name):
            raise FleetError(f"--name: expected letters, digits, '.', '-' and '_', found {name!r}")
        return msgspec.structs.replace(self, name=name)

    def _check_ranges(self) -> None:
        for field in ("workers", "max_batch", "max_queue", "max_body", "max_connections", "threads"):
            if getattr(self, field) < 1:
                raise FleetError(f"--{field}: expected a number of at least 1, found {getattr(self, field)}")
        if self.max_queue < self.max_batch:
            raise FleetError(f"--max_queue {self.max_queue} is less than --max_batch {self.max_batch}: raise it")
        for field in ("timeout_s", "max_queue_s"):
            if not 0 < getattr(self, field) <= LONGEST_TIMEOUT:
                raise FleetError(
                    f"--{field}: expected seconds up to {LONGEST_TIMEOUT:g}, found {getattr(self, field):g}"
                )


class WorkerStart(msgspec.Struct, frozen=True):
    """What the launcher passes to a process, as its argument."""

    settings: ServeSettings
    worker: int
    socket: int  # descriptors
    alive: int  # reading from it ends when the launcher ends
    ready: int  # gets a byte when requests are answered
    metrics: str  # a path


def check_files(settings: ServeSettings) -> None:
    """Raises FleetError for files that a serving process could not use: before it has loaded a model."""
    token_of(settings)
    if settings.tls_cert:
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_password)
        except (ssl.SSLError, OSError, ValueError) as error:
            raise FleetError(
                f"--tls_cert {settings.tls_cert}, --tls_key {settings.tls_key}: expected a certificate and its private "
                f"key without a password, both as PEM; {error}"
            ) from None
    if settings.access_log not in ("", "-"):
        try:
            with open(settings.access_log, "ab"):
                pass
        except OSError as error:
            raise FleetError(f"--access_log {settings.access_log} cannot be written: {error.strerror}") from None


def _no_password() -> str:
    """Refuse a key with a password, for which the terminal would be asked otherwise."""
    raise ValueError("this key has one")


def token_of(settings: ServeSettings) -> bytes:
    """The bearer token; empty if none is required."""
    if not settings.token_file:
        return b""
    try:
        with open(settings.token_file, "rb") as file:
            token = file.read(4097).strip()
    except OSError as error:
        raise FleetError(f"--token_file {settings.token_file} cannot be read: {error.strerror}") from None
    if not 16 <= len(token) <= 4096:
        raise FleetError(f"--token_file {settings.token_file}: expected a token of 16 to 4096 bytes")
    return token
