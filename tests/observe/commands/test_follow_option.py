"""What `--follow` takes, and `fleet rollback`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.chains import PLAIN, Chain

from torchfleet.apps.serve.versions.follow_process import write_settings
from torchfleet.apps.serve.versions.follower import Follower, FollowSettings
from torchfleet.base.errors import FleetError
from torchfleet.observe.commands.command import main
from torchfleet.observe.commands.follow_option import followed_servers


def test_servers_are_named_or_left_out() -> None:
    assert followed_servers("files") == []
    assert followed_servers("servers=a:7000,ipc:///b") == ["tcp://a:7000", "ipc:///b"]


@pytest.mark.parametrize("asked", ["yes", "servers=", "servers=a:7000,b", "/no/such/folder"])
def test_anything_else_is_an_error(asked: str) -> None:
    with pytest.raises(FleetError):
        followed_servers(asked)


def test_a_folder_without_a_running_job_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FleetError):
        followed_servers(str(tmp_path))


def test_versions_are_listed_and_only_a_running_writer_goes_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, work = Chain(str(tmp_path / "model"), (PLAIN,)), tmp_path / "work"
    work.mkdir()
    settings = FollowSettings(str(tmp_path / "model"), spacing=0.0)
    write_settings(work, settings)
    follower = Follower(work, settings)
    for number in range(3):
        chain.save(1, {"plain": [(1, number)]}, full=number == 0)
        follower.step()
    follower.close()
    assert main(["rollback", str(work)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == [1, 2, 3]
    assert [line.endswith("current") for line in lines] == [False, False, True]
    assert main(["rollback", str(work), "--to", "1"]) == 1  # nothing would obey
    assert main(["rollback", str(work), "--to", "77"]) == 1
    assert main(["rollback", str(tmp_path / "model")]) == 1
    with pytest.raises(SystemExit):  # 0 is no version, and not a way to go on
        main(["rollback", str(work), "--to", "0"])
    assert not (work / "command.json").exists()
