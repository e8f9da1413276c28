"""The HTTP side of serving: an ASGI application with the routes of the Open Inference Protocol and /metrics."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from torchfleet import __version__
from torchfleet.apps.serve.batching import QueueFull
from torchfleet.apps.serve.endpoints.access_log import AccessLog
from torchfleet.apps.serve.endpoints.inference_protocol import InferRequest
from torchfleet.apps.serve.inference import Inference, Refusal
from torchfleet.apps.serve.serving_metrics import CLIENT_LEFT, ServingMetrics
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import MissingPackage
from torchfleet.base.monitor.host_names import HostNames
from torchfleet.base.monitor.notices import tell

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

_JSON = (b"content-type", b"application/json")
_OPEN = {"/v2/health/live", "/v2/health/ready"}  # for probes, which have no token
_ALWAYS = {"/v2/health/live", "/metrics"}  # answered however many connections there are: a busy process is alive
_EXTENSIONS = ["binary_tensor_data"]
_BODIES = 64 << 20  # bytes of requests that are in this process at one time; four of the largest, if those are larger
MAX_KEPT = 1 << 20  # bytes of a refused request that are read, to keep the connection

Headers = list[tuple[bytes, bytes]]  # names are in lower case
Reply = tuple[int, bytes, Headers]  # status, body, headers without the body's length


class ClientLeft(Exception):
    """The client has closed the connection."""


class ServingApp:
    """One model behind HTTP. Runs in one event loop."""

    def __init__(
        self,
        inference: Inference,
        settings: ServeSettings,
        token: bytes,
        metrics: ServingMetrics,
        log: AccessLog | None,
    ) -> None:
        self.inference, self._model = inference, inference.model
        self.settings, self._metrics, self._log = settings, metrics, log
        self._bearer = b"Bearer " + token if token else b""
        self._names = HostNames(settings.host, takes_any_beyond_loopback=True)
        self._num_body_bytes, self._most_bodies = 0, max(_BODIES, 4 * settings.max_body)
        name = settings.name
        self.infer_path = f"/v2/models/{name}/infer"
        self.infer_url = self.infer_path.encode()
        self._prefix = f"/v2/models/{name}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began = time.monotonic()
        try:
            status, body, headers = await self._answer(scope, receive)
        except ClientLeft:
            self.note_left(scope, time.monotonic() - began)
            return
        except Exception as error:
            status, body, headers = self.failed(error, f"{scope['method']} {scope['path']!r:.200}")
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
        self.note(scope, status, time.monotonic() - began, len(body))

    def failed(self, error: Exception, what: str) -> Reply:
        """The answer to a request that was refused, or that failed."""
        refusal = self.inference.refusal_of(error)
        if refusal is not None:
            return refusal.status, msgspec.json.encode({"error": refusal.text}), [_JSON, *refusal.headers]
        tell(f"fleet serve: {what} failed: {type(error).__name__}: {error!s:.500}")  # the client does not see it
        return 500, msgspec.json.encode({"error": "the server could not compute this; its log says why"}), [_JSON]

    def note(self, scope: Scope, status: int, seconds: float, num_bytes: int) -> None:
        """Count and log a request."""
        self._metrics.request(status, seconds)
        if self._log is not None:
            self._log.write(scope, status, seconds, num_bytes)

    def note_left(self, scope: Scope, seconds: float) -> None:
        """Count and log a request whose connection was closed, by its client or because the request was refused."""
        status, num_bytes = scope.get("refused", (CLIENT_LEFT, 0))
        self.note(scope, status, seconds, num_bytes)

    async def _answer(self, scope: Scope, receive: Receive) -> Reply:
        path, method = scope["path"], scope["method"]
        if scope.get("is_crowded") and path not in _ALWAYS:
            raise Refusal(503, "too many connections: try again later", ((b"retry-after", b"1"),), True)
        if not self.is_known_host(scope["headers"]):
            raise Refusal(421, "this is not a name of this machine: use its address in numbers", close=True)
        if path not in _OPEN and not self.is_admitted(scope["headers"]):
            wanted = ((b"www-authenticate", b"Bearer"),)
            raise Refusal(401, "expected the header Authorization: Bearer TOKEN", wanted, True)
        if path == self.infer_path:
            return await self._infer(scope, receive, method, "")
        if path.startswith(self._prefix + "/versions/") and path.endswith("/infer"):
            version = path[len(self._prefix) + len("/versions/") : -len("/infer")]
            return await self._infer(scope, receive, method, version)
        found = self._page(path)
        if found is None:
            raise Refusal(404, f"there is no {path:.200}; the model is at {self._prefix}", close=True)
        if method not in ("GET", "HEAD"):
            raise Refusal(405, f"expected GET, found {method:.20}", ((b"allow", b"GET"),), True)
        return found

    def is_known_host(self, headers: Headers) -> bool:
        """Whether the Host header names this machine, which a page of another site cannot do."""
        given = next((value for name, value in headers if name == b"host"), b"")
        return not given or self._names.is_known(given.decode("latin-1"))  # every browser sends it

    def is_admitted(self, headers: Headers) -> bool:
        """Whether the headers have the token, if one is required."""
        if not self._bearer:
            return True
        given = next((value for name, value in headers if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._bearer)

    def _page(self, path: str) -> Reply | None:
        """What GET returns; None for an unknown path."""
        if path == "/metrics":
            return self._text_metrics()
        if path.startswith(self._prefix):
            return self._model_page(path[len(self._prefix) :])
        pages = {
            "/v2": {"name": "torchfleet", "version": __version__, "extensions": _EXTENSIONS},
            "/v2/health/live": {"live": True},
        }
        if path == "/v2/health/ready":
            return self._readiness({})
        return _json(pages[path]) if path in pages else None

    def _model_page(self, rest: str) -> Reply | None:
        """`rest`: the path behind the name of the model."""
        if rest.startswith("/versions/"):
            version, _, last = rest[len("/versions/") :].partition("/")
            if not version:
                return None
            self.inference.check_version(version)
            rest = f"/{last}" if last else ""
        if rest == "/ready":
            return self._readiness({"name": self.settings.name})
        return _json(self._model.metadata()) if rest == "" else None

    def _readiness(self, found: Mapping[str, Any]) -> Reply:
        is_ready = self.inference.is_ready
        return 200 if is_ready else 503, msgspec.json.encode({**found, "ready": is_ready}), [_JSON]

    def _text_metrics(self) -> Reply:
        try:
            return (
                200,
                self._metrics.exposition(self._model.follow_figures),
                [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")],
            )
        except MissingPackage as error:
            raise Refusal(501, str(error)) from None

    async def _infer(self, scope: Scope, receive: Receive, method: str, version: str) -> Reply:
        if method != "POST":
            raise Refusal(405, f"expected POST, found {method:.20}", ((b"allow", b"POST"),), True)
        json_size, length = sizes_of(scope["headers"])
        if length is not None and length > self.max_body:
            raise self._too_large()
        if self.inference.is_full(length or 0):
            is_awaited = any(name == b"expect" for name, _ in scope["headers"])  # a body that may never come
            raise self._full(is_closed=is_awaited or length is None or length > MAX_KEPT)
        body, held = await self._body(receive)
        try:
            request = await self.inference.decoded(body, json_size)
        finally:
            self.release(held)
        del body
        number, results = await self.inference.compute(request, version)
        if await _has_left(receive):
            raise ClientLeft
        return self.answer(request, number, results)

    @property
    def max_body(self) -> int:
        """Bytes that a request may have."""
        return self.inference.max_body

    @property
    def too_large_text(self) -> str:
        return f"expected a request of at most {self.max_body:,} bytes"

    def answer(self, request: InferRequest, version: str, results: Mapping[str, Any]) -> Reply:
        """The answer with predictions."""
        answer, head = self.inference.protocol.encode(request, results, self.settings.name, version)
        if head is None:
            return 200, answer, [_JSON]
        size = (b"inference-header-content-length", b"%d" % head)
        return 200, answer, [(b"content-type", b"application/octet-stream"), size]

    async def _body(self, receive: Receive) -> tuple[bytes, int]:
        """The whole body, and what to release when it is not used any more. Raises Refusal if it is too large, or the
        bodies of all requests together; or ClientLeft.
        """
        held = 0
        parts: list[bytes] = []
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                part = message.get("body", b"")
                if held + len(part) > self.max_body:
                    raise self._too_large()
                if not self.reserve(len(part)):
                    raise Refusal(503, "too many large requests at one time", ((b"retry-after", b"1"),), True)
                held += len(part)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts), held
        except BaseException:
            self.release(held)
            raise

    def reserve(self, num_bytes: int) -> bool:
        """Reserve memory for a body of this size. Returns False if no memory is left; `release` gives it back."""
        if self._num_body_bytes + num_bytes > self._most_bodies:
            return False
        self._num_body_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        self._num_body_bytes -= num_bytes

    def _too_large(self) -> Refusal:
        return Refusal(413, self.too_large_text, close=True)

    def _full(self, is_closed: bool) -> Refusal:
        """The refusal of a request whose body is not read: short ones are dropped, and their connection is kept."""
        refusal = self.inference.refusal_of(QueueFull())
        assert refusal is not None
        return Refusal(503, refusal.text, refusal.headers, close=is_closed)


async def _has_left(receive: Receive) -> bool:
    """Whether the client has closed the connection. Call it when the request is complete: only the close can follow."""
    next_message = asyncio.ensure_future(receive())
    await asyncio.sleep(0)
    if not next_message.done():
        next_message.cancel()
        return False
    return bool(next_message.result()["type"] == "http.disconnect")


def _json(value: Any) -> Reply:
    return 200, msgspec.json.encode(value), [_JSON]


def sizes_of(headers: Headers) -> tuple[int | None, int | None]:
    """(bytes of JSON before binary tensors, of the whole body), where the headers say so. Raises Refusal."""
    json_size = length = None
    for name, value in headers:
        if name == b"inference-header-content-length":
            json_size = _number(value, "Inference-Header-Content-Length")
        elif name == b"content-length":
            length = _number(value, "Content-Length")
        elif name == b"content-encoding" and value.lower() != b"identity":
            raise Refusal(415, f"expected a body without Content-Encoding, found {value[:40]!r}", close=True)
    return json_size, length


def _number(value: bytes, name: str) -> int:
    if not value.isdigit() or len(value) > 18:
        raise Refusal(400, f"{name}: expected a number of bytes, found {value[:40]!r}", close=True)
    return int(value)
