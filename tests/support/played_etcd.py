"""The part of etcd that torchfleet uses, over HTTP, in threads of this process. It can answer badly.

| fault | what a request meets |
|---|---|
| `"503"`, `"404"`, `"401"` ... | that status, with a page of a proxy |
| `"redirect"` | the address of `elsewhere`, another server |
| `"half"` | the first half of a good answer |
| `"garbage"`, `"list"`, `"empty"`, `"nested"` | status 200, and something else than an answer of etcd |
| `"types"` | a good answer whose values have other types |
| `"silent"` | no answer, and the connection stays open |
| `"drip"` | a good answer, a byte every 0.1 s |
| `"endless"` | a page that does not end |
| `"lost"` | the request is carried out, and the connection closed |
| `"late"` | the connection is closed; a transaction is carried out when `deliver` is called |
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE = 30.0  # seconds after which a silent answer ends by itself
FAULTS = ("503", "404", "401", "redirect", "half", "garbage", "list", "empty", "nested", "types", "silent", "drip",
          "endless")  # fmt: skip
_PAGES = {
    "garbage": b"<html>welcome</html>",
    "list": b"[]",
    "empty": b"{}",
    "nested": b'{"header":' + b"[" * 200_000,
}
_HEADER = {"cluster_id": "1", "member_id": "2", "revision": "3", "raft_term": "4"}


class PlayedEtcd:
    """`fault`: what the next requests meet; "": none. `plan`: faults of the next requests by what they ask for
    ("kv/txn"), each for one request, after which `fault` is `then`."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.fault, self.plan, self.then = "", dict[str, str](), ""
        self.asked: list[str] = []  # what was asked for, in order
        self._late: list[dict[str, Any]] = []
        self.elsewhere = ""
        self._lock = threading.Lock()
        self.over = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.place = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)

    def next_fault(self, what: str) -> str:
        with self._lock:
            self.asked.append(what)
            if what not in self.plan:
                return self.fault
            found, self.fault = self.plan.pop(what), self.then
            return found

    def answer(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            return {"header": _HEADER, **_ANSWERS[what](self, body)}

    def keep_late(self, body: dict[str, Any]) -> None:
        self._late.append(body)

    def deliver(self) -> None:
        """Carry out the transactions that were late."""
        while self._late:
            self.answer("kv/txn", self._late.pop(0))

    def _range(self, body: dict[str, Any]) -> dict[str, Any]:
        found = self.values.get(body["key"])
        return {} if found is None else {"kvs": [{"key": body["key"], "value": found}], "count": "1"}

    def _transact(self, body: dict[str, Any]) -> dict[str, Any]:
        (compared,), (done,) = body["compare"], body["success"]
        expected = compared["value"] if compared["target"] == "VALUE" else None
        if self.values.get(compared["key"]) != expected:
            return {}
        put = done["requestPut"]
        self.values[put["key"]] = put["value"]
        return {"succeeded": True}

    def _grant(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"ID": "7", "TTL": body["TTL"]}

    def _keep_alive(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"result": {"header": _HEADER, "ID": body["ID"], "TTL": "3600"}}


_ANSWERS: dict[str, Callable[[PlayedEtcd, dict[str, Any]], dict[str, Any]]] = {
    "kv/range": PlayedEtcd._range,
    "kv/txn": PlayedEtcd._transact,
    "lease/grant": PlayedEtcd._grant,
    "lease/keepalive": PlayedEtcd._keep_alive,
}


def _handler(etcd: PlayedEtcd) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            what = self.path.removeprefix("/v3/")
            with contextlib.suppress(OSError):
                self._meet(etcd.next_fault(what), what, body)
            self.close_connection = True

        def _meet(self, fault: str, what: str, body: dict[str, Any]) -> None:
            if fault == "late":
                if what == "kv/txn":
                    etcd.keep_late(body)
            elif fault == "lost":
                etcd.answer(what, body)
            elif fault == "silent":
                etcd.over.wait(PATIENCE)
            elif fault == "endless":
                self._send(200, b"x" * 1000, 1 << 40)
                while not etcd.over.is_set():
                    self.wfile.write(b"x" * 100_000)
            elif fault.isdigit():
                self._send(int(fault), b"<html>no</html>")
            elif fault == "redirect":
                self._send(307, b"", location=f"http://{etcd.elsewhere}/v3/{what}")
            elif fault in _PAGES:
                self._send(200, _PAGES[fault])
            else:
                self._send_answer(fault, etcd.answer(what, body))

        def _send_answer(self, fault: str, answer: dict[str, Any]) -> None:
            text = json.dumps({name: [value] for name, value in answer.items()} if fault == "types" else answer)
            if fault == "half":
                self._send(200, text.encode()[: len(text) // 2], len(text))
            elif fault == "drip":
                for byte in f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode():
                    self.wfile.write(bytes([byte]))
                    time.sleep(0.1)
            else:
                self._send(200, text.encode())

        def _send(self, status: int, body: bytes, length: int | None = None, location: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) if length is None else length))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


@contextlib.contextmanager
def played_etcd() -> Iterator[PlayedEtcd]:
    etcd = PlayedEtcd()
    try:
        yield etcd
    finally:
        etcd.close()
