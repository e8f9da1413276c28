"""Private folders of jobs on one machine: they hold keys or sockets that no other user can access.

torchfleet-UID/          see own_folders.py
    job-XXXXXXXX/        one job's; locked as long as its launcher lives
        servers          host:port of every server, one per line
        keys/            the job's own keys; or
        HOST:PORT        the socket of a server
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from torchfleet.base.errors import SecurityError
from torchfleet.base.own_folders import OwnFolder, is_alive, user_folder
from torchfleet.base.ownership import check_own
from torchfleet.ps.net.addresses import endpoint_in
from torchfleet.ps.net.keys import keygen
from torchfleet.ps.net.replica_channels import SEPARATOR

KEYS, IPC = "keys", "ipc"
_JOB, _SERVERS, _KEYS = "job", "servers", "keys"
_LONGEST = 107  # bytes that the kernel allows for the path of a socket


@dataclass(frozen=True)
class Way:
    """How clients reach a job's servers: over tcp with keys, over sockets in a folder, or over plain tcp if neither is
    set. `address_book` has the addresses of servers that may move."""

    key_dir: str | None = None
    socket_dir: str | None = None
    address_book: str | None = None

    def endpoint(self, place: str) -> str:
        """The address to listen on or to connect to, for the server named `place` (host:port). For a server with
        replicas it has the addresses of all replicas."""
        if SEPARATOR in place:
            return SEPARATOR.join(map(self.endpoint, place.split(SEPARATOR)))
        if self.address_book:
            return endpoint_in(self.address_book, place)
        return f"ipc://{_socket(self.socket_dir, place)}" if self.socket_dir else f"tcp://{place}"

    def check(self) -> None:
        """Raise SecurityError if other users can access the folder of sockets."""
        try:
            if self.socket_dir:
                check_own(Path(self.socket_dir))
        except OSError as error:
            raise SecurityError(f"no folder of sockets (FLEET_SOCKET_DIR): {error}. Make it with mode 0700.") from None


class PrivateJob:
    """The folder of a job on this machine alone. The launcher makes and removes it."""

    def __init__(self, places: Sequence[str], kind: str) -> None:
        """`kind`: KEYS or IPC. Raises SecurityError if the folder cannot be made, or a port is in use."""
        self._held: list[socket.socket] = []
        try:
            self._folder = OwnFolder(_JOB)
        except (OSError, SecurityError) as error:
            raise SecurityError(
                f"no private folder for this job can be made: {error}. Set TMPDIR to a folder of your own; or say "
                "--plain if every user of this machine may read and change the model."
            ) from None
        self._path = self._folder.path
        try:
            self.way = self._fill(places, kind)
        except BaseException:
            self.close()
            raise

    def _fill(self, places: Sequence[str], kind: str) -> Way:
        (self._path / _SERVERS).write_text("".join(f"{place}\n" for place in places))
        if kind == KEYS:
            keygen(self._path / _KEYS)
            return Way(key_dir=str(self._path / _KEYS))
        for place in places:
            if len(os.fsencode(_socket(str(self._path), place))) > _LONGEST:
                raise SecurityError(
                    f"the path of a socket may have {_LONGEST} bytes, and {_socket(str(self._path), place)} is longer: "
                    "set TMPDIR to a shorter folder, or say --private keys"
                )
            self._held.append(_hold(place))
        return Way(socket_dir=str(self._path))

    def close(self) -> None:
        """Remove the folder with its contents."""
        for held in self._held:
            held.close()
        self._folder.close()


def way_in(endpoints: Sequence[str], key_dir: str | None) -> tuple[list[str], str | None]:
    """The addresses to connect to, and the folder of keys, for servers that a user names by `endpoints`.

    If the servers belong to a running private job of this user, returns those of the job; else the arguments unchanged.
    """
    places = [endpoint.replace("tcp://", "") for endpoint in endpoints]
    way = _way_to([each for place in places for each in place.split(SEPARATOR)])
    return ([way.endpoint(place) for place in places], way.key_dir) if way else (list(endpoints), key_dir)


def _way_to(places: Sequence[str]) -> Way | None:
    folder = user_folder()
    try:
        check_own(folder)
        jobs = sorted(folder.glob(f"{_JOB}-*"))
    except (OSError, SecurityError):
        return None
    for job in jobs:
        with contextlib.suppress(OSError):
            if set(places) <= set((job / _SERVERS).read_text().split()) and is_alive(job):
                return Way(str(job / _KEYS), None) if (job / _KEYS).is_dir() else Way(None, str(job))
    return None


def _socket(folder: str | None, place: str) -> str:
    return f"{folder}/{quote(place, safe=':[]')}"


def _hold(place: str) -> socket.socket:
    """Bind the port without listening on it, so that no other job can use the same name for a server."""
    host, _, port = place.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    held = socket.socket(family)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        held.bind((host.strip("[]"), int(port)))
    except OSError as error:
        held.close()
        raise SecurityError(f"cannot take {place} for a server: {error}. Is the port in use?") from None
    return held
