"""Variables of the environment: a misspelt name, or a value of no sense, is refused wherever they are read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.messages import names, naming
from support.paths import ROOT

import torchfleet as fleet
from torchfleet import server
from torchfleet.base.role.variables import NAMES
from torchfleet.errors import RoleError


def test_all_variables_that_the_sources_name_are_known() -> None:
    sources = [path for path in Path(ROOT, "torchfleet").rglob("*.py") if path.name != "variables.py"]
    texts = (path.read_text(encoding="utf-8") for path in sources)
    found = {name for text in texts for name in re.findall(r"\bFLEET_[A-Z0-9_]*[A-Z0-9](?![A-Z0-9_])", text)}
    assert found == NAMES


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("FLEET_DURABILTY", "FLEET_DURABILITY"),
        ("FLEET_LOGSTORE", "FLEET_LOG_STORE"),
        ("FLEET_FSYNC_SM", "FLEET_FSYNC_MS"),
        ("FLEET_WORKERS_TIMEOUT", "FLEET_WORKER_TIMEOUT"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_name_that_was_meant(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], misspelt: str, meant: str
) -> None:
    monkeypatch.setenv(misspelt, "log")
    with pytest.raises(RoleError, match=naming(misspelt, meant)):
        fleet.init()
    assert server.main(["--endpoint", "tcp://127.0.0.1:0"]) == 2
    assert names(capsys.readouterr().err, misspelt, meant)


def test_variables_of_the_user_may_begin_like_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FLEET_REGION", "FLEET_NAME", "FLEET_LOG_DIR", "FLEET_SIZE", "FLEET_HOME", "FLEET_VERSION"):
        monkeypatch.setenv(name, "1")
    fleet.init()
    assert fleet.worker_num() == 1
    fleet.reset()


class TestServersAlone:
    """`python -m torchfleet.server`, whose options have variables, too."""

    @pytest.mark.parametrize(
        "name", ["FLEET_FSYNC_MS", "FLEET_MIN_WORKERS", "FLEET_DURABILITY", "FLEET_ON_WORKER_LOSS", "FLEET_MAX_RESTART"]
    )
    def test_a_value_of_no_sense_is_refused_by_its_name(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        monkeypatch.setenv(name, "abc")
        assert server.main([]) == 2
        assert names(capsys.readouterr().err, name, "'abc'")

    @pytest.mark.parametrize("given", [("--log_store", "here"), ("--fsync_ms", "5"), ("--fsync_ms", "-1")])
    def test_options_of_a_log_that_is_not_kept_are_refused(
        self, capsys: pytest.CaptureFixture[str], given: tuple[str, str]
    ) -> None:
        assert server.main([*given]) == 2
        told = capsys.readouterr().err
        assert names(told, "--fsync_ms") or names(told, given[0], "--durability log")

    def test_a_log_without_a_folder_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("FLEET_DURABILITY", "log")
        assert server.main([]) == 2
        assert names(capsys.readouterr().err, "--log_store", "FLEET_LOG_STORE")
