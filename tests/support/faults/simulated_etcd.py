"""An etcd in virtual time: it answers late, badly or not at all, and answers are lost after their effect."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from support.faults.virtual_world import World

from torchfleet.ps.coordination.view import View, unpack_view

LATENCY = 0.002  # seconds, the mean
# What may become of a request. The first three have no effect on the store; of the others, half have had theirs.
REFUSED, SILENT, ERROR = "refuses connections", "does not answer", "answers with an error"
LOST, HALF, GARBAGE, REDIRECT = "loses answers", "sends half of an answer", "sends garbage", "redirects"
TROUBLES = (REFUSED, SILENT, ERROR, LOST, HALF, GARBAGE, REDIRECT, "any")
STATUS = {ERROR: 503, REDIRECT: 307}


@dataclass
class SimulatedEtcd:
    """The store, and what is wrong with it. A node's `place` is the node's name, so that it is known who asks."""

    world: World
    askers: dict[str, Callable[[float], None]] = field(default_factory=dict)  # by node: how its process waits
    share_lost: float = 0.0  # of answers that are lost without any other trouble
    changed: Callable[[str], bool] = lambda node: False  # told who has changed a view; whether its answer is lost
    _written: dict[str, list[str]] = field(default_factory=dict)  # by key: all values, the latest last
    _troubles: dict[str, tuple[str, float]] = field(default_factory=dict)  # by node: what, until when

    @contextmanager
    def attached(self) -> Iterator[None]:
        def connect(place: str, timeout: float) -> Connection:
            return Connection(self, place, timeout)

        with mock.patch.object(http.client, "HTTPConnection", connect):
            yield

    def views(self, shard: int) -> list[View]:
        """All views of a shard, in their order."""
        key = base64.b64encode(f"torchfleet/job/shard-{shard}".encode()).decode()
        return [unpack_view(base64.b64decode(value), "etcd") for value in self._written.get(key, [])]

    def disturb(self, node: str, how: str, seconds: float) -> None:
        self._troubles[node] = how, self.world.now + seconds

    def heal(self) -> None:
        self._troubles.clear()
        self.share_lost = 0.0

    def trouble(self, node: str) -> str:
        """What becomes of the next request of a node; empty: nothing."""
        dice = self.world.dice
        how, until = self._troubles.get(node, ("", 0.0))
        if self.world.now >= until:
            if dice.random() >= self.share_lost:
                return ""
            self.disturb(node, dice.choice((REFUSED, SILENT, ERROR)), dice.choice([0.3, 1.0, 3.0]))
            return LOST
        return dice.choice(TROUBLES[:-1]) if how == "any" else how

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v3/kv/range":
            found = self._written.get(body["key"], [])
            return {"kvs": [{"key": body["key"], "value": found[-1]}]} if found else {}
        if path == "/v3/kv/txn":
            is_equal = all(self._is_equal(compared) for compared in body["compare"])
            for one in body["success"] if is_equal else ():
                put = one["requestPut"]
                self._written.setdefault(put["key"], []).append(put["value"])
            return {"succeeded": is_equal}
        assert path in ("/v3/lease/grant", "/v3/lease/keepalive"), path
        return {"ID": "1", "result": {"header": {}, "TTL": "60"}}

    def _is_equal(self, compared: dict[str, Any]) -> bool:
        found = self._written.get(compared["key"], [])
        return not found if compared["target"] == "CREATE" else bool(found) and found[-1] == compared["value"]


class Connection:
    """As http.client.HTTPConnection and its socket: one request of one node."""

    def __init__(self, etcd: SimulatedEtcd, place: str, timeout: float) -> None:
        self._etcd, self._node, self._timeout = etcd, place, timeout
        self._trouble, self._left = etcd.trouble(place), b""
        self.sock = self

    def connect(self) -> None:
        self._wait()
        if self._trouble == REFUSED:
            raise ConnectionRefusedError("connection refused")

    def request(self, method: str, path: str, body: str, headers: dict[str, str]) -> None:
        self._wait()
        dice, content = self._etcd.world.dice, b"<html>unavailable</html>"
        if self._trouble not in (SILENT, ERROR) and (self._trouble in ("", LOST) or dice.random() < 0.5):
            answer = self._etcd.answer(path, json.loads(body))
            content = json.dumps({"header": {}, **answer}).encode()
            if answer.get("succeeded") and self._etcd.changed(self._node):
                self._trouble = LOST
        if self._trouble == GARBAGE:
            content = b"<html>welcome</html>"
        head = f"HTTP/1.1 {STATUS.get(self._trouble, 200)} -\r\nContent-Length: {len(content)}\r\n\r\n"
        num = len(content) // 2 if self._trouble == HALF else len(content)
        self._left = b"" if self._trouble in (SILENT, LOST) else head.encode() + content[:num]

    def settimeout(self, seconds: float) -> None:
        self._timeout = seconds

    def recv_into(self, buffer: bytearray | memoryview) -> int:
        if self._trouble == SILENT or (self._trouble == LOST and self._etcd.world.dice.random() < 0.5):
            self._etcd.askers[self._node](self._timeout)
            raise TimeoutError("timed out")
        self._wait()
        num = min(len(buffer), len(self._left))
        buffer[:num], self._left = self._left[:num], self._left[num:]
        return num

    def close(self) -> None:
        pass

    def _wait(self) -> None:
        self._etcd.askers[self._node](min(self._timeout / 2, self._etcd.world.dice.expovariate(1 / LATENCY)))
