"""Small models that are saved for serving, and `fleet serve` as processes of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from support import processes
from support.jobs import one_worker, sgd

import torchfleet as fleet

SECONDS = 150.0  # of a first start on a slow disk


class Clicks(torch.nn.Module):
    """Takes tensors: ids that are looked up as they are, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = fleet.nn.SparseEmbedding(1, name="wide")
        self.deep = fleet.nn.SparseEmbedding(4, name="deep", padding_idx=0)
        self.tower = torch.nn.Sequential(torch.nn.Linear(2 * 4 + 1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))

    def forward(self, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        deep = self.tower(torch.cat([self.deep(ids).flatten(1), x], dim=1)).squeeze(1)
        return deep + self.wide(ids).sum(dim=(1, 2))


def clicks_batch(num: int, seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (num, 2), generator=made) * 1_000_003
    return {"ids": ids, "x": torch.randn(num, 1, generator=made)}


def save_clicks(folder: Path) -> None:
    """Train a few steps, and save for prediction; 0.5 stands for an `x` that is not given."""
    torch.manual_seed(0)
    with one_worker(Clicks(), lambda model: sgd(model, 0.1)) as part:
        for seed in range(5):
            part.model(**clicks_batch(16, seed)).square().mean().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
        part.worker.describer.describe([fleet.Feature("x", default=[0.5])])
        part.worker.save(str(folder), "inference")


class Served:
    """A running `fleet serve`."""

    def __init__(self, process: subprocess.Popen[str], place: str) -> None:
        self.process = process
        found = re.search(r"(https?)://([^/]+):(\d+)/v2/models/(\S+)", place)
        assert found is not None, place
        self.host, self.port, self.name = found[2], int(found[3]), found[4]
        self.address = f"{self.host}:{self.port}"

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        status, body = self.request("GET", path, headers=headers)
        return status, json.loads(body)

    def infer(self, body: Any, **headers: str) -> tuple[int, Any]:
        given = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self.request("POST", f"/v2/models/{self.name}/infer", given, headers)
        return status, json.loads(answer)


@contextlib.contextmanager
def serving(model: Path, *options: str, is_forked: bool = True) -> Iterator[Served]:
    """`fleet serve` on a free port of this machine. `is_forked`: by the nursery, without children of its own."""
    command = [sys.executable, "-m", "torchfleet.observe.commands", "serve", str(model), "--port", "0", *options]
    start = processes.Popen if is_forked else subprocess.Popen
    process = start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    timer = threading.Timer(SECONDS, process.kill)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if "/v2/models/" in line:
                break
        timer.cancel()
        assert any("/v2/models/" in line for line in lines), "".join(lines)
        rest = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
        rest.start()
        yield Served(process, lines[-1])
    finally:
        timer.cancel()
        process.terminate()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def as_json(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A request of the Open Inference Protocol."""
    names = {torch.int64: "INT64", torch.float32: "FP32"}
    inputs = [
        {"name": name, "datatype": names[t.dtype], "shape": list(t.shape), "data": t.flatten().tolist()}
        for name, t in batch.items()
    ]
    return {"inputs": inputs}
