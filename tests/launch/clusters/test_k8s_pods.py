"""examples/ctr_dnn in pods: the commands and environment of the manifests, run as a node of Kubernetes would."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.numpy import load_file
from support import kubelet
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun, wait_until

from torchfleet.launch.cli import main

SCRIPT = ROOT / "examples" / "ctr_dnn" / "train.py"
OPTIONS = ("--mode", "sync", "--epochs", "1", "--batch_size", "100", "--embedding_lr", "1e-2", "--print_period", "0")


def saved(model: Path) -> dict[str, dict[int, bytes]]:
    """Every number of a model: of each array, its rows by key, or by place where there are no keys."""
    found: dict[str, dict[int, bytes]] = {}
    for path in sorted(model.rglob("*.safetensors")):
        arrays = load_file(path)
        keys = arrays.get("keys")
        for name, array in arrays.items():
            kept = found.setdefault(f"{re.sub(r'-[0-9]+', '', path.stem)}.{name}", {})
            is_keyed = keys is not None and len(keys) == len(array)
            places = keys if is_keyed else range(len(kept), len(kept) + len(array))
            kept |= {int(place): row.tobytes() for place, row in zip(places, array, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_ctr_dnn_in_pods_equals_local_processes_bit_for_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    prepare = [
        sys.executable,
        str(SCRIPT.with_name("prepare.py")),
        "--rows",
        "2000",
        "--parts",
        "2",
        "--out",
        str(data),
    ]
    subprocess.run(prepare, check=True, capture_output=True, timeout=60)
    counts = ("--server_num", "2", "--worker_num", "2")
    given = ("--image", "torchfleet:test", "--env", "OMP_NUM_THREADS=1", "--pvc", "disk=/data")
    assert main(["k8s", *counts, *given, str(SCRIPT), *OPTIONS, "--data", "/data", "--save", "/data/pods"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    (tmp_path / "node").mkdir()
    try:
        with kubelet.node(documents, tmp_path / "node", {"disk": data}) as node:
            for pod in reversed(node.pods):  # workers first: roles start in any order
                node.start(pod)
            server = node.pods[0]
            wait_until(lambda: node.ask(server, "/readyz") == "200", 100, "a server that is ready")
            assert node.ask(server, "/healthz") == "200"
            ended = [pod.process.wait(100) for pod in node.pods if pod.process]
            assert ended == [0] * 4  # servers too: their Job completes
            outputs = [pod.output for pod in node.pods]
    except kubelet.NoPods as error:
        pytest.skip(f"pods cannot be run here: {error}")
    with forked_fleetrun(tmp_path / "log", *counts, str(SCRIPT), *OPTIONS, "--data", str(data), "--save",
                         str(tmp_path / "local")) as job:  # fmt: skip
        assert job.wait(100) == 0
    local, pods = saved(tmp_path / "local"), saved(data / "pods")
    assert local == pods
    assert sum(map(len, pods.values())) > 1000
    secret = next(document for document in documents if document["kind"] == "Secret")
    keys = kubelet.secret_texts(secret)
    assert len(keys) == 4
    assert not [key for key in keys for output in outputs if key in output]
    assert all("listening on train-server" in output for output in outputs[:2])
