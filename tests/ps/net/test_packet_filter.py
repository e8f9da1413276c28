"""A peer that makes libzmq abort, by a heartbeat on a connection that ends while the queue of its requests is full."""

from __future__ import annotations

import contextlib
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest
from support.paths import SCRIPTS

from torchfleet.ps.net.sockets import QUEUED_REQUESTS

WAIT = 60.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
MESSAGE = b"\x00\x01x"
NUM_MESSAGES = 4 * QUEUED_REQUESTS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="socket filters are Linux's")


def command(name: bytes, body: bytes) -> bytes:
    """A command frame of ZMTP 3."""
    text = bytes([len(name)]) + name + body
    return b"\x04" + bytes([len(text)]) + text


def hostile(port: int) -> socket.socket:
    """Fill the queue of a server, with a heartbeat behind it."""
    peer = socket.create_connection(("127.0.0.1", port), timeout=WAIT)
    peer.sendall(GREETING + command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"))
    greeting = b""
    while b"READY" not in greeting:
        greeting += peer.recv(4096)
    peer.sendall(MESSAGE * NUM_MESSAGES + command(b"PING", b"\0\0") + MESSAGE)
    time.sleep(0.3)  # the other side reads it as far as its queue goes
    return peer


def reset(peer: socket.socket) -> None:
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    time.sleep(0.2)


def attacked(kind: str, how: str) -> tuple[int, str]:
    """(status of the listening process, number of requests that it has read)."""
    wanted = NUM_MESSAGES + 1 if kind == "guarded" else 0
    arguments = [sys.executable, str(SCRIPTS / "slow_listener.py"), kind, how, str(wanted)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            peer = hostile(int(process.stdout.readline()))
            if how == "reset":
                reset(peer)
            said = []
            for _ in range(1 + (how == "shut")):
                process.stdin.write("\n")
                process.stdin.flush()
                said.append(process.stdout.readline().strip())
                time.sleep(0.2)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            return process.wait(WAIT), said[-1]
        finally:
            process.kill()


@pytest.mark.slow
def test_libzmq_alone_aborts() -> None:
    """If it does not any more, resets need not be ignored. On a busy machine, the queue may not be full in time."""
    assert any(attacked("plain", "reset")[0] == -signal.SIGABRT for _ in range(10))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", "shut"])
def test_a_listener_reads_all_requests_of_such_a_peer_and_lives_on(how: str) -> None:
    assert attacked("guarded", how) == (0, str(NUM_MESSAGES + 1))
