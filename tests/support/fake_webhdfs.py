"""A stand-in for WebHDFS's REST API, in memory: as much of it as fsspec's client calls. A rename replaces nothing."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/webhdfs/v1"


class FakeHdfs(ThreadingHTTPServer):
    """`cut_name`: from the next data for a file whose name ends so, half of it is kept and every connection is cut."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.folders: set[str] = {"/"}
        self.cut_name, self.is_cut = "", False

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Cut connections are no news."""


class _Handler(BaseHTTPRequestHandler):
    server: FakeHdfs
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a reply is written in two parts, of which the second would wait 40 ms

    def _run(self) -> None:
        address = urlsplit(self.path)
        path = unquote(address.path.removeprefix(PREFIX)).rstrip("/") or "/"
        options = {name: values[0] for name, values in parse_qs(address.query).items()}
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        operation = getattr(self, f"_{options['op'].lower()}", None)
        if self.server.is_cut or (data and self.server.cut_name and path.endswith(self.server.cut_name)):
            if not self.server.is_cut:
                self.server.files[path] = data[: len(data) // 2]
            self.server.is_cut = True
            raise ConnectionResetError(path)
        if operation is None:
            self._reply(400, {"RemoteException": {"exception": "IllegalArgumentException", "message": self.path}})
        else:
            operation(path, options, data)

    do_GET = do_PUT = do_POST = do_DELETE = _run

    def _create(self, path: str, options: dict[str, str], data: bytes) -> None:
        if "data" not in options:
            self._redirect(path, "CREATE")
            return
        self.server.files[path] = data
        self._reply(201, None)

    def _append(self, path: str, options: dict[str, str], data: bytes) -> None:
        if "data" not in options:
            self._redirect(path, "APPEND")
            return
        self.server.files[path] += data
        self._reply(200, None)

    def _open(self, path: str, options: dict[str, str], data: bytes) -> None:
        if path not in self.server.files:
            self._missing(path)
            return
        start = int(options.get("offset", 0))
        stop = start + int(options["length"]) if "length" in options else None
        self._reply(200, self.server.files[path][start:stop])

    def _getfilestatus(self, path: str, options: dict[str, str], data: bytes) -> None:
        if self._is_there(path):
            self._reply(200, {"FileStatus": self._status(path, "")})
        else:
            self._missing(path)

    def _liststatus(self, path: str, options: dict[str, str], data: bytes) -> None:
        stem = path.rstrip("/") + "/"
        every = [*self.server.files, *self.server.folders]
        found = {name[len(stem) :].split("/")[0] for name in every if name.startswith(stem)} - {""}
        statuses = [self._status(stem + name, name) for name in sorted(found)]
        self._reply(200, {"FileStatuses": {"FileStatus": statuses}})

    def _mkdirs(self, path: str, options: dict[str, str], data: bytes) -> None:
        self.server.folders.add(path)
        self._reply(200, {"boolean": True})

    def _rename(self, path: str, options: dict[str, str], data: bytes) -> None:
        is_free = path in self.server.files and not self._is_there(options["destination"])
        if is_free:
            self.server.files[options["destination"]] = self.server.files.pop(path)
        self._reply(200, {"boolean": is_free})

    def _delete(self, path: str, options: dict[str, str], data: bytes) -> None:
        gone = {name for name in [*self.server.files, *self.server.folders] if f"{name}/".startswith(f"{path}/")}
        for name in gone:
            self.server.files.pop(name, None)
        self.server.folders -= gone
        self._reply(200, {"boolean": bool(gone)})

    def _is_there(self, path: str) -> bool:
        every = [*self.server.files, *self.server.folders]
        return any(f"{name}/".startswith(f"{path.rstrip('/')}/") for name in every)

    def _status(self, path: str, name: str) -> dict[str, object]:
        is_file = path in self.server.files
        size = len(self.server.files.get(path, b""))
        return {"pathSuffix": name, "type": "FILE" if is_file else "DIRECTORY", "length": size}

    def _missing(self, path: str) -> None:
        self._reply(404, {"RemoteException": {"exception": "FileNotFoundException", "message": path}})

    def _redirect(self, path: str, operation: str) -> None:
        self.send_response(307)
        self.send_header("Location", f"http://{self.server.address}{PREFIX}{path}?op={operation}&data=1")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _reply(self, status: int, content: object) -> None:
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@contextlib.contextmanager
def fake_webhdfs() -> Iterator[FakeHdfs]:
    with FakeHdfs() as made:
        thread = threading.Thread(target=made.serve_forever, daemon=True)
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join(10)
