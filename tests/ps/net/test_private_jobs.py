"""Private folders of jobs: another user finds no way in, this one finds it by the address that he knows."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.fleets import ServerThread
from support.messages import naming

from torchfleet.base.errors import SecurityError, ServerUnreachable
from torchfleet.launch.roles import free_ports
from torchfleet.observe.commands.command import main as fleet
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import IPC, KEYS, PrivateJob, Way, way_in
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

kinds = pytest.mark.parametrize("kind", [KEYS, IPC])
NOBODY = 65534


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where jobs have their folders in this test; short, as the path of a socket must be."""
    short = Path(tempfile.mkdtemp(prefix="t"))
    short.chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    yield short / f"torchfleet-{os.getuid()}"
    shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def place() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


def served(way: Way, place: str) -> ServerThread:
    return ServerThread(way.endpoint(place), KeyFolder(way.key_dir) if way.key_dir else None)


@kinds
def test_only_its_user_can_enter_and_nothing_is_left(folder: Path, place: str, kind: str) -> None:
    with closing(PrivateJob([place], kind)) as job, served(job.way, place):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        (made,) = folder.iterdir()
        assert stat.S_IMODE(made.stat().st_mode) == 0o700
        assert [path for path in made.rglob("*.key_secret") if stat.S_IMODE(path.stat().st_mode) != 0o600] == []
        assert Path(job.way.key_dir or job.way.socket_dir or "").is_relative_to(made)
    assert list(folder.iterdir()) == []


@kinds
def test_the_commands_of_its_user_find_the_way_in(
    folder: Path, place: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(PrivateJob([place], kind)) as job, served(job.way, place) as server:
        server.server.state.add_table(TableSpec("words", dim=2))
        assert fleet(["stats", place, "--json"]) == 0
        assert list(json.loads(capsys.readouterr().out)["servers"]) == [f"tcp://{place}"]
        assert fleet(["inspect", f"tcp://{place}", "--json"]) == 0
        assert "words" in json.loads(capsys.readouterr().out)["servers"][f"tcp://{place}"]["tables"]
    assert way_in([f"tcp://{place}"], None) == ([f"tcp://{place}"], None), "it has ended"


def test_without_the_jobs_keys_there_is_no_answer(folder: Path, place: str) -> None:
    with closing(PrivateJob([place], KEYS)) as job, served(job.way, place):
        stranger = Client.connect([f"tcp://{place}"], patience=Patience(timeout=0.5, retries=1))
        with closing(stranger), pytest.raises(ServerUnreachable):
            stranger.ping()


def errno_of_connecting(path: str, user: int) -> int:
    """What this user's process gets when it connects to a socket; 0: it is let in."""
    child = os.fork()
    if child == 0:
        status = 255
        try:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            status = socket.socket(socket.AF_UNIX).connect_ex(path)
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_another_user_of_the_machine_cannot_connect(folder: Path, place: str) -> None:
    with closing(PrivateJob([place], IPC)) as job, served(job.way, place):
        path = job.way.endpoint(place).removeprefix("ipc://")
        assert stat.S_ISSOCK(Path(path).stat().st_mode)
        assert errno_of_connecting(path, user=0) == 0
        assert errno_of_connecting(path, user=NOBODY) == errno.EACCES
        host, port = place.split(":")
        with pytest.raises(ConnectionRefusedError):  # and the address is a name without a listener
            socket.create_connection((host, int(port)), timeout=1).close()


def test_what_a_killed_launcher_left_is_removed_and_a_running_one_is_not(folder: Path, place: str) -> None:
    with closing(PrivateJob([place], KEYS)) as running:
        left = Path(shutil.copytree(str(running.way.key_dir), folder / "job-left" / "keys"))
        (folder / "job-left" / "servers").write_text("127.0.0.1:1\n")
        assert way_in(["tcp://127.0.0.1:1"], None) == (["tcp://127.0.0.1:1"], None), "nobody runs it"
        PrivateJob([], KEYS).close()
        assert not left.exists()
        assert Path(str(running.way.key_dir)).is_dir()


def test_a_folder_that_another_prepared_is_refused(folder: Path, place: str) -> None:
    folder.mkdir(mode=0o700)
    folder.chmod(0o777)
    with pytest.raises(SecurityError, match=naming("TMPDIR", "--plain")):
        PrivateJob([place], KEYS)
    assert way_in([f"tcp://{place}"], None) == ([f"tcp://{place}"], None)


def test_a_place_that_is_taken_is_refused(folder: Path, place: str) -> None:
    host, port = place.split(":")
    with socket.create_server((host, int(port))), pytest.raises(SecurityError, match=naming(place)):
        PrivateJob([place], IPC)
    assert list(folder.iterdir()) == []


def test_a_path_that_is_too_long_for_a_socket_is_refused(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 25)))
    with pytest.raises(SecurityError, match=naming(107, "TMPDIR")):
        PrivateJob([place], IPC)


def test_a_folder_of_sockets_that_was_given_by_hand_must_be_the_users_own(tmp_path: Path) -> None:
    Way().check()
    tmp_path.chmod(0o700)
    Way(socket_dir=str(tmp_path)).check()
    tmp_path.chmod(0o777)
    with pytest.raises(SecurityError, match=naming(tmp_path)):
        Way(socket_dir=str(tmp_path)).check()
    with pytest.raises(SecurityError, match="FLEET_SOCKET_DIR"):
        Way(socket_dir=str(tmp_path / "none")).check()
