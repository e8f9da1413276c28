"""Whether a process listens at an address: only where the kernel of this machine knows it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from torchfleet.ps.net.refused import is_refused


def test_a_socket_that_is_listened_to_is_not_refused_and_a_closed_one_is(tmp_path: Path) -> None:
    path = str(tmp_path / "server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        assert not is_refused(f"ipc://{path}")
    assert is_refused(f"ipc://{path}"), "as a killed process leaves it"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_of_loopback(host: str) -> None:
    shown = f"[{host}]" if ":" in host else host
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        endpoint = f"tcp://{shown}:{listener.getsockname()[1]}"
        assert is_refused(endpoint), "bound, and nobody listens"
        listener.listen(1)
        assert not is_refused(endpoint)


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.1:7000", "tcp://server-0:7000", "book:///book#a:1", "ipc:///none"])
def test_what_is_not_known_here_is_not_refused(endpoint: str) -> None:
    assert not is_refused(endpoint)
