"""The same raw values in training and in requests by JSON, in binary and by gRPC: equal predictions, or both refuse."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import Late, needing
from support.jobs import clean_facade
from support.paths import SUPPORT
from support.serving import SECONDS, Served, serving

import torchfleet as fleet
from torchfleet.base.errors import DataError
from torchfleet.data import FeatureFile
from torchfleet.launch.roles import free_ports

pytestmark = [
    pytest.mark.slow,
    needing("uvicorn", "httptools", "grpc", "open_inference"),
    pytest.mark.xdist_group("features"),
]
grpc, messages, services = Late("grpc"), Late("open_inference.grpc.protocol"), Late("open_inference.grpc.service")

RECORDED = SUPPORT / "recorded"
FILE = FeatureFile(
    [
        fleet.Feature("city", shape=[1], vocabulary=["Berlin", "Paris"], missing=3),
        fleet.Feature("price", shape=[1], buckets=[0.1, 0.7, 1.1], missing=4),
        fleet.Feature("user", shape=[1], hash_size=50, hash_seed=7),
        fleet.Feature("x", "float32", shape=[1], missing=-1.5),
    ]
)
CITIES, USERS = ["Berlin", "Paris", "Rome", None, "Paris"], ["u1", "u2", "u3", "u1", "u2"]
PRICES, XS = [0.7, 0.69999999, None, 25.0, 0.1], [0.5, None, 2.0, 0.1, -3.0]
COLUMNS: dict[str, list[Any]] = {"city": CITIES, "price": PRICES, "user": USERS, "x": XS}
CLOSE = {"rtol": 0, "atol": 1e-6}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = fleet.nn.Uniform(-1, 1)
        self.tables = torch.nn.ModuleDict(
            {name: fleet.nn.SparseEmbedding(2, name=name, initializer=first) for name in ("city", "price", "user")}
        )

    def forward(self, city: torch.Tensor, price: torch.Tensor, user: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ids = {"city": city, "price": price, "user": user}
        found: torch.Tensor = sum(self.tables[name](ids[name]).sum(dim=(1, 2)) for name in ids) + x.sum(1)
        return found


class Trained:
    """A served model, and what its training process says of raw columns."""

    def __init__(self, folder: Path, served: Served, grpc_port: int) -> None:
        self.folder, self.http = folder, served
        self._channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}")
        self.stub = services.GRPCInferenceServiceStub(self._channel)

    def expected(self, **columns: Any) -> list[float] | None:
        """None: training refuses the columns."""
        try:
            batch = FILE.tensors({**COLUMNS, **columns})
        except DataError:
            return None
        with torch.no_grad():
            found: list[float] = fleet.load_inference_model(str(self.folder), Model())(**batch).tolist()
        return found

    def by_json(self, **inputs: tuple[str, list[Any]]) -> list[float] | None:
        """None: status 400."""
        status, found = self.http.infer({"inputs": [self._input(name, *given) for name, given in all_of(inputs)]})
        return self._answer(status, found)

    def by_bytes(self, **inputs: tuple[str, list[Any]]) -> list[float] | None:
        made, tails = [], []
        for name, (datatype, values) in all_of(inputs):
            one = self._input(name, datatype, values)
            if datatype != "BYTES":
                tails.append(raw(datatype, values))
                one["parameters"] = {"binary_data_size": len(tails[-1])}
                del one["data"]
            made.append(one)
        head = json.dumps({"inputs": made}).encode()
        size = {"Inference-Header-Content-Length": str(len(head))}
        return self._answer(*self.http.infer(head + b"".join(tails), **size))

    def by_grpc(self, **inputs: tuple[str, list[Any]]) -> list[float] | None:
        """Strings without nulls."""
        given = all_of(inputs)
        request = messages.ModelInferRequest(
            model_name=self.http.name,
            inputs=[{"name": name, "datatype": kind, "shape": [len(values), 1]} for name, (kind, values) in given],
            raw_input_contents=[raw(kind, values) for _, (kind, values) in given],
        )
        try:
            found = self.stub.ModelInfer(request, timeout=SECONDS)
        except grpc.RpcError as error:
            if error.code().name != "INVALID_ARGUMENT":
                raise
            return None
        return np.frombuffer(found.raw_output_contents[0], np.float32).tolist()

    def metric(self, name: str) -> float:
        lines = self.http.request("GET", "/metrics")[1].decode().splitlines()
        (line,) = [line for line in lines if line.startswith(name)]
        return float(line.rpartition(" ")[2])

    def close(self) -> None:
        self._channel.close()

    @staticmethod
    def _input(name: str, datatype: str, values: list[Any]) -> dict[str, Any]:
        return {"name": name, "datatype": datatype, "shape": [len(values), 1], "data": values}

    @staticmethod
    def _answer(status: int, found: Any) -> list[float] | None:
        assert status in (200, 400), found
        return None if status == 400 else found["outputs"][0]["data"]


def all_of(inputs: dict[str, tuple[str, list[Any]]]) -> list[tuple[str, tuple[str, list[Any]]]]:
    kinds = {"city": "BYTES", "price": "FP32", "user": "BYTES", "x": "FP32"}
    return [(name, inputs.get(name, (kinds[name], COLUMNS[name]))) for name in COLUMNS]


def raw(datatype: str, values: list[Any]) -> bytes:
    """nan for a null."""
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(value.encode())) + value.encode() for value in values)
    kinds = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8", "INT32": "<i4", "BOOL": "?"}
    return np.array([np.nan if value is None else value for value in values], kinds[datatype]).tobytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("features") / "model"
    with clean_facade():
        fleet.init()
        model = fleet.distributed_model(Model(), features=FILE.features)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        fleet.init_worker()
        for _ in range(3):
            model(**FILE.tensors(COLUMNS)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        fleet.save_persistables(str(folder))
        fleet.stop_worker()
    (port,) = free_ports(1)
    with serving(folder, "--grpc_port", str(port), "--workers", "2") as served:
        made = Trained(folder, served, port)
        yield made
        made.close()


def test_all_ways_give_what_training_computed(trained: Trained) -> None:
    expected = trained.expected()
    assert expected is not None
    np.testing.assert_allclose(trained.by_json(), expected, **CLOSE)
    np.testing.assert_allclose(trained.by_json(price=("FP64", PRICES), x=("FP64", XS)), expected, **CLOSE)
    np.testing.assert_allclose(trained.by_bytes(), expected, **CLOSE)
    np.testing.assert_allclose(trained.by_bytes(price=("FP64", PRICES), x=("FP64", XS)), expected, **CLOSE)
    whole = ["Berlin", "Paris", "Rome", "", "Paris"]
    without_null = trained.expected(city=whole)
    assert without_null is not None
    for kind in ("FP32", "FP64"):
        np.testing.assert_allclose(trained.by_grpc(city=("BYTES", whole), price=(kind, PRICES)), without_null, **CLOSE)


def test_whole_numbers_are_bucketed_everywhere(trained: Trained) -> None:
    prices = [0, 1, 2, 3, 25]
    expected = trained.expected(price=np.array(prices, np.int32))
    assert expected is not None
    assert expected == trained.expected(price=[float(price) for price in prices])
    whole = ["Berlin", "Paris", "Rome", "", "Paris"]
    for kind in ("INT64", "INT32", "FP32"):
        np.testing.assert_allclose(trained.by_json(price=(kind, prices)), expected, **CLOSE)
        np.testing.assert_allclose(trained.by_bytes(price=(kind, prices)), expected, **CLOSE)
        found = trained.by_grpc(city=("BYTES", whole), price=(kind, prices))
        np.testing.assert_allclose(found, trained.expected(city=whole, price=prices) or [], **CLOSE)


@pytest.mark.parametrize(
    ("name", "datatype", "values"),
    [
        ("price", "BYTES", ["25", "40", "1", "2", "3"]),
        ("price", "FP64", [1e300, 1.0, 1.0, 1.0, 1.0]),
        ("price", "BOOL", [True] * 5),
        ("city", "INT64", [1, 2, 0, 1, 2]),
        ("user", "INT64", [50, 1, 2, 3, 4]),
        ("user", "INT64", [-3, 1, 2, 3, 4]),
        ("user", "FP32", [1.0, 1.0, 2.0, 3.0, 4.0]),
        ("x", "BYTES", ["1", "2", "3", "4", "5"]),
        ("x", "FP64", [1e300, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_wrong_types_and_values_are_refused_everywhere(
    trained: Trained, name: str, datatype: str, values: list[Any]
) -> None:
    given, cities = {name: (datatype, values)}, ("BYTES", ["Berlin"] * 5)
    assert trained.expected(**{name: values}) is None
    assert trained.by_json(**given) is None
    assert trained.by_bytes(**given) is None
    assert trained.by_grpc(**{"city": cities, **given}) is None


def test_the_metadata_says_what_requests_should_give(trained: Trained) -> None:
    expected = {
        "city": ("BYTES", {"vocabulary_size": 2, "num_ids": 4, "missing": 3}),
        "price": ("FP32", {"buckets": [0.1, 0.7, 1.1], "num_ids": 5, "missing": 4}),
        "user": ("BYTES", {"hash_size": 50, "hash_seed": 7, "num_ids": 50}),
        "x": ("FP32", {"missing": -1.5}),
    }
    _, found = trained.http.get(f"/v2/models/{trained.http.name}")
    assert {one["name"]: (one["datatype"], one["parameters"]) for one in found["inputs"]} == expected
    told = trained.stub.ModelMetadata(messages.ModelMetadataRequest(name=trained.http.name), timeout=SECONDS)
    assert {one.name: one.datatype for one in told.inputs} == {name: kind for name, (kind, _) in expected.items()}
    assert {name: json.loads(told.properties[f"{name}.parameters"]) for name in expected} == {
        name: parameters for name, (_, parameters) in expected.items()
    }


def test_ids_without_a_row_are_counted_by_table(trained: Trained) -> None:
    names = {table: f'torchfleet_serve_unknown_ids_total{{table="{table}"}}' for table in ("city", "price", "user")}
    before = {table: trained.metric(name) for table, name in names.items()}
    known = {fleet.hash_string(user, 7) % 50 for user in USERS}
    others = [f"v{i}" for i in range(40) if fleet.hash_string(f"v{i}", 7) % 50 not in known][:5]
    assert trained.by_json(user=("BYTES", others)) is not None
    assert trained.by_json(user=("BYTES", [*others[:2], *USERS[:3]])) is not None
    after = {table: trained.metric(name) for table, name in names.items()}
    assert {table: after[table] - before[table] for table in names} == {"city": 0, "price": 0, "user": 7}


def test_a_save_from_before_answers_as_before(tmp_path: Path) -> None:
    """By its own rule: whole numbers are ids, edges are compared as they come."""
    shutil.copytree(RECORDED / "served", tmp_path / "served")
    cases = json.loads((RECORDED / "served.json").read_text())
    assert len(cases) == 8
    with serving(tmp_path / "served") as served:
        for case in cases:
            body = json.dumps(case["request"]).encode()
            size = {} if case["binary"] is None else {"Inference-Header-Content-Length": str(len(body))}
            status, found = served.infer(body + bytes.fromhex(case["binary"] or ""), **size)
            assert status == 200, found
            np.testing.assert_allclose(found["outputs"][0]["data"], case["output"], rtol=1e-6, atol=1e-6)
