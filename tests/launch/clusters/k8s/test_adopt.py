"""The pod that makes Jobs the owners of a job's objects, against an API server of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from torchfleet.launch.clusters.k8s.adopt import COMPLETE, FAILED, Api, adopt, clean

JOBS = ["apis/batch/v1/jobs/ctr-server", "apis/batch/v1/jobs/ctr-worker"]
SECRET = "api/v1/secrets/ctr-keys"


class Cluster:
    """Objects of the namespace `ml` by their path; merges patches as the API does, and removes Jobs with a TTL of 0."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, str, str]] = []  # method, path, what is accepted
        self.refused: set[str] = set()  # methods
        self.is_away = 0  # number of requests that are answered with 503

    def put(self, path: str, kind: str, **more: Any) -> None:
        base, resource, name = path.rsplit("/", 2)
        version = base.removeprefix("apis/").removeprefix("api/")
        metadata = {"name": name, "uid": f"uid-of-{name}"}
        self.objects[f"/{base}/namespaces/ml/{resource}/{name}"] = {
            "apiVersion": version, "kind": kind, "metadata": metadata, **more,
        }  # fmt: skip

    def get(self, path: str) -> dict[str, Any]:
        base, resource, name = path.rsplit("/", 2)
        return self.objects[f"/{base}/namespaces/ml/{resource}/{name}"]


def merged(old: Any, new: Any) -> Any:
    """RFC 7386."""
    if not isinstance(new, dict):
        return new
    return {**(old if isinstance(old, dict) else {}), **{k: merged((old or {}).get(k), v) for k, v in new.items()}}


@pytest.fixture
def cluster() -> Cluster:
    made = Cluster()
    for path in JOBS:
        made.put(path, "Job", spec={}, status={})
    made.put(SECRET, "Secret", data={"server.key": "eA=="})
    return made


@pytest.fixture
def api(cluster: Cluster, tmp_path: Path) -> Iterator[Api]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            cluster.asked.append((self.command, self.path, self.headers["Accept"]))
            assert self.headers["Authorization"] == "Bearer token-1"
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if cluster.is_away > 0:
                cluster.is_away -= 1
                return self.answer(503, {})
            if self.command in cluster.refused:
                return self.answer(403, {})
            if self.path not in cluster.objects:
                return self.answer(404, {})
            if self.command == "PATCH":
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                cluster.objects[self.path] = merged(cluster.objects[self.path], body)
            return self.answer(200, cluster.objects[self.path])

        do_PATCH = do_GET

        def answer(self, status: int, document: dict[str, Any]) -> None:
            data = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    (tmp_path / "token").write_text("token-1\n")
    (tmp_path / "namespace").write_text("ml")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield Api(f"http://127.0.0.1:{server.server_port}", tmp_path, pause=0.01, patience=60.0)
        server.shutdown()
        thread.join(10)


def test_every_job_owns_the_secret_and_keys_are_not_asked_for(cluster: Cluster, api: Api) -> None:
    cluster.is_away = 3
    for _ in range(2):  # a pod that is replaced does it again
        adopt(api, JOBS, [SECRET])
    secret = cluster.get(SECRET)
    assert secret["metadata"]["ownerReferences"] == [
        {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": f"uid-of-{name}"}
        for name in ("ctr-server", "ctr-worker")
    ]
    assert secret["data"] == {"server.key": "eA=="}
    changes = [(path, accept) for method, path, accept in cluster.asked if "secrets" in path]
    assert changes
    assert all("PartialObjectMetadata" in accept for _, accept in changes)


def test_objects_that_are_applied_later_are_waited_for_and_a_refusal_is_not(cluster: Cluster, api: Api) -> None:
    late = "api/v1/configmaps/ctr-script"
    timer = threading.Timer(0.1, cluster.put, (late, "ConfigMap"))
    timer.start()
    adopt(api, JOBS, [late])
    timer.join(10)
    assert len(cluster.get(late)["metadata"]["ownerReferences"]) == 2
    cluster.refused.add("PATCH")
    cluster.asked.clear()
    with pytest.raises(OSError, match=f"{SECRET}.*403"):
        adopt(api, JOBS, [SECRET])
    assert [method for method, _, _ in cluster.asked] == ["GET", "GET", "PATCH"]


@pytest.mark.parametrize(
    ("ends", "clean_on", "is_removed"),
    [
        ((COMPLETE, COMPLETE), COMPLETE, True),
        ((COMPLETE, COMPLETE), FAILED, False),
        ((FAILED, COMPLETE), COMPLETE, False),
        ((COMPLETE, FAILED), FAILED, True),
    ],
)
def test_jobs_are_removed_by_how_they_ended(
    cluster: Cluster, api: Api, ends: tuple[str, str], clean_on: str, is_removed: bool
) -> None:
    def finish() -> None:
        for path, end in zip(JOBS, ends, strict=True):
            job = cluster.get(path)
            job["status"] = {
                "conditions": [{"type": "SuccessCriteriaMet", "status": "True"}, {"type": end, "status": "True"}]
            }

    timer = threading.Timer(0.1, finish)
    timer.start()
    end = clean(api, JOBS, clean_on, pause=0.01)
    timer.join(10)
    assert end == (FAILED if FAILED in ends else COMPLETE)
    assert [cluster.get(path)["spec"] for path in JOBS] == [{"ttlSecondsAfterFinished": 0} if is_removed else {}] * 2
