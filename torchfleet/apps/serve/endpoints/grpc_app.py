"""The gRPC side of serving: the service of the Open Inference Protocol, in the event loop of the HTTP side."""

from __future__ import annotations

import asyncio
import functools
import hmac
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from torchfleet import __version__
from torchfleet.apps.serve.batching import QueueFull
from torchfleet.apps.serve.endpoints.access_log import AccessLog
from torchfleet.apps.serve.endpoints.grpc_tensors import body_of, check_fields, fill, without_parameters
from torchfleet.apps.serve.endpoints.inference_protocol import MAX_INPUTS, InferenceProtocol, InferRequest
from torchfleet.apps.serve.inference import LARGE, Inference, Refusal
from torchfleet.apps.serve.serving_metrics import CLIENT_LEFT, ServingMetrics
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import DataError, FleetError
from torchfleet.base.extras import required
from torchfleet.base.monitor.notices import tell

SERVICE = "inference.GRPCInferenceService"
MAX_MESSAGE = 4 << 20  # bytes; gRPC reads a whole message before we see it, so memory is bounded by this ...
MAX_CALLS = 256  # ... times the calls of a process at one time
_OPEN = {"ServerLive", "ServerReady"}  # for probes, which have no token
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    413: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}

Method = Callable[[Any], Awaitable[Any]]


class GrpcApp:
    """The service of one process. Processes share the port by SO_REUSEPORT."""

    def __init__(
        self,
        inference: Inference,
        settings: ServeSettings,
        token: bytes,
        metrics: ServingMetrics,
        log: AccessLog | None,
    ) -> None:
        self._grpc = required("grpc", "fleet serve --grpc_port", "grpc")
        self._messages = required("open_inference.grpc.protocol", "fleet serve --grpc_port", "grpc")
        self._inference, self._model, self._settings = inference, inference.model, settings
        self._bearer = "Bearer " + token.decode("latin-1") if token else ""
        self._metrics, self._log = metrics, log
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises FleetError if the port cannot be used."""
        options = [
            ("grpc.max_receive_message_length", min(MAX_MESSAGE, self._settings.max_body)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 1),
        ]
        self._server = required("grpc.aio", "fleet serve --grpc_port", "grpc").server(
            options=options, maximum_concurrent_rpcs=MAX_CALLS
        )
        self._server.add_generic_rpc_handlers((self._handlers(),))
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        address = f"{host}:{self._settings.grpc_port}"
        try:
            if self._settings.tls_cert:
                self._server.add_secure_port(address, self._credentials())
            else:
                self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise FleetError(f"--grpc_port {self._settings.grpc_port} cannot be used: {error!s:.200}") from None
        await self._server.start()

    async def stop(self) -> None:
        """Tell clients to connect elsewhere (GOAWAY), finish the calls in progress, then stop."""
        if self._server is not None:
            await self._server.stop(self._settings.timeout_s)

    def _credentials(self) -> Any:
        pair = Path(self._settings.tls_key).read_bytes(), Path(self._settings.tls_cert).read_bytes()
        return self._grpc.ssl_server_credentials([pair])

    def _handlers(self) -> Any:
        methods: dict[str, Method] = {
            "ServerLive": self._live,
            "ServerReady": self._ready,
            "ServerMetadata": self._server_metadata,
            "ModelReady": self._model_ready,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._infer,
        }
        handlers = {}
        for name, method in methods.items():
            read = getattr(self._messages, f"{name}Request").FromString
            handlers[name] = self._grpc.unary_unary_rpc_method_handler(
                self._guarded(name, method),
                request_deserializer=None if name == "ModelInfer" else read,  # which is read when the queue has room
                response_serializer=getattr(self._messages, f"{name}Response").SerializeToString,
            )
        return self._grpc.method_handlers_generic_handler(SERVICE, handlers)

    def _guarded(self, name: str, method: Method) -> Callable[[Any, Any], Awaitable[Any]]:
        """Wrap `method`: check the token, turn refusals into codes of gRPC, count and log the call."""

        async def call(request: Any, context: Any) -> Any:
            began, status, text, response = time.monotonic(), 200, "", None
            try:
                if self._bearer and name not in _OPEN and not self._is_admitted(context):
                    raise Refusal(401, "expected the metadata authorization: Bearer TOKEN")
                response = await method(request)
            except asyncio.CancelledError:  # the client has cancelled the call, or its connection is lost
                self._note(name, CLIENT_LEFT, time.monotonic() - began, None, context)
                raise
            except Exception as error:
                refusal = self._inference.refusal_of(error)
                if refusal is None:  # a bug here or in the network: logged, and not shown to the client
                    tell(f"fleet serve: {name} failed: {type(error).__name__}: {error!s:.500}")
                    refusal = Refusal(500, "the server could not compute this; its log says why")
                status, text = refusal.status, refusal.text
            self._note(name, status, time.monotonic() - began, response, context)
            if response is None:
                code = getattr(self._grpc.StatusCode, _CODES.get(status, "INTERNAL"))
                await context.abort(code, text)
            return response

        return call

    def _is_admitted(self, context: Any) -> bool:
        for key, value in context.invocation_metadata() or ():
            if key == "authorization" and isinstance(value, str):
                return hmac.compare_digest(value.encode("latin-1", "replace"), self._bearer.encode("latin-1"))
        return False

    def _note(self, name: str, status: int, seconds: float, response: Any, context: Any) -> None:
        self._metrics.request(status, seconds)
        if self._log is not None:
            size = response.ByteSize() if response is not None else 0
            scope = {"client": (context.peer(),), "method": "gRPC", "path": f"/{SERVICE}/{name}"}
            self._log.write(scope, status, seconds, size)

    async def _live(self, request: Any) -> Any:
        return self._messages.ServerLiveResponse(live=True)

    async def _ready(self, request: Any) -> Any:
        return self._messages.ServerReadyResponse(ready=self._inference.is_ready)

    async def _server_metadata(self, request: Any) -> Any:
        return self._messages.ServerMetadataResponse(name="torchfleet", version=__version__)

    async def _model_ready(self, request: Any) -> Any:
        self._check(request.name, request.version)
        return self._messages.ModelReadyResponse(ready=self._inference.is_ready)

    async def _model_metadata(self, request: Any) -> Any:
        self._check(request.name, request.version)
        return self._messages.ModelMetadataResponse(**without_parameters(self._model.metadata()))

    async def _infer(self, data: bytes) -> Any:
        """`data`: the message as it came. It is not decoded while the queue is full."""
        inference = self._inference
        if inference.is_full(len(data)):
            raise QueueFull
        if len(data) > inference.max_body:
            raise Refusal(413, f"expected a message of at most {inference.max_body:,} bytes")
        predictor = inference.model.predictor
        work = functools.partial(self._read, data, predictor.protocol)
        request, asked = work() if len(data) <= LARGE else await inference.aside(work, len(data))
        inference.noted(asked, predictor, len(data))
        number, results = await inference.compute(asked, request.model_version)
        response = self._messages.ModelInferResponse(
            model_name=self._settings.name, model_version=number, id=request.id
        )
        fill(response, asked.outputs, results, bool(request.raw_input_contents))
        return response

    def _read(self, data: bytes, protocol: InferenceProtocol) -> tuple[Any, InferRequest]:
        """A ModelInferRequest, and what it asks. Also called by the thread that decodes large ones."""
        if len(data) > LARGE:
            check_fields(data, 2 * MAX_INPUTS)
        try:
            request = self._messages.ModelInferRequest.FromString(data)
        except Exception as error:  # DecodeError of protobuf, which is not imported here
            raise DataError(f"expected a ModelInferRequest: {error!s:.200}") from None
        self._check(request.model_name, "")
        return request, protocol.request(*body_of(request))

    def _check(self, name: str, version: str) -> None:
        if name != self._settings.name:
            raise Refusal(404, f"there is no model {name!r:.80}; there is '{self._settings.name}'")
        self._inference.check_version(version)
