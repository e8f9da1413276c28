"""`fleet serve --cluster ray`: the same answers from replicas of Ray Serve; options that contradict it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.extras import needs
from support.serving import Clicks, Served, as_json, clicks_batch, save_clicks

import torchfleet as fleet
from torchfleet.apps.serve.ray_scale import RayScale
from torchfleet.apps.serve.settings import ServeSettings
from torchfleet.base.errors import FleetError
from torchfleet.launch.roles import free_ports
from torchfleet.observe.commands.command import main

PATIENCE = 240.0  # seconds: Ray starts half a dozen processes


@contextlib.contextmanager
def serving_on_ray(model: Path, *options: str) -> Iterator[Served]:
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "torchfleet.observe.commands", "serve", str(model), "--port", str(port)]
    quiet = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(
        [*command, "--cluster", "ray=local", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=quiet,
    )
    timer = threading.Timer(PATIENCE, process.kill)
    timer.start()
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("fleet serve:"):
                break
        assert lines, "no output"
        assert "/v2/models/" in lines[-1], "".join(lines)
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Served(process, lines[-1].replace(", on Ray", ""))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)
        timer.cancel()


@pytest.mark.cluster
def test_replicas_answer_as_the_model_does(tmp_path: Path) -> None:
    needs("ray.serve", "watchfiles")
    save_clicks(tmp_path / "model")
    model = fleet.load_inference_model(str(tmp_path / "model"), Clicks())
    with serving_on_ray(tmp_path / "model", "--replicas", "2", "--replica_cpus", "0.5") as served:
        assert served.get("/v2/health/ready")[0] == 200
        assert served.get("/v2/models/model")[1]["platform"] == "torchfleet"

        batches = [clicks_batch(4, seed) for seed in range(200)]
        expected = [model(**batch).tolist() for batch in batches]
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(served.infer, map(as_json, batches)))
        assert {status for status, _ in answers} == {200}
        for (_, found), right in zip(answers, expected, strict=True):
            assert found["outputs"][0]["data"] == pytest.approx(right, abs=1e-5)
        assert served.infer({"inputs": []})[0] == 400
    assert served.process.returncode == 0


@pytest.mark.parametrize(
    ("scale", "settings"),
    [
        (RayScale(min_replicas=3, max_replicas=2), ServeSettings("m")),
        (RayScale(cpus=0.0), ServeSettings("m")),
        (RayScale(target_ongoing=0), ServeSettings("m")),
        (RayScale(), ServeSettings("m", workers=2)),
        (RayScale(), ServeSettings("m", tls_cert="c", tls_key="k")),
        (RayScale(), ServeSettings("m", port=0)),
    ],
)
def test_what_ray_does_itself_is_refused(scale: RayScale, settings: ServeSettings) -> None:
    with pytest.raises(FleetError):
        scale.checked(settings)


@pytest.mark.parametrize("options", [("--replicas", "2"), ("--cluster", "mars"), ("--cluster", "ray=")])
def test_wrong_options_of_a_cluster_are_one_line(options: tuple[str, ...], tmp_path: Path) -> None:
    needs("uvicorn", "httptools")
    assert main(["serve", str(tmp_path), *options]) == 1
