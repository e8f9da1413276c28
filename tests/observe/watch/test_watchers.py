"""Options about watching on the command line of fleetrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cases import each_of
from support.extras import OTLP, needing
from support.messages import lines_naming, naming

from torchfleet import notebook
from torchfleet.base.errors import FleetError, RoleError
from torchfleet.launch.cli import main, options_from, parser
from torchfleet.observe.watch.watchers import ANY_PORT, parse_with_ports, watching_of


@each_of(
    ("line", "port", "script", "arguments"),
    [
        ("--dashboard train.py --epochs 3", ANY_PORT, "train.py", ["--epochs", "3"]),
        ("--dashboard 8500 train.py", 8500, "train.py", []),
        ("--dashboard=8500 train.py", 8500, "train.py", []),
        ("--dashboard --server_num 2 train.py", ANY_PORT, "train.py", []),
        ("--dashboard 0 --server_num 2 train.py", 0, "train.py", []),
        ("train.py --dashboard", None, "train.py", ["--dashboard"]),
        ("train.py --dashboard here 3", None, "train.py", ["--dashboard", "here", "3"]),
        ("--dashboard train.py --dashboard --x", ANY_PORT, "train.py", ["--dashboard", "--x"]),
        ("train.py", None, "train.py", []),
    ],
)
def test_a_dashboard_has_a_port_or_none_and_the_script_is_no_port(
    line: str, port: int | None, script: str, arguments: list[str]
) -> None:
    options = parse_with_ports(parser(), line.split())
    assert (watching_of(options).dashboard, options.script, options.arguments) == (port, script, arguments)


@pytest.mark.parametrize("port", ["65536", "-1", "²"])
def test_what_is_no_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_with_ports(parser(), [f"--dashboard={port}", "train.py"])
    assert lines_naming(capsys.readouterr().err, 0, 65535)


def test_a_dashboard_may_be_asked_for_from_python() -> None:
    for given, port in ((True, ANY_PORT), (8500, 8500), (0, 0), (None, None)):
        options = options_from("run", {"dashboard": given}, ["train.py", "--dashboard", "x"])
        assert (options.dashboard, options.script, options.arguments) == (port, "train.py", ["--dashboard", "x"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"server_num": 1, "sever_num": 2}, "--sever_num"),
        ({"server_num": 1, "dashboard": 1 << 20}, "--dashboard 0 65535"),
    ],
)
def test_the_option_from_python_that_is_wrong_is_named_alone(
    given: dict[str, int], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RoleError, match=naming(*message.split())):
        options_from("run", given, ["train.py"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("wrong", "message"), [({"args": 3}, "args 3"), ({"worker_num": "2"}, "worker_num '2'")])
def test_a_call_from_a_cell_that_cannot_be_made_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError, match=naming(*message.split())):
        notebook.run(print, **wrong)


@pytest.mark.parametrize("name", ["dry_run", "keygen"])
def test_what_starts_no_job_is_refused_from_python(name: str) -> None:
    with pytest.raises(RoleError, match=naming(f"fleetrun --{name}")):
        options_from("run", {name: "keys" if name == "keygen" else True}, ["train.py"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--simulate --dashboard 0", "leave --dashboard out"),
        ("--simulate --verbose --trace_every 5", "leave --verbose, --trace_every out"),
        ("--nproc_per_node 2 --verbose", "leave --verbose out"),
    ],
)
def test_what_a_job_has_no_use_for_is_refused(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert main([*line.split(), "--dry_run", str(tmp_path / "train.py")]) == 2
    assert message in capsys.readouterr().err


@needing(OTLP)
@pytest.mark.parametrize("job", ["--server_num 1 --worker_num 1", "--cluster ray", "--nproc_per_node 2"])
def test_every_launcher_tells_its_processes_how_much_to_tell(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    verbose = [] if "nproc" in job else ["--verbose"]
    assert main([*job.split(), *verbose, "--trace_every", "5", "--dry_run", str(tmp_path / "train.py")]) == 0
    told = capsys.readouterr().out
    assert (told.count("FLEET_TRACE_EVERY=5"), told.count("FLEET_VERBOSE=1")) == (2, 2 * len(verbose))
