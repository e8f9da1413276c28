"""`fleetrun k8s apply`, `status`, `logs` and `delete`, by Kubernetes' own client, against a stand-in of its API."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.kube_api import KubeApi
from support.scripts.launching import clean_environment

from torchfleet.errors import FleetError, RoleError
from torchfleet.launch.clusters.k8s_command import main

INDEX = "batch.kubernetes.io/job-completion-index"
LABELS = {"app.kubernetes.io/instance": "job", "app.kubernetes.io/managed-by": "fleetrun"}
OTHER = {**LABELS, "app.kubernetes.io/instance": "other", "app.kubernetes.io/component": "worker"}


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with KubeApi() as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Manifests of a job, in a folder."""
    (tmp_path / "train.py").write_text("print(1)\n")
    out = tmp_path / "out"
    given = ["--image", "image", "--name", "job", "--durability", "log", "-o", str(out), str(tmp_path / "train.py")]
    assert main(given) == 0
    return out


def add(api: KubeApi, role: str, index: int, name: str, status: dict[str, Any], **more: Any) -> None:
    labels = {**LABELS, "app.kubernetes.io/component": role}
    api.add_pod(name, labels, status, annotations={INDEX: str(index)}, **more)


def test_what_is_applied_is_there_once_and_goes_whole(
    api: KubeApi, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ("--kubeconfig", api.kubeconfig(tmp_path, "team"))
    assert main(["apply", str(folder), *config]) == 0
    out = capsys.readouterr().out
    assert "secret/job-keys made" in out
    kinds = sorted(place[0] for place in api.objects)
    claims = ["networkpolicies", "persistentvolumeclaims", "secrets", "services"]
    assert kinds == sorted(["configmaps", "jobs", "jobs", *claims])
    assert {place[1] for place in api.objects} == {"team"}  # of the kubeconfig's context
    before = dict(api.objects)
    assert main(["apply", str(folder), *config]) == 0
    assert api.objects == before
    assert "made" not in capsys.readouterr().out
    api.objects["jobs", "team", "other"] = {"kind": "Job", "metadata": {"name": "other", "labels": OTHER}}
    assert main(["delete", "job", *config]) == 0
    assert list(api.objects) == [("jobs", "team", "other")]
    assert all("propagationPolicy=Background" in asked for asked in api.requests if asked.startswith("DELETE"))
    with pytest.raises(RoleError, match="no job 'job' in the namespace 'team'"):
        main(["delete", str(folder), *config])


def test_a_job_that_is_there_with_other_pods_is_not_changed(api: KubeApi, folder: Path, tmp_path: Path) -> None:
    config = ("--kubeconfig", api.kubeconfig(tmp_path))
    assert main(["apply", str(folder), *config]) == 0
    (path,) = folder.glob("*job-job-worker*")
    path.write_text(path.read_text().replace("image: image", "image: other"))
    with pytest.raises(FleetError, match=r"field is immutable\. A Job cannot be changed: `fleetrun k8s delete` it"):
        main(["apply", str(folder), *config])
    path.write_text(path.read_text().replace("workingDir:", "workingDirectory:"))
    with pytest.raises(FleetError, match="workingDirectory"):
        main(["apply", str(folder), *config])


def test_manifests_for_another_namespace_are_refused(api: KubeApi, folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.yaml"):
        path.write_text(path.read_text().replace("metadata:\n  name:", "metadata:\n  namespace: ml\n  name:"))
    config = ("--kubeconfig", api.kubeconfig(tmp_path))
    with pytest.raises(RoleError, match="is for the namespace 'ml', and this is 'other': give --namespace ml"):
        main(["apply", str(folder), "--namespace", "other", *config])
    assert main(["apply", str(folder), *config]) == 0
    assert {place[1] for place in api.objects} == {"ml"}


def test_status_shows_every_role_with_restarts_and_reasons(
    api: KubeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    pulling = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such \x1b[2Jimage"}}}
    unplaced = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    add(api, "worker", 1, "w1-a", {"phase": "Failed", "containerStatuses": [killed]}, created="2026-01-01T00:00:00Z")
    add(api, "worker", 1, "w1-b", {"phase": "Running"}, created="2026-01-01T00:05:00Z", nodeName="n2")
    add(api, "worker", 0, "w0", {"phase": "Pending", "containerStatuses": [pulling]})
    add(api, "server", 0, "s0", {"phase": "Running"}, nodeName="n1")
    env = [{"name": "FLEET_INDEX", "value": "7"}]
    add(api, "server", 0, "s7", {"phase": "Pending", "conditions": [unplaced]}, containers=[{"env": env}])
    api.add_pod("stranger", OTHER, {"phase": "Running"})
    config = ("--kubeconfig", api.kubeconfig(tmp_path))
    assert main(["status", "job", *config]) == 0
    rows = [line.split(maxsplit=6) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        ("server", "0", "s0", "0"),
        ("server", "7", "s7", "0"),
        ("worker", "0", "w0", "0"),
        ("worker", "1", "w1-b", "1"),
    ]
    assert [row[6] if len(row) > 6 else "" for row in rows] == [
        "", "Unschedulable: 0/3 nodes", "ImagePullBackOff: no such image", "before: OOMKilled, exit status 137",
    ]  # fmt: skip
    failed = {"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "exit code 2"}
    job = {"metadata": {"name": "job-worker", "labels": LABELS}, "status": {"conditions": [failed]}}
    api.objects["jobs", "default", "job-worker"] = job
    assert main(["status", "job", *config]) == 1
    assert "failed: job-worker: PodFailurePolicy: exit code 2" in capsys.readouterr().out
    with pytest.raises(RoleError, match="no job 'nobody' in the namespace 'default'"):
        main(["status", "nobody", *config])


def test_logs_interleave_roles_and_follow_pods_that_replace_others(
    api: KubeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchfleet.launch.clusters.k8s.pod_logs._PAUSE", 0.01)
    for index in range(2):
        add(api, "worker", index, f"w{index}", {"phase": "Succeeded"})
        api.logs[f"w{index}"] = [f"step {step}\n".encode() for step in range(20)]
    add(api, "server", 0, "s0", {"phase": "Succeeded"})
    api.logs["s0"] = [b"serv", b"ing \x1b[2J\xff", b"\nno end"]
    config = ("--kubeconfig", api.kubeconfig(tmp_path))
    assert main(["logs", "job", "--follow", *config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "server" in line] == ["server 0 | serving �", "server 0 | no end"]
    for index in range(2):
        own = [line for line in lines if line.startswith(f"worker {index} | ")]
        assert own == [f"worker {index} | step {step}" for step in range(20)]
    first = [line.startswith("worker 0") for line in lines if line.startswith("worker")]
    assert first != sorted(first, reverse=True), "lines of both workers come as they are written"
    assert any("follow=true" in asked for asked in api.requests)
    assert main(["logs", "job", "--role", "server", "--tail", "5", *config]) == 0
    assert capsys.readouterr().out.splitlines() == ["server 0 | serving �", "server 0 | no end"]
    assert "tailLines=5" in api.requests[-1]


def test_no_cluster_and_no_client_are_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RoleError, match=r"expected a kubeconfig at --kubeconfig, KUBECONFIG or ~/\.kube/config"):
        main(["apply", str(folder), "--kubeconfig", str(tmp_path / "none")])
    with KubeApi() as gone:
        config = gone.kubeconfig(tmp_path)
    with pytest.raises(FleetError, match=r"no cluster answers at http://127\.0\.0\.1"):
        main(["status", "job", "--kubeconfig", config])
    with pytest.raises(RoleError, match="expected a folder of manifests"):
        main(["apply", str(tmp_path / "nothing")])
    code = (
        "import sys; sys.modules['kubernetes'] = None\n"
        "from torchfleet.launch.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "k8s", "status", "job"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=clean_environment())
    assert ended.returncode == 2
    assert "pip install 'torchfleet[k8s]'" in ended.stderr
