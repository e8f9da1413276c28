"""examples/ctr_dnn in pods: the commands and environment of the manifests, run as a node of Kubernetes would."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import kube_node, kube_pods
from support.extras import Late
from support.paths import ROOT
from support.scripts.launching import forked_fleetrun, wait_until

from torchfleet.launch.cli import main

pytestmark = pytest.mark.xdist_group("k8s_pods")  # its fixture is made once

safetensors = Late("safetensors.numpy")

SCRIPT = ROOT / "examples" / "ctr_dnn" / "train.py"
COUNTS = ("--server_num", "2", "--worker_num", "2")
OPTIONS = ("--mode", "sync", "--epochs", "2", "--batch_size", "100", "--embedding_lr", "1e-2", "--print_period", "0")


def saved(model: Path) -> dict[str, dict[int, bytes]]:
    """Every number of a model: of each array, its rows by key, or by place where there are no keys."""
    found: dict[str, dict[int, bytes]] = {}
    for path in sorted(model.rglob("*.safetensors")):
        arrays = safetensors.load_file(path)
        keys = arrays.get("keys")
        for name, array in arrays.items():
            kept = found.setdefault(f"{re.sub(r'-[0-9]+', '', path.stem)}.{name}", {})
            is_keyed = keys is not None and len(keys) == len(array)
            places = keys if is_keyed else range(len(kept), len(kept) + len(array))
            kept |= {int(place): row.tobytes() for place, row in zip(places, array, strict=True)}
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(data, the model that processes of this machine make of it)."""
    folder = tmp_path_factory.mktemp("local")
    data, model = folder / "data", folder / "model"
    prepare = (str(SCRIPT.with_name("prepare.py")), "--rows", "2000", "--parts", "2", "--out", str(data))
    subprocess.run([sys.executable, *prepare], check=True, capture_output=True, timeout=60)
    where = ("--data", str(data), "--save", str(model))
    with forked_fleetrun(folder / "log", *COUNTS, str(SCRIPT), *OPTIONS, *where) as job:
        assert job.wait(100) == 0
    return data, model


@contextlib.contextmanager
def pods(
    trained: tuple[Path, Path], folder: Path, capsys: pytest.CaptureFixture[str], *flags: str
) -> Iterator[tuple[kube_node.Node, list[Any]]]:
    """(a node with the pods of the manifests, none of them started; the manifests). Models are saved to `folder`."""
    (folder / "node").mkdir()
    (folder / "models").mkdir()
    given = ("--image", "torchfleet:test", "--env", "OMP_NUM_THREADS=1", "--pvc", "data=/data:ro", "--pvc", "out=/out")
    where = ("--data", "/data", "--save", "/out/model")
    assert main(["k8s", *COUNTS, *given, *flags, str(SCRIPT), *OPTIONS, *where]) == 0
    documents = kube_pods.documents_of(capsys.readouterr().out)
    try:
        claims = {"data": trained[0], "out": folder / "models"}
        with kube_node.node(documents, folder / "node", claims) as node:
            yield node, documents
    except kube_node.NoPods as error:
        pytest.skip(f"pods cannot be run here: {error}")


def ends(node: kube_node.Node) -> list[int]:
    return [pod.process.wait(150) for pod in node.pods if pod.process]


@pytest.mark.cluster
def test_ctr_dnn_in_pods_equals_local_processes_bit_for_bit(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pods(trained, tmp_path, capsys) as (node, documents):
        for pod in reversed(node.pods):  # workers first: roles start in any order
            node.start(pod)
        server = node.pods[0]
        wait_until(lambda: node.ask(server, "/readyz") == "200", 150, "a server that is ready")
        assert node.ask(server, "/healthz") == "200"
        assert ends(node) == [0] * 4  # servers too: their Job completes
        outputs = [pod.output for pod in node.pods]
    model = saved(tmp_path / "models" / "model")
    assert model == saved(trained[1])
    assert sum(map(len, model.values())) > 1000
    keys = kube_pods.secret_texts(next(document for document in documents if document["kind"] == "Secret"))
    assert len(keys) == 4
    assert not [key for key in keys for output in outputs if key in output]
    assert all("listening on train-server" in output for output in outputs[:2])


@pytest.mark.cluster
def test_a_server_with_a_log_comes_back_at_another_address_and_nothing_is_lost(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pods(trained, tmp_path, capsys, "--durability", "log", "--max_restart", "1") as (node, _):
        for pod in node.pods:
            node.start(pod)
        worker = next(pod for pod in node.pods if "worker-0" in pod.host)
        wait_until(lambda: "epoch 1: test AUC" in worker.output, 150, "an epoch of two")
        old = node.pods[1]
        new = node.replace(old)
        assert new.address != old.address
        assert ends(node) == [0] * 4
        assert "left" not in old.output
        assert "left" in new.output
    assert saved(tmp_path / "models" / "model") == saved(trained[1])


RANKS = """
import torch
import torchfleet as fleet
fleet.init(is_collective=True)
model = fleet.distributed_model(torch.nn.Linear(1, 1))
found = fleet.util.all_gather(fleet.worker_index() + 1)
print(f"rank {fleet.worker_index()} of {fleet.worker_num()}: {found}", flush=True)
fleet.stop_worker()
"""


@pytest.mark.cluster
def test_ranks_of_a_collective_job_meet_at_the_pod_of_node_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "node").mkdir()
    flags = ("--image", "torchfleet:test", "--nnodes", "2", "--nproc_per_node", "1", "--insecure")
    assert main(["k8s", *flags, "--script_alone", str(tmp_path / "ranks.py")]) == 0
    documents = kube_pods.documents_of(capsys.readouterr().out)
    try:
        with kube_node.node(documents, tmp_path / "node", {}) as node:
            for pod in node.pods:
                node.start(pod)
            assert ends(node) == [0, 0]
            assert [f"rank {i} of 2: [1, 2]" in pod.output for i, pod in enumerate(node.pods)] == [True, True]
    except kube_node.NoPods as error:
        pytest.skip(f"pods cannot be run here: {error}")
