"""Runs in a pod of a job, and makes the Jobs of the job the owners of its other objects: when the Jobs are removed,
Kubernetes then removes these objects too.

python -m torchfleet.launch.clusters.k8s.adopt [--clean_on Complete|Failed] --owners PATH ... --owned PATH ...

A path is that of an object in the API without its namespace, such as apis/batch/v1/jobs/NAME. With --clean_on the
process stays until all owners have finished, and has them removed if all are complete, or if one has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts the token of a pod
# Ask for replies that contain only metadata: the full reply to a change of a Secret would contain its keys.
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_PATIENCE = 300.0  # seconds to wait for objects that are applied later, and for an API server that does not answer
_REQUEST = 30.0
COMPLETE, FAILED = "Complete", "Failed"


class Api:
    """The API server, for objects of one namespace. `account`: the folder with the token, which Kubernetes renews now
    and then, the namespace and the server's certificate."""

    def __init__(self, url: str, account: Path = ACCOUNT, pause: float = 2.0, patience: float = _PATIENCE) -> None:
        self._url, self._account, self._pause, self._patience = url, account, pause, patience
        self._namespace = (account / "namespace").read_text().strip()
        self._context = ssl.create_default_context(cafile=str(account / "ca.crt")) if url.startswith("https") else None

    def get(self, path: str) -> dict[str, Any]:
        """Return an object. Waits up to `patience` seconds for an object that does not exist yet. Raises OSError."""
        return self._ask("GET", path, None, "application/json")

    def patch(self, path: str, change: dict[str, Any]) -> None:
        """Merge a change into an object. Raises OSError."""
        self._ask("PATCH", path, change, _METADATA)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, accept: str) -> dict[str, Any]:
        end = time.monotonic() + self._patience
        while True:
            try:
                return self._once(method, path, body, accept)
            except OSError as error:  # urllib's errors are OSErrors, also those for refusals by the server
                is_refused = isinstance(error, urllib.error.HTTPError) and error.code in (400, 401, 403, 422)
                if is_refused or time.monotonic() >= end:
                    raise OSError(f"{method} {path}: {error}") from error
            time.sleep(self._pause)

    def _once(self, method: str, path: str, body: dict[str, Any] | None, accept: str) -> dict[str, Any]:
        base, resource, name = path.rsplit("/", 2)
        url = f"{self._url}/{base}/namespaces/{self._namespace}/{resource}/{name}"
        headers = {"Authorization": f"Bearer {(self._account / 'token').read_text().strip()}", "Accept": accept}
        if body is not None:
            headers["Content-Type"] = "application/merge-patch+json"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=_REQUEST, context=self._context) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found


def adopt(api: Api, owners: Sequence[str], owned: Sequence[str]) -> None:
    """Make `owners` the owners of all of `owned`. An object is removed when its last owner is. Raises OSError."""
    references = []
    for path in owners:
        found = api.get(path)
        own = {"apiVersion": found["apiVersion"], "kind": found["kind"]}
        references.append({**own, "name": found["metadata"]["name"], "uid": found["metadata"]["uid"]})
    for path in owned:
        api.patch(path, {"metadata": {"ownerReferences": references}})


def clean(api: Api, owners: Sequence[str], clean_on: str, pause: float = 15.0) -> str:
    """Wait until all Jobs have finished. Have them removed if they end as `clean_on` says. Returns how they ended."""
    while True:
        ends = [_end_of(api.get(path)) for path in owners]
        if all(ends):
            break
        time.sleep(pause)
    end = FAILED if FAILED in ends else COMPLETE
    if end == clean_on:
        for path in owners:
            api.patch(path, {"spec": {"ttlSecondsAfterFinished": 0}})
    return end


def _end_of(job: dict[str, Any]) -> str | None:
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["type"] in (COMPLETE, FAILED) and condition["status"] == "True":
            return str(condition["type"])
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchfleet.launch.clusters.k8s.adopt", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--clean_on", choices=(COMPLETE, FAILED), help="remove the owners when they have ended so")
    parser.add_argument("--owners", nargs="+", required=True, metavar="PATH", help="Jobs, or a JobSet")
    parser.add_argument("--owned", nargs="+", required=True, metavar="PATH", help="objects that belong to them")
    options = parser.parse_args(arguments)
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    task, left = "make the Jobs the owners of the job's other objects", "these objects"
    try:
        api = Api(f"https://{f'[{host}]' if ':' in host else host}:{port}")
        adopt(api, options.owners, options.owned)
        print(f"{len(options.owned)} objects are removed with {', '.join(options.owners)}", flush=True)
        if options.clean_on:
            task, left = "have the Jobs removed when they have finished", "them"
            print(f"all have ended: {clean(api, options.owners, options.clean_on)}", flush=True)
    except OSError as error:
        print(f"could not {task}: {error}. Delete {left} yourself.", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
