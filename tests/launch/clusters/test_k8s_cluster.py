"""`fleetrun k8s apply`, `status`, `logs` and `delete`, by Kubernetes' own client, against a stand-in of its API."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.extras import needing
from support.kube_api import KubeApi
from support.scripts.launching import clean_environment

from torchfleet.base.errors import FleetError, RoleError
from torchfleet.launch.clusters.k8s.k8s_api import Cluster
from torchfleet.launch.clusters.k8s.pod_logs import JobLogs
from torchfleet.launch.clusters.k8s_command import main

pytestmark = needing("kubernetes", "kubernetes_validate")

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


def test_logs_have_the_role_of_every_line(api: KubeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(api, "worker", 10, "w", {"phase": "Running"})
    add(api, "worker", 11, "waiting", {"phase": "Pending"})
    add(api, "server", 0, "s", {"phase": "Running"})
    api.logs = {"w": [b"step 1\nstep 2\n"], "s": [b"serv", b"ing \x1b[2J\xff", b"\nno end"], "waiting": [b"none\n"]}
    config = ("--kubeconfig", api.kubeconfig(tmp_path))
    assert main(["logs", "job", *config]) == 0
    served = ["server 0  | serving \ufffd", "server 0  | no end"]
    assert capsys.readouterr().out.splitlines() == [*served, "worker 10 | step 1", "worker 10 | step 2"]
    assert main(["logs", "job", "--role", "server", "--tail", "5", *config]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert "tailLines=5" in api.requests[-1]
    with pytest.raises(RoleError, match="no pods of 'job'"):
        main(["logs", "job", "--role", "rank", *config])


def test_followed_logs_come_as_they_are_written_and_from_pods_that_replace_others(
    api: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchfleet.launch.clusters.k8s.pod_logs._PAUSE", 0.01)
    shown: list[str] = []
    seen = {text: threading.Event() for text in ("worker 0 | begins", "worker 1 | begins", "worker 1 | is killed")}

    def show(line: str) -> None:
        shown.append(line)
        if line == "worker 1 | is killed":  # its Job makes another pod, and keeps this one
            add(api, "worker", 1, "w1", {"phase": "Failed"})
            add(api, "worker", 1, "w1-new", {"phase": "Succeeded"}, created="2026-02-01T00:00:00Z")
        if line == "worker 1 | is back":
            add(api, "worker", 0, "w0", {"phase": "Succeeded"})
        if line in seen:
            seen[line].set()

    for index in range(2):
        add(api, "worker", index, f"w{index}", {"phase": "Running"})
    api.logs["w0"] = [b"begins\n", seen["worker 1 | begins"], b"goes on\n", seen["worker 1 | is killed"], b"ends\n"]
    api.logs["w1"] = [b"begins\n", seen["worker 0 | begins"], b"is killed\n"]
    api.logs["w1-new"] = [b"is back\n"]
    cluster = Cluster(api.kubeconfig(tmp_path))
    assert JobLogs(cluster, LABELS, show, None).follow() == 2
    assert sorted(shown) == [
        "worker 0 | begins", "worker 0 | ends", "worker 0 | goes on", "worker 1 | begins", "worker 1 | is back",
        "worker 1 | is killed",
    ]  # fmt: skip
    assert max(map(shown.index, seen)) <= shown.index("worker 0 | ends")


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
