"""A stand-in for the API server of Kubernetes, at the outermost boundary: there is no cluster where tests run.

It keeps objects in memory, checks every one that is applied against Kubernetes' own schema, and answers what
`fleetrun k8s apply`, `status`, `logs` and `delete` ask. It runs no pods: tests put them there.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from support.extras import Late

kubernetes_validate = Late("kubernetes_validate")

Document = dict[str, Any]
VERSION = "1.34"
TOKEN = "a-token-of-the-tests"
_IMMUTABLE = {"Job": ("spec",)}


class KubeApi:
    """Serves on a port of loopback until it is left. `objects`: (collection, namespace, name) → document."""

    def __init__(self, missing: tuple[str, ...] = ("jobsets",)) -> None:
        self.objects: dict[tuple[str, str, str], Document] = {}
        self.logs: dict[str, list[bytes | threading.Event]] = {}  # of a pod: what is sent, and waited for
        self.requests: list[str] = []
        self.missing = missing  # collections that this cluster does not know
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    def __enter__(self) -> KubeApi:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def kubeconfig(self, folder: Path, namespace: str | None = None) -> str:
        """A file by which a client finds this server."""
        context: Document = {"cluster": "tests", "user": "tests", **({"namespace": namespace} if namespace else {})}
        written = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {"server": f"http://127.0.0.1:{self._server.server_port}"}}],
            "contexts": [{"name": "tests", "context": context}],
            "users": [{"name": "tests", "user": {"token": TOKEN}}],
        }
        path = folder / "kubeconfig"
        path.write_text(yaml.safe_dump(written))
        return str(path)

    def add_pod(self, name: str, labels: dict[str, str], status: Document, **more: Any) -> None:
        metadata = {"name": name, "labels": labels, "annotations": more.pop("annotations", {})}
        metadata["creationTimestamp"] = more.pop("created", "2026-01-01T00:00:00Z")
        self.objects["pods", "default", name] = {"metadata": metadata, "spec": more, "status": status}

    def chosen(self, collection: str, namespace: str, selector: str) -> dict[tuple[str, str, str], Document]:
        wanted = dict(part.split("=", 1) for part in selector.split(",") if part)
        return {
            place: document
            for place, document in self.objects.items()
            if place[:2] == (collection, namespace) and wanted.items() <= document["metadata"].get("labels", {}).items()
        }

    def apply(self, place: tuple[str, str, str], query: dict[str, list[str]], text: bytes) -> tuple[int, Document]:
        """As server-side apply does, for one manager that owns everything."""
        document = yaml.safe_load(text)
        if "fieldManager" not in query:
            return 422, {"message": "fieldManager is required for apply patch"}
        if document["metadata"]["name"] != place[2] or document["metadata"].get("namespace", place[1]) != place[1]:
            return 400, {"message": "the name of the object does not match the name on the URL"}
        if document["kind"] != "JobSet":
            try:
                kubernetes_validate.validate(document, VERSION, strict=True)
            except kubernetes_validate.ValidationError as error:
                return 422, {"message": f"{document['kind']} is invalid: {error.message}"}
        before = self.objects.get(place)
        fields = _IMMUTABLE.get(document["kind"], ())
        if before is not None and any(before[field] != document[field] for field in fields):
            return 422, {"message": f"{document['kind']} is invalid: spec.template: field is immutable"}
        self.objects[place] = document
        return (201 if before is None else 200), document


def _handler(api: KubeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            place, rest, query = self._asked()
            if rest == "log":
                self._send_log(place[2])
                return
            selector = query.get("labelSelector", [""])[0]
            found = list(api.chosen(place[0], place[1], selector).values())
            self._answer(404 if place[0] in api.missing else 200, {"items": found, "message": "not found"})

        def do_PATCH(self) -> None:
            place, _, query = self._asked()
            text = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Type"] != "application/apply-patch+yaml":
                self._answer(415, {"message": "expected an apply patch"})
                return
            self._answer(*api.apply(place, query, text))

        def do_DELETE(self) -> None:
            place, _, query = self._asked()
            for chosen in api.chosen(place[0], place[1], query["labelSelector"][0]):
                del api.objects[chosen]
            self._answer(200, {"status": "Success"})

        def _asked(self) -> tuple[tuple[str, str, str], str, dict[str, list[str]]]:
            assert self.headers["Authorization"] == f"Bearer {TOKEN}"
            api.requests.append(f"{self.command} {self.path}")
            url = urlsplit(self.path)
            collection, name, rest = [*url.path.partition("/namespaces/")[2].split("/")[1:], "", "", ""][:3]
            namespace = url.path.partition("/namespaces/")[2].split("/")[0]
            return (collection, namespace, name), rest, parse_qs(url.query)

        def _send_log(self, pod: str) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in api.logs.get(pod, []):
                if isinstance(piece, threading.Event):
                    piece.wait(20)
                    continue
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        def _answer(self, status: int, body: Document) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *arguments: Any) -> None:
            """The tests look at `requests`."""

    return Handler
