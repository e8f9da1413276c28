"""A client of the Open Inference Protocol that is not ours: NVIDIA's tritonclient, by HTTP and gRPC.

It wants older versions of packages than others here. So it runs in a process of its own, from the folder that
TORCHFLEET_TRITONCLIENT_SITE names (`pip install --target FOLDER 'tritonclient[http,grpc]'`), or as it is installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import is_installed, needing, reason
from support.paths import SCRIPTS
from support.serving import Clicks, Served, clicks_batch, save_clicks, serving

import torchfleet as fleet
from torchfleet.launch.roles import free_ports

SITE = os.environ.get("TORCHFLEET_TRITONCLIENT_SITE", "")
pytestmark = [
    pytest.mark.slow,
    needing("uvicorn", "httptools", "grpc", "open_inference"),
    pytest.mark.skipif(not SITE and not is_installed("tritonclient"), reason=reason("tritonclient")),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "clicks"
    save_clicks(folder)
    return folder


@pytest.fixture(scope="module")
def addresses(model: Path) -> Iterator[dict[str, str]]:
    (port,) = free_ports(1)
    with serving(model, "--grpc_port", str(port)) as made:
        assert isinstance(made, Served)
        yield {"http": made.address, "grpc": f"127.0.0.1:{port}"}


def asked_by_triton(kind: str, address: str, request: Path) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [SITE, os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, str(SCRIPTS / "tritonclient_asks.py"), kind, address, str(request)]
    surroundings = {**os.environ, "PYTHONPATH": path}
    made = subprocess.run(command, capture_output=True, text=True, timeout=120, env=surroundings, check=False)
    assert made.returncode == 0, made.stderr
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def expected_of(model: Path, batch: dict[str, torch.Tensor]) -> list[float]:
    with torch.no_grad():
        found: torch.Tensor = fleet.load_inference_model(str(model), Clicks())(**batch)
    return found.tolist()


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tritonclient_gets_the_models_predictions(
    kind: str, addresses: dict[str, str], model: Path, tmp_path: Path
) -> None:
    batch = clicks_batch(7, 3)
    request = tmp_path / "request.npz"
    np.savez(request, ids=batch["ids"].numpy(), x=batch["x"].numpy())
    found = asked_by_triton(kind, addresses[kind], request)
    assert (found["is_live"], found["is_ready"]) == (True, True)
    assert (found["server"], found["output"]) == ("torchfleet", "output")
    assert len(found["predictions"]) == (8 if kind == "http" else 4)
    for some in found["predictions"]:
        np.testing.assert_allclose(some, expected_of(model, batch), rtol=0, atol=1e-6)
    hashes = np.array([[fleet.hash_string(text) for text in ("a", "größe")]], np.uint64).view(np.int64)
    hashed = {"ids": torch.from_numpy(hashes), "x": torch.tensor([[0.5]])}
    np.testing.assert_allclose(found["strings"], expected_of(model, hashed), rtol=0, atol=1e-6)
    assert "ids" in found["refusal"]
