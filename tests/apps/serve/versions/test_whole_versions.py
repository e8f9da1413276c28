"""`fleet serve --follow` while jobs with another `forward` save: an answer is of one job, graph and numbers."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support import processes
from support.extras import imported, needing
from support.jobs import wait_until
from support.scripts.launching import forked_fleetrun
from support.serving import Served, as_json, serving
from support.signed_model import IDS, Signed, job, predictions

import torchfleet as fleet
from torchfleet.launch.roles import free_ports
from torchfleet.observe.commands import command

pytestmark = [pytest.mark.slow, needing("uvicorn", "httptools")]
WAIT = 120.0
REQUEST = as_json({"ids": IDS})


def saved(folder: Path, sign: float, w: float, **options: Any) -> list[float]:
    """Save a model; returns what it predicts."""
    with job(sign, w, **options) as model:
        fleet.save_persistables(str(folder))
        return predictions(model)


def answer(served: Served) -> list[float]:
    status, found = served.infer(REQUEST)
    assert status == 200, found
    values: list[float] = found["outputs"][0]["data"]
    return values


def gauge(served: Served, name: str) -> float:
    text = served.request("GET", "/metrics")[1].decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"torchfleet_serve_{name}")).split()[-1])


class Asking:
    """Clients that ask while versions are swapped."""

    def __init__(self, served: Served, num: int) -> None:
        self.answers: list[tuple[int, tuple[float, ...]]] = []
        self._served, self._over = served, threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num)]

    def __enter__(self) -> Asking:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(WAIT)

    def _ask(self) -> None:
        while not self._over.is_set():
            status, found = self._served.infer(REQUEST)
            self.answers.append((status, tuple(found["outputs"][0]["data"]) if status == 200 else ()))


def test_another_forward_is_swapped_with_its_numbers_in_all_processes(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    expected = [saved(folder, 1.0, 1.0)]
    with serving(folder, "--follow", "--workers", "2", is_forked=False) as served, Asking(served, 3) as asking:
        assert answer(served) == expected[0]
        for sign, w in ((-1.0, 3.0), (-1.0, 5.0), (1.0, 7.0)):
            expected.append(saved(folder, sign, w))
            wait_until(lambda: all(answer(served) == expected[-1] for _ in range(20)), "the new model", WAIT)
    assert {status for status, _ in asking.answers} == {200}
    assert {values for _, values in asking.answers} == {tuple(values) for values in expected}


def rolled_back(folder: Path, *options: str) -> None:
    command = [sys.executable, "-m", "torchfleet.observe.commands", "rollback", str(folder), *options]
    processes.run(command, timeout=WAIT, check=True, stdout=subprocess.DEVNULL)


def test_a_rollback_takes_the_graph_back_too(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first = saved(folder, 1.0, 1.0)
    with serving(folder, "--follow") as served:
        number = served.get(f"/v2/models/{served.name}")[1]["versions"][0]
        second = saved(folder, -1.0, 3.0)
        wait_until(lambda: answer(served) == second, "the second model", WAIT)
        rolled_back(folder, "--to", number)
        wait_until(lambda: answer(served) == first, "the first model", WAIT)
        rolled_back(folder, "--resume")
        wait_until(lambda: answer(served) == second, "the second model again", WAIT)


class Other(Signed):
    """Has another input and two outputs."""

    def forward(self, keys: torch.Tensor, x: torch.Tensor) -> Any:  # type: ignore[override]
        rows = self.rows(keys).flatten()
        return {"sum": rows + x, "product": rows * x * self.w}


def test_inputs_and_outputs_change_with_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    saved(folder, 1.0, 1.0)
    with serving(folder, "--follow") as served:
        monkeypatch.setattr("support.signed_model.Signed", Other)
        with job(1.0, 2.0, calls=False) as model:
            batch = {"keys": IDS, "x": torch.tensor([0.5, 4.0])}
            expected = {name: values.tolist() for name, values in model(**batch).items()}
            fleet.save_persistables(str(folder))
        page = f"/v2/models/{served.name}"
        wait_until(lambda: len(served.get(page)[1]["outputs"]) == 2, "two outputs", WAIT)
        assert [one["name"] for one in served.get(page)[1]["inputs"]] == ["keys", "x"]
        status, found = served.infer(as_json({"keys": IDS, "x": torch.tensor([[0.5], [4.0]]).flatten()}))
        assert (status, {out["name"]: out["data"] for out in found["outputs"]}) == (200, expected)
        assert served.infer(REQUEST)[0] == 400


def test_a_save_that_cannot_be_served_leaves_the_version_and_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    first = saved(folder, 1.0, 1.0)
    with serving(folder, "--follow") as served:
        assert gauge(served, "follow_is_in_trouble") == 0
        saved(folder, -1.0, 3.0, calls=False)
        wait_until(lambda: gauge(served, "follow_is_in_trouble") == 1, "the trouble", WAIT)
        assert answer(served) == first
        third = saved(folder, -1.0, 5.0)
        wait_until(lambda: answer(served) == third, "the third model", WAIT)
        assert gauge(served, "follow_is_in_trouble") == 0


@needing("grpc", "open_inference")
def test_grpc_swaps_the_graph_too(tmp_path: Path) -> None:
    messages, service = imported("open_inference.grpc.protocol"), imported("open_inference.grpc.service")
    folder, (port,) = tmp_path / "model", free_ports(1)
    given = {
        "name": "ids",
        "datatype": "INT64",
        "shape": [2, 1],
        "contents": {"int64_contents": IDS.flatten().tolist()},
    }
    first = saved(folder, 1.0, 1.0)
    with (
        serving(folder, "--follow", "--grpc_port", str(port)),
        imported("grpc").insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        stub = service.GRPCInferenceServiceStub(channel)

        def by_grpc() -> list[float]:
            found = stub.ModelInfer(messages.ModelInferRequest(model_name="model", inputs=[given]), timeout=WAIT)
            return list(found.outputs[0].contents.fp32_contents)

        assert by_grpc() == first
        second = saved(folder, -1.0, 3.0)
        wait_until(lambda: by_grpc() == second, "the second model", WAIT)


_COUNTING = """
import sys, time
from pathlib import Path
import torch
import torchfleet as fleet

class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = fleet.nn.SparseEmbedding(1, name="rows")
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))

    def forward(self, ids):
        if self.training:
            self.seen += 1
            self.steps = self.steps + 1
        return self.rows(ids).flatten() + self.seen + self.steps

folder = Path(sys.argv[1])
fleet.init()
model = fleet.distributed_model(Counting())
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    for step in range(100_000):
        model(torch.tensor([[3]])).sum().backward()
        optimizer.step()
        if step == 0:
            fleet.save_persistables(str(folder / "model"))
        if (folder / "pause").exists():
            break
        time.sleep(0.02)
    (folder / "told.tmp").write_text(str(model.eval()(torch.tensor([[3]])).item()))
    (folder / "told.tmp").rename(folder / "told")
    while not (folder / "end").exists():
        time.sleep(0.05)
    fleet.stop_worker()
"""


def test_buffers_come_from_running_servers_between_saves(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_COUNTING)
    request = as_json({"ids": torch.tensor([[3]])})

    def value(served: Served) -> float:
        status, found = served.infer(request)
        assert status == 200, found
        return float(found["outputs"][0]["data"][0])

    options = "--server_num", "1", "--worker_num", "1", str(tmp_path / "job.py"), str(tmp_path)
    with forked_fleetrun(tmp_path / "log", *options) as started:
        try:
            wait_until((tmp_path / "model" / "manifest.json").exists, "a save", WAIT)
            wait_until(lambda: command.main(["stats", str(tmp_path / "log")]) == 0, "the record of a server", WAIT)
            with serving(tmp_path / "model", "--follow", str(tmp_path / "log")) as served:
                wait_until(lambda: value(served) > 50.0, "buffers of a later step than the save's", WAIT)
                (tmp_path / "pause").touch()
                wait_until((tmp_path / "told").exists, "the end of training", WAIT)
                expected = float((tmp_path / "told").read_text())
                assert expected > 50.0
                wait_until(lambda: value(served) == expected, "the buffers of the last step", WAIT)
        finally:
            (tmp_path / "end").touch()
        assert started.wait(WAIT) == 0
