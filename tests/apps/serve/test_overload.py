"""`fleet serve` with more requests, and larger ones, than it can answer: refused early, in bounded time and memory."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.extras import imported, needing
from support.scripts.launching import wait_until
from support.serving import SECONDS, Served, as_json, clicks_batch, save_clicks, serving

from torchfleet.api.serving.description import ServingDescription
from torchfleet.apps.serve.endpoints.inference_protocol import InferenceProtocol
from torchfleet.apps.serve.inference import LARGE, Inference
from torchfleet.apps.serve.samples import Joiner
from torchfleet.apps.serve.serving_metrics import ServingMetrics
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import DataError
from torchfleet.data.features import Feature
from torchfleet.launch.roles import free_ports

INFER = b"POST /v2/models/clicks/infer HTTP/1.1\r\nhost: localhost\r\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "clicks"
    save_clicks(folder)
    return folder


def whole(data: bytes, more: bytes = b"", name: bytes = b"ids", shape: bytes = b"[1,26]") -> bytes:
    return b'{"inputs":[{"name":"%b","datatype":"INT64","shape":%b,"data":[%b]}]%b}' % (name, shape, data, more)


def hostile(num_bytes: int) -> dict[str, bytes]:
    """Wrong requests of about this size, of many small parts."""

    def many(part: bytes) -> bytes:
        return b",".join([part] * (num_bytes // (len(part) + 1)))

    one = b'{"name":"","datatype":"","shape":[1]}'
    bodies = {
        "flat": whole(many(b"1")),
        "nested": whole(many(b"[1]")),
        "rows": whole(many(b"[1]"), shape=b"[%d,1]" % (num_bytes // 4)),
        "ragged": whole(many(b"1"), name=b"tags", shape=b"[1,%d]" % (num_bytes // 2)),
        "unknown": whole(many(b"1"), name=b"other", shape=b"[1,%d]" % (num_bytes // 2)),
        "shape": whole(b"1", shape=b"[%b]" % many(b"1")),
        "inputs": b'{"inputs":[%b]}' % many(one),
        "outputs": whole(b"1", b',"outputs":[%b]' % many(b'{"name":"out"}')),
        "parameters": whole(b"1", b',"parameters":{"a":[%b]}' % many(b"[1]")),
        "deep": whole(b"[" * num_bytes),
    }
    bodies["parameters of an input"] = whole(b"1").replace(b'"data"', b'"parameters":{"a":[%b]},"data"' % many(b"[1]"))
    return bodies


@pytest.mark.slow
def test_the_cost_of_a_wrong_request_is_bounded() -> None:
    """In processor time, and in memory beyond the request itself: no value is made of what is too much."""
    features = [Feature("ids", shape=[26]), Feature("tags", shape=None, default=[])]
    protocol = InferenceProtocol(ServingDescription(features, "batch"), ["out"], 256)
    for name, body in hostile(8 << 20).items():
        began = time.process_time()
        with pytest.raises(DataError):
            protocol.parsed_large(body, None)
        assert time.process_time() - began < 1.0, name  # 0.05 s each; up to 2 s if all is decoded
    for name, body in hostile(2 << 20).items():
        tracemalloc.start()
        with pytest.raises(DataError):
            protocol.parsed_large(body, None)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body), name
        tracemalloc.stop()


def test_large_requests_mean_what_small_ones_do() -> None:
    features = [Feature("ids", shape=[2]), Feature("x", "float32", [1], default=[0.5]), Feature("tags", shape=None)]
    protocol = InferenceProtocol(ServingDescription(features, "batch"), ["out", "more"], 1024)
    ids = {"name": "ids", "datatype": "INT64", "shape": [1000, 2], "data": list(range(2000))}
    rows = {"name": "tags", "datatype": "INT64", "shape": [1000, 2], "data": [[i, 7] for i in range(1000)]}
    words = {"name": "tags", "datatype": "BYTES", "shape": [3], "data": ["a,b", 'c"{', ""]}
    offsets = {"name": "tags.offsets", "datatype": "INT64", "shape": [1000], "data": [0] * 999 + [1]}
    asked = [{"name": "more", "parameters": {"binary_data": True}}]
    for more in ({"inputs": [ids, rows]}, {"inputs": [ids, words, offsets], "outputs": asked, "id": "seven"}):
        body = json.dumps(more).encode()
        expected, (found, _) = protocol.decode(body, None), protocol.parsed_large(body, None)
        assert (found.id, found.outputs) == (expected.id, expected.outputs)
        one, two = (Joiner(features).joined([request.samples]) for request in (expected, found))
        for name, values in one.values.items():
            np.testing.assert_array_equal(values, two.values[name])


def test_the_size_of_a_request_follows_from_max_batch_and_the_features() -> None:
    numbers = ServingDescription([Feature("x", "float32", [10])], "batch")
    small, large = (InferenceProtocol(numbers, ["out"], most).max_bytes for most in (16, 1024))
    assert 16 * 10 * 25 < small < large < 4 << 20
    data = ",\n        ".join(["-1.2345678901234567e-308"] * 160)
    assert len(data) < small


def test_other_requests_are_answered_while_a_large_one_is_decoded() -> None:
    going = threading.Event()
    samples = SimpleNamespace(num=1)

    def parsed_large(body: bytes, json_size: int | None) -> Any:
        assert going.wait(SECONDS)
        return SimpleNamespace(samples=samples), None

    protocol = SimpleNamespace(
        max_bytes=1 << 30, known=lambda *_: None, parsed_large=parsed_large, learn=lambda *_: None
    )
    version = SimpleNamespace(tables={}, number=1, created=0.0)
    predictor = SimpleNamespace(protocol=protocol)
    served: Any = SimpleNamespace(predictor=predictor, version=version, is_remote=False)

    async def run() -> Any:
        inference = Inference(served, ServeSettings("model").checked(), ServingMetrics(None, 0, 1))
        decoding = asyncio.ensure_future(inference.decoded(b" " * (LARGE + 1), None))
        await asyncio.sleep(0.01)
        assert not decoding.done()
        going.set()  # the loop runs
        found = await decoding
        inference.close()
        return found

    assert asyncio.run(run()).samples is samples


@contextlib.contextmanager
def full(model: Path, *options: str) -> Iterator[Served]:
    """A server whose queue has three samples of four, until another one comes."""
    bounds = ("--batch_wait_ms", "100000", "--max_batch", "4", "--max_queue", "4", "--timeout_s", str(SECONDS))
    with serving(model, *bounds, *options) as made, concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [pool.submit(made.infer, as_json(clicks_batch(1))) for _ in range(3)]
        is_waiting = lambda: "queue_samples 3.0" in made.request("GET", "/metrics")[1].decode()  # noqa: E731
        wait_until(is_waiting, SECONDS, "batch that waits")
        yield made
        assert made.infer(as_json(clicks_batch(1)))[0] == 200  # which makes the batch full
        assert [future.result()[0] for future in first] == [200, 200, 200]


def answer(stream: Any) -> tuple[int, dict[str, str], bytes]:
    status, headers = int(stream.readline().split()[1]), {}
    while (line := stream.readline()) != b"\r\n":
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    return status, headers, stream.read(int(headers["content-length"]))


@contextlib.contextmanager
def connected(served: Served) -> Iterator[tuple[socket.socket, Any]]:
    with (
        socket.create_connection((served.host, served.port), timeout=SECONDS) as made,
        made.makefile("rb") as stream,
    ):
        yield made, stream


@pytest.mark.slow
@needing("uvicorn", "httptools")
def test_a_full_queue_refuses_from_the_head_of_a_request(model: Path) -> None:
    with full(model) as made:
        body = b"no JSON".ljust(20_000)
        with connected(made) as (client, stream):
            client.sendall(INFER + b"content-length: %d\r\n\r\n" % len(body))
            status, headers, _ = answer(stream)  # before a byte of the body is sent
            assert (status, headers["retry-after"]) == (503, "1")
            assert headers.get("connection") != "close"
            client.sendall(body + INFER + b"content-length: 5000\r\n\r\n" + b"x" * 5000)  # the connection goes on
            assert answer(stream)[0] == 503
            client.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert answer(stream)[0] == 200
        for header in (b"expect: 100-continue\r\n", b"connection: close\r\n"):
            with connected(made) as (client, stream):
                client.sendall(INFER + header + b"content-length: %d\r\n\r\n" % len(body))
                status, headers, _ = answer(stream)
                assert (status, headers["connection"]) == (503, "close")
                assert stream.read() == b""
        version = INFER.replace(b"/infer", b"/versions/1/infer")
        with connected(made) as (client, stream):
            client.sendall(version + b"content-length: %d\r\n\r\n" % len(body))
            assert answer(stream)[0] == 503


@pytest.mark.slow
@needing("uvicorn", "httptools", "grpc", "open_inference")
def test_a_full_queue_refuses_messages_of_grpc_undecoded(model: Path) -> None:
    (port,) = free_ports(1)
    grpc = imported("grpc")
    with full(model, "--grpc_port", str(port)) as _, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        with pytest.raises(grpc.RpcError) as caught:
            infer(b"\xff" * 20_000, timeout=SECONDS)
        assert caught.value.code().name == "UNAVAILABLE"
    with serving(model, "--grpc_port", str(port)), grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for wrong in (b"\xff" * 20_000, b"\x2a\x00" * (1 << 20), b"\x2a\x04\x1a\x02\x01\x01" * (1 << 17)):
            with pytest.raises(grpc.RpcError) as caught:
                infer(wrong, timeout=SECONDS)
            assert caught.value.code().name == "INVALID_ARGUMENT"


@pytest.mark.slow
@needing("uvicorn", "httptools")
def test_refused_bodies_are_read_so_that_the_client_reads_the_answer(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    with serving(model, "--timeout_s", "60", "--access_log", str(log)) as made:
        piece = b" " * (1 << 20)
        for head in (b"content-length: %d\r\n\r\n" % (17 << 20), b"transfer-encoding: chunked\r\n\r\n1100000\r\n"):
            with connected(made) as (client, stream):
                client.sendall(INFER + head)
                for _ in range(17):
                    client.sendall(piece)
                status, _, text = answer(stream)
                assert status == 413
                assert "bytes" in json.loads(text)["error"]
                assert stream.read() == b""
        lines = lambda: [json.loads(line)["status"] for line in log.read_text().splitlines()]  # noqa: E731
        wait_until(lambda: lines() == [413, 413], SECONDS, "two lines in the access log")
        assert made.infer(as_json(clicks_batch(1)))[0] == 200


@pytest.mark.slow
@needing("uvicorn", "httptools")
def test_an_endless_chunk_is_refused_at_once(model: Path) -> None:
    """However its size comes in; and chunks that are small are read."""
    body = json.dumps(as_json(clicks_batch(2))).encode()
    small = b"%x;note=1\r\n%b\r\n" % (len(body) // 2, body[: len(body) // 2])
    rest = body[len(body) // 2 :]
    head = INFER + b"Transfer-Encoding: chunked\r\n\r\n"
    huge = b"FFFFFFFFFFFFFFFF\r\n"
    with serving(model, "--timeout_s", str(SECONDS)) as made:
        for pieces in ([head + huge], [head, huge], [head, huge[:7], huge[7:]], [head + small, huge + b"abc"]):
            with connected(made) as (client, stream):
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                began = time.monotonic()
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(0.05)
                assert answer(stream)[0] == 413
                assert time.monotonic() - began < SECONDS / 2  # not by the end of the time for a request
        end = b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest)
        for pieces in (
            [head + small + end],
            [head, small, end],
            [head + small[:3], small[3:9], small[9:] + end[:1], end[1:]],
        ):
            with connected(made) as (client, stream):
                for piece in pieces:
                    client.sendall(piece)
                    time.sleep(0.05)
                assert answer(stream)[0] == 200


@pytest.mark.slow
@needing("uvicorn", "httptools")
def test_large_requests_are_answered_and_small_ones_beside_them(model: Path) -> None:
    with serving(model) as made, concurrent.futures.ThreadPoolExecutor(4) as pool:
        batch = as_json(clicks_batch(1000, 1))
        small = made.infer(batch)
        large = json.dumps(batch).encode() + b" " * LARGE
        found = list(pool.map(made.infer, [large] * 8))
        assert small[0] == 200
        assert [one for one in found if one != small] == []
        assert made.get("/v2/health/live")[0] == 200


def test_a_number_that_json_does_not_have_is_named() -> None:
    protocol = InferenceProtocol(ServingDescription([Feature("x", "float32", [1])], "batch"), ["out"], 4)
    for number in ("NaN", "Infinity", "-Infinity", "nan"):
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 1], "data": "X"}]}
        with pytest.raises(DataError) as caught:
            protocol.decode(json.dumps(body).replace('"X"', f"[{number}]").encode(), None)
        assert "NaN" in str(caught.value)
        assert "null" in str(caught.value)
    with pytest.raises(DataError) as caught:
        protocol.decode(b'{"inputs": [{"name": nothing}]}', None)
    assert "nothing" in str(caught.value)
