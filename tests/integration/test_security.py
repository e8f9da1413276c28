"""Keys and roles: who is let in, what a key allows, and that a server without keys does not start by accident."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import zmq
from support import processes
from support.cases import each_of
from support.fleets import WAIT, ServerThread
from support.messages import naming

from torchfleet.base.errors import PermissionRefused, SecurityError, ServerUnreachable
from torchfleet.ps.net.keys import KeyFolder, is_private, keygen, require_keys
from torchfleet.ps.net.sockets import Listener, SocketChannel
from torchfleet.ps.net.wire import Command, Message, Role, encode
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

SHORT = Patience(timeout=1.0, retries=1)  # of those who are not answered
PATIENT = Patience(timeout=WAIT, retries=1)
SPEC = TableSpec("t", dim=1)
NAMES = ["first_worker", "launcher", "server", "worker"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "fleet"
    keygen(path)
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[ServerThread]:
    with ServerThread("tcp://127.0.0.1:0", KeyFolder(folder)) as made:
        yield made


def connect(
    server: ServerThread, keys: Path | None, role: Role, claims: Role | None = None, patience: Patience = PATIENT
) -> Client:
    """A client with the key of one role, whose messages claim another."""
    channel = SocketChannel(server.endpoint, KeyFolder(keys) if keys else None, role)
    return Client([channel], names=[server.endpoint], role=claims or role, patience=patience)


class TestKeygen:
    def test_every_role_gets_a_pair_of_its_own(self, folder: Path) -> None:
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            f"{name}.{kind}" for name in NAMES for kind in ("key", "key_secret")
        )
        keys = KeyFolder(folder)
        pairs = [keys.server_pair(), *(keys.client_pair(role) for role in Role)]
        assert len({key for pair in pairs for key in pair}) == 8
        assert keys.server_public() == keys.server_pair()[0]
        assert keys.roles() == {keys.client_pair(role)[0].decode(): role for role in Role}

    @pytest.mark.parametrize("mask", [0o000, 0o022, 0o077], ids=oct)
    def test_nobody_else_can_read_the_secrets_whatever_the_mask(self, tmp_path: Path, mask: int) -> None:
        before = os.umask(mask)
        try:
            files = keygen(tmp_path / "new" / "keys")
        finally:
            left = os.umask(before)
        assert left == mask, "the mask of the process is to be as it was"
        for path in files:
            if path.name.endswith("_secret"):
                assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "new" / "keys").stat().st_mode) & 0o077 == 0

    def test_it_refuses_a_folder_with_something_in_it(self, tmp_path: Path) -> None:
        (tmp_path / "old").write_text("precious")
        with pytest.raises(SecurityError, match=naming(tmp_path)):
            keygen(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["old"]

    def test_it_never_overwrites_keys(self, tmp_path: Path) -> None:
        first = {path: path.read_bytes() for path in keygen(tmp_path / "keys")}
        with pytest.raises(SecurityError, match=naming(tmp_path / "keys")):
            keygen(tmp_path / "keys")
        assert {path: path.read_bytes() for path in first} == first

    def test_it_refuses_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SecurityError, match=naming(tmp_path / "file")):
            keygen(tmp_path / "file")


class TestKeyFolder:
    def test_a_missing_folder_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(SecurityError, match=naming(f"{tmp_path}/none")):
            KeyFolder(tmp_path / "none")

    @pytest.mark.parametrize("name", NAMES)
    def test_a_missing_key_is_named(self, folder: Path, tmp_path: Path, name: str) -> None:
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        (copy / f"{name}.key_secret").unlink()
        roles = {"worker": Role.WORKER, "first_worker": Role.FIRST_WORKER, "launcher": Role.LAUNCHER}
        with pytest.raises(SecurityError, match=naming(f"{copy}/{name}.key_secret")):
            KeyFolder(copy).server_pair() if name == "server" else KeyFolder(copy).client_pair(roles[name])

    @pytest.mark.parametrize("content", ["", "not a key", "curve\n    secret-key = 5\n"])
    def test_a_file_that_is_no_key_is_named(self, folder: Path, tmp_path: Path, content: str) -> None:
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        (copy / "server.key_secret").write_text(content)
        with pytest.raises(SecurityError, match=r"server\.key_secret"):
            KeyFolder(copy).server_pair()

    def test_a_public_key_in_the_place_of_a_secret_is_refused(self, folder: Path, tmp_path: Path) -> None:
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        shutil.copy(copy / "worker.key", copy / "worker.key_secret")
        with pytest.raises(SecurityError, match=naming("worker.key_secret")):
            KeyFolder(copy).client_pair(Role.WORKER)

    def test_a_worker_needs_only_its_own_secret(self, folder: Path, tmp_path: Path, server: ServerThread) -> None:
        for name in ("server.key", "worker.key_secret"):
            shutil.copy(folder / name, tmp_path)
        with closing(connect(server, tmp_path, Role.WORKER)) as client:
            client.ping()
        with pytest.raises(SecurityError, match=naming("launcher.key_secret")):
            connect(server, tmp_path, Role.LAUNCHER)


class TestRoles:
    @pytest.mark.parametrize("claims", Role, ids=lambda role: f"claims {role.name}")
    @pytest.mark.parametrize("role", Role, ids=lambda role: f"is {role.name}")
    def test_the_key_decides_whatever_the_message_claims(
        self, server: ServerThread, folder: Path, role: Role, claims: Role
    ) -> None:
        with closing(connect(server, folder, role, claims)) as client:
            if role is Role.SERVER:  # may speak to its backup, or its primary, alone
                with pytest.raises(PermissionRefused, match=naming("PING", "server")):
                    client.ping()
                return
            client.ping()
            if role is Role.WORKER:
                with pytest.raises(PermissionRefused, match=naming("CREATE_TABLE", "worker")):
                    client.create_table(SPEC)
            else:
                client.create_table(SPEC)
                assert client.pull("t", [1, 2]).result().shape == (2, 1)
            if role is Role.LAUNCHER:
                client.stop_servers()
                server.join()
            else:
                with pytest.raises(PermissionRefused, match=naming("STOP", "launcher")):
                    client.stop_servers()
                client.ping()

    def test_requests_of_many_clients_are_told_apart(self, server: ServerThread, folder: Path) -> None:
        first, worker = connect(server, folder, Role.FIRST_WORKER), connect(server, folder, Role.WORKER)
        with closing(first), closing(worker):
            first.create_table(SPEC)
            worker.attach(SPEC)
            for _ in range(20):
                worker.push("t", [1], np.ones((1, 1), np.float32))
                first.erase("t", [1])
                with pytest.raises(PermissionRefused):
                    worker.erase("t", [1])
            worker.flush()


class TestStrangers:
    @pytest.fixture
    def insider(self, server: ServerThread, folder: Path) -> Iterator[Client]:
        with closing(connect(server, folder, Role.FIRST_WORKER)) as client:
            client.create_table(SPEC)
            yield client

    def stays_outside(self, stranger: Client, server: ServerThread, insider: Client) -> None:
        """It gets no answer, the server does not even see its request, and others are served meanwhile."""
        before = server.server.state.counters.num_requests
        with closing(stranger), pytest.raises(ServerUnreachable, match=server.endpoint):
            stranger.ping()
        assert server.server.state.counters.num_requests == before
        assert insider.pull("t", [1]).result().tolist() == [[0]]

    def test_one_without_keys_gets_no_answer(self, server: ServerThread, insider: Client) -> None:
        self.stays_outside(connect(server, None, Role.LAUNCHER, patience=SHORT), server, insider)

    def test_one_with_keys_of_its_own_gets_no_answer(
        self, server: ServerThread, insider: Client, folder: Path, tmp_path: Path
    ) -> None:
        keygen(tmp_path / "own")
        shutil.copy(folder / "server.key", tmp_path / "own" / "server.key")  # it even knows the server's public key
        self.stays_outside(connect(server, tmp_path / "own", Role.LAUNCHER, patience=SHORT), server, insider)

    def test_one_with_the_servers_own_key_is_refused_all_that_clients_ask(
        self, server: ServerThread, insider: Client, folder: Path, tmp_path: Path
    ) -> None:
        """It is another replica of the server, whatever it claims to be."""
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        shutil.copy(copy / "server.key_secret", copy / "launcher.key_secret")
        with closing(connect(server, copy, Role.LAUNCHER)) as client:
            with pytest.raises(PermissionRefused, match=naming("STOP", "launcher", "server")):
                client.stop_servers()
            with pytest.raises(PermissionRefused, match=naming("PING", "server")):
                client.ping()
        insider.ping()

    def test_one_with_a_public_key_but_not_its_secret_gets_no_answer(
        self, server: ServerThread, insider: Client, folder: Path
    ) -> None:
        stranger = SocketChannel(server.endpoint)
        stranger._pair = (KeyFolder(folder).client_pair(Role.LAUNCHER)[0], zmq.curve_keypair()[1])
        stranger._server_key = KeyFolder(folder).server_public()
        stranger.reconnect()
        self.stays_outside(Client([stranger], names=[server.endpoint], patience=SHORT), server, insider)

    def test_a_client_does_not_talk_to_a_server_with_another_key(self, server: ServerThread, tmp_path: Path) -> None:
        keygen(tmp_path / "others")
        stranger = connect(server, tmp_path / "others", Role.WORKER, patience=SHORT)
        with closing(stranger) as client, pytest.raises(ServerUnreachable):
            client.ping()

    def test_not_one_byte_of_a_reply_goes_to_a_plain_socket(self, server: ServerThread, insider: Client) -> None:
        """All it ever gets is the greeting of ZeroMQ, 64 bytes, which is the same for everybody."""
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        null_greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        request = b"".join(bytes([0, len(frame)]) + bytes(frame) for frame in encode(Message(Command.PING, 3)))
        with socket.create_connection((host, int(port)), timeout=WAIT) as plain:
            plain.sendall(null_greeting[:11])  # it goes on when it knows the version
            greeting = _read(plain, 64)
            plain.settimeout(0.5)
            with contextlib.suppress(OSError):
                plain.sendall(null_greeting[11:] + ready + request)
            rest = _read(plain, 4096)
        assert len(greeting) == 64
        assert greeting[12:32].rstrip(b"\0") == b"CURVE"
        assert rest == b""
        insider.ping()

    def test_what_travels_is_encrypted(self, server: ServerThread, folder: Path) -> None:
        """A man in the middle who copies all bytes in both directions reads nothing of the messages."""
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        seen = bytearray()
        with socket.create_server(("127.0.0.1", 0)) as middle:

            def forward(source: socket.socket, sink: socket.socket) -> None:
                try:
                    while data := source.recv(65536):
                        seen.extend(data)
                        sink.sendall(data)
                except OSError:
                    pass

            def accept() -> None:
                near, _ = middle.accept()
                far = socket.create_connection((host, int(port)), timeout=WAIT)
                for pair in ((near, far), (far, near)):
                    Thread(target=forward, args=pair, daemon=True).start()
                ends.extend((near, far))

            ends: list[socket.socket] = []
            Thread(target=accept, daemon=True).start()
            keys = KeyFolder(folder)
            channel = SocketChannel(f"tcp://127.0.0.1:{middle.getsockname()[1]}", keys, Role.FIRST_WORKER)
            with closing(Client([channel], patience=PATIENT)) as client:
                client.create_table(TableSpec("a rather secret name", dim=1))
                client.assign("a rather secret name", [1], np.full((1, 1), 1234.5, np.float32))
            for end in ends:
                end.close()
        assert len(seen) > 500
        for secret in (b"TFLT", b"a rather secret name", np.float32(1234.5).tobytes()):
            assert secret not in seen


class TestAddresses:
    @each_of(
        "endpoint",
        ["tcp://127.0.0.1:0", "tcp://127.9.9.9:1", "tcp://localhost:5", "tcp://[::1]:0", "ipc:///tmp/x", "ipc://x"],
    )
    def test_these_are_of_this_machine_only(self, endpoint: str) -> None:
        assert is_private(endpoint)
        require_keys(endpoint, None, insecure=False)

    @each_of(
        "endpoint",
        [
            "tcp://*:0",
            "tcp://0.0.0.0:7000",
            "tcp://0:7000",
            "tcp://[::]:0",
            "tcp://10.0.0.1:7000",
            "tcp://192.0.2.1:0",
            "tcp://eth0:7000",
            "tcp://no-such-host.invalid:1",
            "tcp://:7000",
            "tcp://7000",
            "tipc://{5555,0,0}",
            "ws://0.0.0.0:80",
        ],
    )
    def test_others_may_reach_these(self, endpoint: str) -> None:
        assert not is_private(endpoint)
        with pytest.raises(SecurityError, match=naming(endpoint)):
            require_keys(endpoint, None, insecure=False)
        require_keys(endpoint, None, insecure=True)

    @pytest.mark.parametrize("endpoint", ["tcp://*:0", "tcp://0.0.0.0:0"])
    def test_a_listener_refuses_to_serve_strangers_without_keys(self, endpoint: str) -> None:
        with pytest.raises(SecurityError, match="--insecure"):
            Listener(endpoint)

    def test_it_may_bind_when_told_so_or_with_keys(self, folder: Path) -> None:
        Listener("tcp://*:0", insecure=True).close()
        Listener("tcp://*:0", KeyFolder(folder)).close()

    def run_server(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchfleet.server", *options]
        environment = {name: value for name, value in os.environ.items() if name != "FLEET_KEY_DIR"}
        return processes.run(command, timeout=200, stderr=subprocess.PIPE, env=environment)

    def test_a_server_process_refuses_to_start_without_keys(self) -> None:
        ended = self.run_server("--endpoint", "tcp://0.0.0.0:0")
        assert ended.returncode == 2
        assert ended.stdout == ""
        assert "tcp://0.0.0.0:0" in ended.stderr
        assert "fleetrun --keygen" in ended.stderr

    @pytest.mark.parametrize("missing", ["server.key_secret", "worker.key"])
    def test_a_server_process_names_a_missing_key(self, folder: Path, tmp_path: Path, missing: str) -> None:
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        (copy / missing).unlink()
        ended = self.run_server("--endpoint", "tcp://127.0.0.1:0", "--key_dir", str(copy))
        assert ended.returncode == 2
        assert f"{copy}/{missing}" in ended.stderr

    def test_a_server_process_names_a_missing_folder(self, tmp_path: Path) -> None:
        ended = self.run_server("--key_dir", str(tmp_path / "none"))
        assert ended.returncode == 2
        assert f"{tmp_path}/none" in ended.stderr


def _read(source: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes` bytes, or fewer if the other side stops sending."""
    received = b""
    with contextlib.suppress(OSError):
        while len(received) < num_bytes and (chunk := source.recv(num_bytes - len(received))):
            received += chunk
    return received
