"""Folders of the logs of servers and their backups: made once, and missed when they are lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.messages import naming

from torchfleet.base.errors import RoleError
from torchfleet.base.role.process_settings import DURABILITY, LOG_STORE, log_folder
from torchfleet.launch.cli import main
from torchfleet.launch.endurance.durability import make_store
from torchfleet.ps.server.log.log_start import Start, write_start


def names(store: Path) -> list[str]:
    return sorted(path.name for path in store.iterdir())


def test_folders_of_both_replicas_are_made_once(tmp_path: Path) -> None:
    store = tmp_path / "store"
    given = {DURABILITY: "log", LOG_STORE: str(store)}
    make_store(given, (0, 1), (0, 1))
    assert names(store) == ["server-0", "server-0.replica1", "server-1", "server-1.replica1"]
    for server in range(2):
        write_start(log_folder(str(store), server), Start(1, 1, "run", 3))
    log_folder(str(store), 0, 1).rmdir()
    make_store(given, (0, 1), (0, 1))
    assert "server-0.replica1" not in names(store), "its replica says that it is missing"


def test_a_lost_folder_of_a_primary_beside_the_log_of_its_backup_is_missed(tmp_path: Path) -> None:
    store = tmp_path / "store"
    given = {DURABILITY: "log", LOG_STORE: str(store)}
    make_store(given, (0,), (0,))
    write_start(log_folder(str(store), 0, 1), Start(1, 1, "run", 3))
    log_folder(str(store), 0).rmdir()
    with pytest.raises(RoleError, match=naming("server-0.replica1", "server-0")):
        make_store(given, (0,), (0,))


def test_logs_and_backups_are_given_to_every_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--replicas", "2", "--durability", "log", "--log_store", str(tmp_path / "store")]
    assert main([*options, "--dry_run", __file__]) == 0
    out = capsys.readouterr().out
    assert out.count(f"{DURABILITY}=log") == 3
    assert out.count("FLEET_REPLICA=1") == 1
