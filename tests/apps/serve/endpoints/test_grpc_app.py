"""gRPC of `fleet serve`, asked by the stubs of the Open Inference Protocol's own package."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import imported, needing
from support.serving import SECONDS, Served, as_json, clicks_batch, save_clicks, serving

from torchfleet.launch.roles import free_ports

pytestmark = [pytest.mark.slow, needing("uvicorn", "httptools", "grpc", "open_inference")]
TOKEN = "a token of a test, long enough"


class Asked:
    """A client of `fleet serve`, with two processes on the port."""

    def __init__(self, port: int, http: Any) -> None:
        grpc = imported("grpc")
        self.grpc, self.http = grpc, http
        self.m = imported("open_inference.grpc.protocol")
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)])
        self.stub = imported("open_inference.grpc.service").GRPCInferenceServiceStub(self.channel)
        self.token = (("authorization", f"Bearer {TOKEN}"),)

    def infer(self, **given: Any) -> Any:
        request = self.m.ModelInferRequest(**{"model_name": "clicks", **given})
        return self.stub.ModelInfer(request, metadata=self.token, timeout=30)

    def refused(self, **given: Any) -> str:
        """The name of the code that a wrong request is refused with."""
        with pytest.raises(self.grpc.RpcError) as caught:
            self.infer(**given)
        code: str = caught.value.code().name
        return code


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    folder = tmp_path_factory.mktemp("saved")
    save_clicks(folder / "clicks")
    (folder / "token").write_text(TOKEN)
    (port,) = free_ports(1)
    options = "--grpc_port", str(port), "--workers", "2", "--token_file", str(folder / "token"), "--max_batch", "64"
    with serving(folder / "clicks", *options) as served:
        made = Asked(port, served)
        yield made
        made.channel.close()


def inputs_of(batch: dict[str, torch.Tensor], is_raw: bool) -> dict[str, Any]:
    fields = {torch.int64: ("INT64", "int64_contents"), torch.float32: ("FP32", "fp32_contents")}
    inputs: list[dict[str, Any]] = []
    for name, tensor in batch.items():
        datatype, field = fields[tensor.dtype]
        inputs.append({"name": name, "datatype": datatype, "shape": list(tensor.shape)})
        if not is_raw:
            inputs[-1]["contents"] = {field: tensor.flatten().tolist()}
    raw = [tensor.numpy().tobytes() for tensor in batch.values()] if is_raw else []
    return {"inputs": inputs, "raw_input_contents": raw}


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("num", [1, 64])
def test_predictions_are_those_of_http(asked: Asked, is_raw: bool, num: int) -> None:
    batch = clicks_batch(num, num)
    found = asked.infer(**inputs_of(batch, is_raw), id="seven")
    assert (found.model_name, found.model_version, found.id) == ("clicks", "1", "seven")
    (output,) = found.outputs
    assert (output.datatype, list(output.shape)) == ("FP32", [num])
    values = np.frombuffer(found.raw_output_contents[0], np.float32) if is_raw else output.contents.fp32_contents
    status, by_http = asked.http.infer(as_json(batch), Authorization=f"Bearer {TOKEN}")
    assert status == 200
    np.testing.assert_allclose(np.asarray(values), by_http["outputs"][0]["data"], rtol=0, atol=1e-6)


def test_what_the_server_says_of_itself(asked: Asked) -> None:
    assert asked.stub.ServerLive(asked.m.ServerLiveRequest()).live  # probes have no token
    assert asked.stub.ServerReady(asked.m.ServerReadyRequest()).ready
    assert asked.stub.ServerMetadata(asked.m.ServerMetadataRequest(), metadata=asked.token).name == "torchfleet"
    assert asked.stub.ModelReady(asked.m.ModelReadyRequest(name="clicks"), metadata=asked.token).ready
    found = asked.stub.ModelMetadata(asked.m.ModelMetadataRequest(name="clicks"), metadata=asked.token)
    assert [(one.name, one.datatype, list(one.shape)) for one in found.inputs] == [
        ("ids", "INT64", [-1, 2]),
        ("x", "FP32", [-1, 1]),
    ]


def test_without_the_token_nothing_is_computed(asked: Asked) -> None:
    for metadata in ((), (("authorization", "Bearer another token of a test"),)):
        with pytest.raises(asked.grpc.RpcError) as caught:
            asked.stub.ModelInfer(asked.m.ModelInferRequest(model_name="clicks"), metadata=metadata)
        assert caught.value.code().name == "UNAUTHENTICATED"


def test_wrong_requests_are_refused_and_the_next_is_answered(asked: Asked) -> None:
    right = inputs_of(clicks_batch(2), is_raw=False)["inputs"]
    raw = inputs_of(clicks_batch(2), is_raw=True)
    ids, x = right
    narrow = {**ids, "datatype": "INT8", "contents": {"int_contents": [300, 1, 1, 1]}}
    wrong: list[dict[str, Any]] = [
        {},
        {"inputs": [{**ids, "shape": [3, 2]}, x]},
        {"inputs": [{**ids, "shape": [-1, 2]}, x]},
        {"inputs": [{**ids, "datatype": "FP16"}, x]},
        {"inputs": [{**ids, "datatype": "FP32"}, x]},
        {"inputs": [{**ids, "datatype": "nothing"}, x]},
        {"inputs": [narrow, x]},
        {"inputs": [ids, ids, x]},
        {"inputs": [{**ids, "name": "idz"}, x]},
        {"inputs": right, "outputs": [{"name": "nothing"}]},
        {**raw, "inputs": right},
        {**raw, "raw_input_contents": raw["raw_input_contents"][:1]},
        {**raw, "raw_input_contents": [b"", *raw["raw_input_contents"][1:]]},
        inputs_of(clicks_batch(65), is_raw=True),
    ]
    assert [asked.refused(**given) for given in wrong] == ["INVALID_ARGUMENT"] * len(wrong)
    assert asked.refused(**raw, model_name="other") == "NOT_FOUND"
    assert asked.refused(**raw, model_version="2") == "NOT_FOUND"
    assert asked.refused(**{**raw, "raw_input_contents": [bytes(5 << 20)]}) == "RESOURCE_EXHAUSTED"
    assert list(asked.infer(**raw).outputs[0].shape) == [2]


def test_a_port_that_others_use_is_an_error(tmp_path: Path) -> None:
    save_clicks(tmp_path / "clicks")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "torchfleet.observe.commands",
            "serve",
            str(tmp_path / "clicks"),
            "--port",
            "0",
        ]
        ended = subprocess.run(
            [*command, "--grpc_port", str(port)], check=False, capture_output=True, text=True, timeout=SECONDS
        )
    assert ended.returncode == 1
    assert str(port) in ended.stderr
    assert "Traceback" not in ended.stderr


def test_http_counts_the_calls_of_grpc(asked: Asked) -> None:
    asked.infer(**inputs_of(clicks_batch(1), is_raw=True))
    status, body = asked.http.request("GET", "/metrics", headers={"Authorization": f"Bearer {TOKEN}"})
    assert status == 200
    (line,) = [one for one in body.decode().splitlines() if one.startswith("torchfleet_serve_samples_total ")]
    assert float(line.split()[1]) >= 1


def test_calls_under_way_are_answered_before_the_server_ends_and_cancelled_ones_are_counted(tmp_path: Path) -> None:
    save_clicks(tmp_path / "clicks")
    (port,) = free_ports(1)
    waiting = "--grpc_port", str(port), "--batch_wait_ms", "60000", "--timeout_s", str(SECONDS)
    with serving(tmp_path / "clicks", *waiting) as served:
        client = Asked(port, served)
        request = client.m.ModelInferRequest(model_name="clicks", **inputs_of(clicks_batch(2), is_raw=True))
        cancelled = client.stub.ModelInfer.future(request, timeout=SECONDS)
        wait_for_figure(served, "queue_samples 2.0")
        cancelled.cancel()
        wait_for_figure(served, 'requests_total{outcome="left"} 1.0')
        request = client.m.ModelInferRequest(model_name="clicks", **inputs_of(clicks_batch(3), is_raw=True))
        answered = client.stub.ModelInfer.future(request, timeout=SECONDS)
        wait_for_figure(served, "queue_samples 3.0", "queue_samples 5.0")  # with the cancelled one, or without
        served.process.terminate()
        assert list(answered.result().outputs[0].shape) == [3]
        assert served.process.wait(SECONDS) == 0
        client.channel.close()


def wait_for_figure(served: Served, *lines: str) -> None:
    """Until /metrics has one of these lines."""
    end = time.monotonic() + SECONDS
    while True:
        found = served.request("GET", "/metrics")[1].decode().splitlines()
        if any(f"torchfleet_serve_{line}" in found for line in lines):
            return
        assert time.monotonic() < end, found
        time.sleep(0.02)
