"""Options about watching on the command line of fleetrun."""

from __future__ import annotations

import pytest

from torchfleet.launch.cli import parser
from torchfleet.watch.watchers import ANY_PORT, parse_with_ports, watching_of


@pytest.mark.parametrize(
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
    assert "expected a port from 0 to 65535" in capsys.readouterr().err
