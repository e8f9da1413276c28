"""Packages of extras: what is said where one is missing, and when."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.messages import names, naming

from torchfleet.base.errors import FleetError, MissingPackage
from torchfleet.base.extras import check_installed, required
from torchfleet.base.tracing.otlp import EXPORTER
from torchfleet.launch.cli import main


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "email.mime", None)
    with pytest.raises(
        MissingPackage, match=naming("--option", "email", "pip install 'torchfleet[mail]', everywhere")
    ) as raised:
        required("email.mime", "--option", "mail", ", everywhere")
    assert isinstance(raised.value, FleetError)
    assert isinstance(raised.value, ImportError)
    assert raised.value.name == "email"
    for module in ("email.no_such", "email.mime.text", "no_such_package"):
        with pytest.raises(MissingPackage):
            check_installed(module, "--option", "mail")
    check_installed("email.message", "--option", "mail")
    assert required("email.message", "--option", "mail") is sys.modules["email.message"]


@pytest.mark.parametrize("user", ["--trace_every", "FLEET_TRACE_EVERY"])
def test_traces_without_their_package_are_refused_before_anything_starts(
    user: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    monkeypatch.setitem(sys.modules, EXPORTER.rpartition(".")[0], None)
    monkeypatch.delitem(sys.modules, EXPORTER, raising=False)  # another test may have imported it
    options = ["--trace_every", "5"] if user.startswith("-") else []
    if not options:
        monkeypatch.setenv(user, "5")
    assert main([*options, "--server_num", "1", "--worker_num", "1", "train.py"]) == 2
    told = capsys.readouterr().err
    assert names(told, user, "opentelemetry", "pip install 'torchfleet[otel]'")
    assert told.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
