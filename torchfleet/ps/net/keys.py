"""Keys of a fleet: one CURVE pair per role, in a folder. A client with a role's secret key may send its commands.

server.key  worker.key  first_worker.key  launcher.key               public, on every machine
*.key_secret                                                          secret, only where that role runs
"""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path

import zmq
import zmq.auth

from torchfleet.base.errors import SecurityError
from torchfleet.ps.net.wire import Role

SERVER = "server"
# A server uses the same key to serve and to connect to another replica of its shard.
_NAMES = {
    Role.WORKER: "worker",
    Role.FIRST_WORKER: "first_worker",
    Role.LAUNCHER: "launcher",
    Role.SERVER: SERVER,
}


def keygen(folder: str | Path) -> list[Path]:
    """Make a set of keys in a new or empty folder, and return the files. Never overwrites existing keys."""
    path = Path(folder)
    if not zmq.has("curve"):
        raise SecurityError("this build of ZeroMQ has no CURVE encryption: install pyzmq from PyPI's wheels")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SecurityError(f"{path} is not an empty folder: choose another, or remove the old keys yourself")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    old_mask = os.umask(0o077)  # other users can never read the secret keys, not even while they are written
    try:
        for name in _NAMES.values():
            zmq.auth.create_certificates(str(path), name)
    finally:
        os.umask(old_mask)
    return sorted(path.iterdir())


class KeyFolder:
    """Reads keys from a folder as they are needed. Raises SecurityError, which names a missing key."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder)
        if not self._path.is_dir():
            raise SecurityError(f"no folder of keys at {self._path}: make one with `fleetrun --keygen {self._path}`")

    def server_pair(self) -> tuple[bytes, bytes]:
        return self._pair(SERVER)

    def server_public(self) -> bytes:
        return self._load(f"{SERVER}.key")[0]

    def client_pair(self, role: Role) -> tuple[bytes, bytes]:
        return self._pair(_NAMES[role])

    def roles(self) -> dict[str, Role]:
        """Public key → role, of the clients that a server accepts."""
        return {self._load(f"{name}.key")[0].decode(): role for role, name in _NAMES.items()}

    def _pair(self, name: str) -> tuple[bytes, bytes]:
        public, secret = self._load(f"{name}.key_secret")
        if secret is None:
            raise SecurityError(f"{self._path / name}.key_secret holds no secret key")
        return public, secret

    def _load(self, file: str) -> tuple[bytes, bytes | None]:
        path = self._path / file
        if not path.is_file():
            raise SecurityError(f"the key {path} is missing: copy it here from the folder that --keygen made")
        try:
            return zmq.auth.load_certificate(path)
        except (OSError, ValueError) as error:
            raise SecurityError(f"{path} is not a key file: {error}") from None


def is_private(endpoint: str) -> bool:
    """Whether an address is reachable from this machine only: ipc, or a loopback address."""
    if not endpoint.startswith("tcp://"):
        return endpoint.startswith(("ipc://", "inproc://"))  # others, such as tipc://, leave the machine
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # "*", the name of an interface, or an unknown name
    return all(ipaddress.ip_address(address).is_loopback for address in found)


def require_keys(endpoint: str, keys: KeyFolder | None, insecure: bool) -> None:
    """Raise SecurityError if other machines can reach `endpoint` and there are neither keys nor `insecure`."""
    if keys is None and not insecure and not is_private(endpoint):
        raise SecurityError(
            f"{endpoint} can be reached from other machines, and no keys are given. Make keys (`fleetrun --keygen "
            "DIR`) and set FLEET_KEY_DIR or --key_dir; or say --insecure if everyone on this network may read and "
            "change the model."
        )
