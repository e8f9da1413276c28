"""What a server's socket bounds: frames of a message, unread replies, bytes and handshakes of strangers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from support.fleets import WAIT, ServerThread, keys_of
from support.messages import lines_naming, names
from zmq.utils import garbage

from torchfleet.base.errors import ServerBusy
from torchfleet.ps.net import doorkeeper, sockets, unread
from torchfleet.ps.net.doorkeeper import MAX_FIRST
from torchfleet.ps.net.keys import KeyFolder, keygen
from torchfleet.ps.net.sockets import SocketChannel, _socket
from torchfleet.ps.net.wire import MAX_ENTRY, Command, Message, Role, decode_reply, encode, unpack
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience

SPEC = TableSpec("t", dim=256)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)  # of ZMTP 3.0


@pytest.fixture
def server() -> Iterator[ServerThread]:
    with ServerThread("tcp://127.0.0.1:0") as made:
        yield made


@pytest.fixture
def raw(server: ServerThread) -> Iterator[zmq.Socket]:
    """A client that does as it likes."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as made:
        made.set(zmq.LINGER, 0)
        made.set(zmq.RCVTIMEO, int(WAIT * 1000))
        made.connect(server.endpoint)
        yield made


@pytest.fixture
def client(server: ServerThread) -> Iterator[Client]:
    with Client.connect([server.endpoint], patience=Patience(WAIT, 1)) as made:
        made.create_table(SPEC)
        yield made


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT
    while not is_true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class TestFrames:
    @pytest.mark.parametrize("num", [MAX_ENTRY + 2, 30_000])
    def test_a_message_of_too_many_frames_is_refused_and_its_connection_ended(
        self, server: ServerThread, raw: zmq.Socket, client: Client, num: int, capfd: pytest.CaptureFixture[str]
    ) -> None:
        raw.send_multipart(encode(Message(Command.PING, call=41)))  # or 90 KB would be too much for a first message
        assert decode_reply(raw.recv_multipart()).call == 41
        header = encode(Message(Command.PING, call=42))[0]
        ends = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.send_multipart([header, *[b"x"] * (num - 1)])
        reply = decode_reply(raw.recv_multipart())
        assert reply.call == 42
        assert names(unpack(reply.arrays[0], dict)["text"], f"{num:,}", "4,099")
        assert lines_naming(capfd.readouterr().err, "PING", "worker 0", "client 0")
        assert ends.poll(int(WAIT * 1000)), "its connection is not ended"
        raw.disable_monitor()
        assert client.num_retries == 0
        client.ping()
        raw.send_multipart(encode(Message(Command.PING, call=43)))  # it may connect again
        assert decode_reply(raw.recv_multipart()).call == 43

    def test_the_frames_behind_are_not_taken_for_messages_of_others(
        self, server: ServerThread, raw: zmq.Socket, client: Client
    ) -> None:
        before = server.server.state.counters.num_requests
        raw.send_multipart([b"x"] * 20_000)
        raw.recv_multipart()
        client.ping()
        assert server.server.state.counters.num_requests == before + 2

    def test_as_many_frames_as_a_message_may_have_are_answered(self, server: ServerThread, raw: zmq.Socket) -> None:
        raw.send_multipart([b"x"] * (MAX_ENTRY + 1))
        assert "header" in unpack(decode_reply(raw.recv_multipart()).arrays[0], dict)["text"]


class TestUnreadReplies:
    def test_replies_that_nobody_reads_are_held_up_to_a_bound(
        self, server: ServerThread, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(unread, "MAX_UNREAD", 30 << 20)
        keys = np.arange(10_000, dtype=np.uint64)
        client.pull("t", keys).result()
        counted = server._listener._unread
        lazy = SocketChannel(server.endpoint)
        state = server.server.state
        before = state.counters.num_requests
        for call in range(1, 41):  # 10 MB each
            while not lazy.send(encode(Message(Command.PULL, client=5, call=call, arrays=[keys_of(SPEC, keys)]))):
                time.sleep(0.01)
        wait_until(lambda: state.counters.num_requests >= before + 40, "all of them taken")
        assert max(counted._bytes.values()) <= 30 << 20
        assert client.pull("t", keys[:10]).result().shape == (10, 256)
        replies = []
        for _ in range(40):
            frames = lazy.receive(WAIT)
            assert frames is not None
            replies.append(decode_reply(frames))
        kinds = [unpack(reply.arrays[0], dict)["kind"] if reply.status else "rows" for reply in replies]
        assert kinds.count("rows") >= 2
        assert set(kinds) == {"rows", "ServerBusy"}
        wait_until(lambda: not counted.refusal(b"") and not counted._bytes, "what was read is counted no more")
        lazy.close()

    def test_a_client_that_was_refused_for_now_asks_again_and_gets_its_rows(
        self, server: ServerThread, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refusals = iter(["too much"] * 3)
        monkeypatch.setattr(server._listener._unread, "refusal", lambda peer, num=0: next(refusals, ""))
        assert client.pull("t", [1]).result().shape == (1, 256)
        assert client.num_retries >= 3

    def test_one_that_is_always_refused_says_why(
        self, server: ServerThread, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(server._listener._unread, "refusal", lambda peer, num=0: "too much of it")
        with (
            # Sent at 0, 0.25, 0.75 and 1.75 s, and next at 3.75 s: the end comes in a pause, after the last refusal.
            Client.connect([server.endpoint], patience=Patience(3.5, 0)) as hasty,
            pytest.raises(ServerBusy, match="PING"),
        ):
            hasty.ping()


def test_a_socket_that_seems_readable_without_a_message_ends_neither_side(
    server: ServerThread, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZeroMQ said so once, in a worker, and then had no message."""
    monkeypatch.setattr(sockets, "is_readable", lambda socket: True)
    with contextlib.closing(SocketChannel(server.endpoint)) as silent:
        assert silent.receive(0.0) is None
    client.ping()
    assert client.pull("t", range(9)).result().shape == (9, 256)


def test_neither_side_sends_heartbeats(server: ServerThread) -> None:
    """A server aborts in libzmq if one is to be answered on a connection that ended while its requests filled the
    queue, as after a link that was down. The system looks for peers that are gone."""
    with contextlib.closing(SocketChannel(server.endpoint)) as channel, zmq.Context() as context:
        for made in (channel._socket, _socket(context, zmq.ROUTER, server.endpoint)):
            assert (made.get(zmq.HEARTBEAT_IVL), made.get(zmq.TCP_KEEPALIVE), made.get(zmq.TCP_MAXRT)) == (0, 1, 30_000)
            made.close()


def test_an_attempt_without_an_answer_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener whose queue is full does not answer; the system by itself would repeat the same attempt for 30 s."""
    monkeypatch.setattr(sockets, "_CONNECT_MS", 300)
    with contextlib.ExitStack() as stack:
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1))
        for _ in range(4):
            silent = stack.enter_context(socket.socket())
            silent.setblocking(False)
            silent.connect_ex(full.getsockname())
        endpoint = "tcp://{}:{}".format(*full.getsockname())
        client = stack.enter_context(_socket(stack.enter_context(zmq.Context()), zmq.DEALER, endpoint))
        monitor = stack.enter_context(client.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED))
        client.connect(endpoint)
        assert monitor.poll(20_000)
        client.disable_monitor()


class TestStrangers:
    def plain(self, server: ServerThread) -> socket.socket:
        host, port = server.endpoint.removeprefix("tcp://").split(":")
        return socket.create_connection((host, int(port)), timeout=WAIT)

    def is_ended(self, plain: socket.socket, data: bytes, seconds: float) -> bool:
        """Whether the other side hangs up while it is sent this, over and over."""
        deadline = time.monotonic() + seconds
        plain.setblocking(False)
        while time.monotonic() < deadline:
            try:
                with contextlib.suppress(BlockingIOError):
                    plain.send(data)
                with contextlib.suppress(BlockingIOError):
                    if not plain.recv(1 << 16):
                        return True
            except OSError:
                return True
        return False

    @pytest.mark.parametrize("with_keys", [False, True], ids=["plain", "with keys"])
    def test_a_frame_announced_as_huge_before_the_handshake_ends_the_connection(
        self, tmp_path: Path, with_keys: bool
    ) -> None:
        keygen(tmp_path / "keys")
        keys = KeyFolder(tmp_path / "keys") if with_keys else None
        greeting = GREETING if not with_keys else GREETING.replace(b"NULL\0", b"CURVE")
        with ServerThread("tcp://127.0.0.1:0", keys) as server, self.plain(server) as plain:
            plain.sendall(greeting)
            plain.sendall(b"\x06" + struct.pack(">Q", (1 << 30) - 1))  # a command frame
            assert self.is_ended(plain, bytes(1 << 16), WAIT), f"it took more than {MAX_FIRST} bytes"
            channel = SocketChannel(server.endpoint, keys, Role.FIRST_WORKER)
            with contextlib.closing(Client([channel], patience=Patience(WAIT, 1))) as client:
                client.ping()

    def test_a_large_message_behind_a_small_one_is_taken(self, server: ServerThread, client: Client) -> None:
        client.assign("t", np.arange(20_000), np.ones((20_000, 256), np.float32))  # 20 MB
        with Client.connect([server.endpoint], patience=Patience(WAIT, 1)) as newcomer:
            newcomer.attach(SPEC)
            newcomer.assign("t", np.arange(20_000), np.ones((20_000, 256), np.float32))
            assert newcomer.num_retries == 0

    def test_connections_of_an_address_that_say_nothing_are_bounded(
        self, server: ServerThread, client: Client, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doorkeeper, "MAX_STRANGERS", 5)
        monkeypatch.setattr(doorkeeper, "STRANGER_AGE", 0.1)
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(self.plain(server))
            known = server._listener._doorkeeper._doors
            wait_until(lambda: len(known) == 20 + 1 or len(known) <= 6, "they are seen")
            wait_until(lambda: len(known) == 5 + 1, "most are ended")
            client.ping()
            assert client.num_retries == 0

    def test_unknown_keys_are_refused_slowly_and_known_ones_at_once(self, tmp_path: Path) -> None:
        keygen(tmp_path / "keys")
        keygen(tmp_path / "others")
        (tmp_path / "others" / "server.key").write_bytes((tmp_path / "keys" / "server.key").read_bytes())
        with ServerThread("tcp://127.0.0.1:0", KeyFolder(tmp_path / "keys")) as server:
            assert {thread.name for thread in threading.enumerate()} & {"zmq.auth.thread"} == set()
            stranger = SocketChannel(server.endpoint, KeyFolder(tmp_path / "others"))
            wait_until(lambda: len(server._listener._desk._delayed) == 1, "its refusal waits")
            channel = SocketChannel(server.endpoint, KeyFolder(tmp_path / "keys"), Role.FIRST_WORKER)
            with contextlib.closing(Client([channel], patience=Patience(WAIT, 1))) as client:
                client.create_table(SPEC)
            wait_until(lambda: not server._listener._desk._delayed, "it is refused")
            assert stranger.receive(0.3) is None
            stranger.close()


def test_frames_that_were_received_are_sent_on_by_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyzmq's thread is told of none of them; it is of a part of one."""
    shared: list[object] = []
    store = garbage.gc.store

    def stored(data: object, event: object) -> int:
        shared.append(data)
        return store(data, event)

    monkeypatch.setattr(garbage.gc, "store", stored)
    large = [np.random.default_rng(i).bytes(200_000 + i) for i in range(2)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.set(zmq.LINGER, 0)
        router.set(zmq.RCVTIMEO, int(WAIT * 1000))
        channel = SocketChannel(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        peer, _ = router.recv_multipart()
        router.send_multipart([peer, b"small", *large])
        received = channel.receive(WAIT)
        assert received is not None
        assert channel.send([b"head", *received])
        assert router.recv_multipart() == [peer, b"head", b"small", *large]
        assert not shared
        assert channel.send([b"head", received[2][1:]])
        assert router.recv_multipart() == [peer, b"head", large[1][1:]]
        assert len(shared) == 1
        channel.close()
