"""The dashboard's server: the page, the record of a run as a stream of events, and pieces of logs.

GET /                the page, and its files
GET /api/runs        names of runs, the newest first, and of the run to compare them with
GET /events          ?run=NAME: a stream of server-sent events: `snapshot`, then a `delta` a second, and `closing`
GET /api/served      models that `fleet serve` serves: version, age, rate, latency
GET /api/log         ?run=NAME&role=KEY: the end of a log; &file=&start= what follows, &file=&end= what stands before,
                     &before_file=1 the end of the rotated file
GET /api/find        ?run=NAME&role=KEY&text=TEXT: lines of a log
POST /login          the token as the body: a cookie comes back
"""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.http_listener import Bounds, HttpListener, HttpRequest
from torchfleet.observe.dashboard.access import Access
from torchfleet.observe.dashboard.log_pieces import find_lines, read_before, read_piece
from torchfleet.observe.dashboard.page_files import page_files
from torchfleet.observe.dashboard.run_feed import PERIOD, Feed, Feeds
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.dashboard.served_models import ServedModels

DEFAULT_PORT = 8470
_NEXT_PORTS = 20  # that are tried if the default one is taken
_HEARTBEAT = 15  # periods without events after which a comment keeps the stream alive
_LONGEST_LOGIN = 512  # bytes
BOUNDS = Bounds()
_NUMBER = re.compile("[0-9]{1,20}")
_GUARDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Dashboard:
    """Serves from threads of its own until it is closed. `port` None: the default one, or the next that is free."""

    def __init__(
        self,
        folders: RunFolders,
        host: str = "127.0.0.1",
        port: int | None = None,
        token: str | None = None,
        served: ServedModels | None = None,
    ) -> None:
        self._access, self._closing = Access(host, token), threading.Event()
        self._folders, self._feeds, self._served = folders, Feeds(), served or ServedModels()
        self._num_streams, self._changed = 0, threading.Condition()
        page_files()  # fails early if a file is missing
        self._server = _listen(host, port, _handler(self))
        self.host, self.port = host, self._server.server_port
        self._server.start()

    @property
    def url(self) -> str:
        """The URL of the page, with the token after a #, which browsers do not send."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.port}/" + (f"#token={self._access.token}" if self._access.token else "")

    def close(self, patience: float = 2.0) -> None:
        """Send the remaining events to all clients, wait up to `patience` seconds for them, and stop."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_streams, patience)
        self._server.close()

    def feed(self, name: str) -> Feed | None:
        """The feed of a run, of the newest if no name is given; None if there is no such run."""
        names = self._folders.names()
        wanted = name or next(iter(names), "")
        folders = self._folders.folders(wanted)
        return None if folders is None else self._feeds.of(wanted, folders)

    def stream(self, request: _Request, feed: Feed, last: str) -> None:
        """Send events until the client disconnects or the server closes."""
        with self._changed:
            self._num_streams += 1
        try:
            request.begin(200, "text/event-stream; charset=utf-8")
            request.wfile.write(b"retry: 1000\n\n")
            silent = 0
            while True:
                is_last = self._closing.is_set()
                body, last = feed.messages(last, now=is_last)
                silent = 0 if body else silent + 1
                if not body and silent % _HEARTBEAT == 0:
                    body = b": still here\n\n"
                request.wfile.write(body)
                if is_last:
                    request.wfile.write(b"event: closing\ndata: {}\n\n")
                    return
                self._closing.wait(PERIOD)
        finally:
            with self._changed:
                self._num_streams -= 1
                self._changed.notify_all()

    def answer(self, request: _Request, path: str, query: dict[str, str]) -> None:
        """Answer a GET of data. The request is already authorized."""
        if path == "/api/served":
            request.send_json({"served": self._served.rows()})
            return
        feed = self.feed(query.get("run", ""))
        if path == "/api/runs":
            request.send_json({"runs": self._folders.names(), "compare": self._folders.compared})
        elif feed is None:
            request.refuse(404, "there is no such run")
        elif path == "/events":
            self.stream(request, feed, request.headers.get("Last-Event-ID") or query.get("last", ""))
        else:
            found = _log_answer(feed, path, query)
            if found is None:
                request.refuse(404, "there is no such log")
            else:
                request.send_json(found)

    @property
    def access(self) -> Access:
        return self._access


class _Request(HttpRequest):
    """Answers for a dashboard, which `_handler` sets on a subclass."""

    dashboard: Dashboard

    def do_GET(self) -> None:
        if not self._is_welcome():
            return
        path, _, fields = self.path.partition("?")
        query = _query(fields)
        file = page_files().get(path)
        if file is not None:
            self.send(200, file.content_type, file.body)
        elif path not in ("/events", "/api/runs", "/api/served", "/api/log", "/api/find"):
            self.refuse(404, "there is no such page")
        elif not self.dashboard.access.may_read(self.headers, self._cookie_name()):
            self.refuse(
                401, "a token is needed: open the address that was printed at the start, with #token= at its end"
            )
        elif query is None:
            self.refuse(400, "too many fields")
        elif not self.admit():
            self.refuse(503, "there are too many readers: close other pages of the dashboard")
        else:
            self.dashboard.answer(self, path, query)

    def do_POST(self) -> None:
        if not self._is_welcome():
            return
        length = self.headers.get("Content-Length", "")
        if self.path != "/login" or not (_NUMBER.fullmatch(length) and int(length) <= _LONGEST_LOGIN):
            self.refuse(400, "expected POST /login with the token as its body")
        elif not self.dashboard.access.is_token(self.rfile.read(int(length)).decode("utf-8", "replace").strip()):
            self.refuse(403, "this is not the token that was printed at the start")
        else:
            cookie = f"{self._cookie_name()}={self.dashboard.access.cookie()}; Path=/; HttpOnly; SameSite=Strict"
            self.send(200, "application/json", b"{}", {"Set-Cookie": cookie})

    def send_json(self, found: Any) -> None:
        self.send(200, "application/json", json.dumps(found, allow_nan=False).encode())

    def refuse(self, status: int, text: str) -> None:
        self.send(status, "text/plain; charset=utf-8", f"{text}\n".encode())

    def begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None) -> None:
        super().begin(status, content_type, {**_GUARDS, **(headers or {})})

    def _is_welcome(self) -> bool:
        access = self.dashboard.access
        if not access.is_known_host(self.headers.get("Host")):
            self.refuse(421, "this is not a name of this machine: use its address in numbers")
        elif not access.is_own_page(self.headers):
            self.refuse(403, "this request comes from a page of another site")
        else:
            return True
        return False

    def _cookie_name(self) -> str:
        return f"fleet_dashboard_{self.dashboard.port}"  # all ports of a machine share its cookies


def _handler(dashboard: Dashboard) -> type[_Request]:
    return type("Request", (_Request,), {"dashboard": dashboard})


def _query(text: str) -> dict[str, str] | None:
    """The fields of a query; None if there are too many."""
    try:
        return {name: values[0] for name, values in parse_qs(text, max_num_fields=10).items()}
    except ValueError:
        return None


def _log_answer(feed: Feed, path: str, query: dict[str, str]) -> Any:
    place = feed.log_of(query.get("role", ""))
    if place is None:
        return None
    folder, name = place
    if path == "/api/find":
        text = query.get("text", "")
        return find_lines(folder, name, text[:200]) if text else {"lines": [], "num": 0, "searched": 0, "size": 0}
    if query.get("before_file"):
        return read_before(folder, name)
    numbers = {key: int(query[key]) for key in ("file", "start", "end") if _NUMBER.fullmatch(query.get(key, ""))}
    return read_piece(folder, name, numbers.get("file", 0), numbers.get("start"), numbers.get("end"))


def _listen(host: str, port: int | None, handler: type[_Request]) -> HttpListener:
    """A server at this port; without one at the default port, at one of the next, or at any that is free."""
    wanted = [port] if port is not None else [*range(DEFAULT_PORT, DEFAULT_PORT + _NEXT_PORTS), 0]
    for number in wanted:
        try:
            return HttpListener((host, number), handler, BOUNDS, "dashboard")
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise FleetError(
                    f"the dashboard cannot listen on {host}: {error}. Expected an address of this machine."
                ) from None
            if number == wanted[-1]:
                raise FleetError(
                    f"the dashboard cannot listen on {host}:{number}: {error}. Give another port, or none."
                ) from None
    raise AssertionError("there is always a port to try")
