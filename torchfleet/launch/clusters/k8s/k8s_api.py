"""A cluster of Kubernetes, asked through its official client: objects of a job made, listed and removed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from torchfleet.base.errors import FleetError, RoleError
from torchfleet.base.extras import required
from torchfleet.launch.clusters.k8s.k8s_job import Document

MANAGER = "fleetrun"  # the owner of the fields that it has set, as server-side apply has it
# Kind → its group and the name of its collection, of all that a job is made of; in the order in which to remove them.
KINDS = {
    "JobSet": ("/apis/jobset.x-k8s.io/v1alpha2", "jobsets"),
    "Job": ("/apis/batch/v1", "jobs"),
    "Service": ("/api/v1", "services"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Secret": ("/api/v1", "secrets"),
    "PersistentVolumeClaim": ("/api/v1", "persistentvolumeclaims"),
}
_PODS = ("/api/v1", "pods")
_TIMES = (5.0, 30.0)  # seconds to connect, and for an answer
_NOT_FOUND = 404


class Cluster:
    """The cluster of a kubeconfig, or of the pod that this process runs in, and one namespace of it."""

    def __init__(self, kubeconfig: str | None = None, context: str | None = None, namespace: str | None = None) -> None:
        client, config = _client()
        configuration = client.Configuration()
        try:
            config.load_kube_config(kubeconfig, context, client_configuration=configuration)
            named = _namespace(config, kubeconfig, context)
        except config.ConfigException as error:
            if kubeconfig or context or not os.environ.get("KUBERNETES_SERVICE_HOST"):
                raise RoleError(
                    f"no cluster: expected a kubeconfig at --kubeconfig, KUBECONFIG or ~/.kube/config; found: {error}"
                ) from None
            config.load_incluster_config(client_configuration=configuration)
            named = "default"
        configuration.retries = False  # a cluster that cannot be reached is said at once
        self.host = configuration.host
        self.namespace = namespace or named
        self._error = client.ApiException
        self._client = client.ApiClient(configuration)

    def apply(self, document: Document) -> str:
        """Make an object, or change it to what `document` says: "made" or "there". Twice is as once."""
        kind, name = document["kind"], document["metadata"]["name"]
        if kind not in KINDS:
            raise RoleError(f"{kind} {name}: expected kinds that fleetrun k8s writes ({', '.join(KINDS)}); use kubectl")
        query = {"fieldManager": MANAGER, "force": "true"}
        namespace = self._namespace_of(document)
        answer = self._ask("PATCH", self._path(KINDS[kind], namespace, name), query, document)
        answer.read()  # so that the connection can be used again
        return "made" if answer.status == 201 else "there"

    def items(self, kind: str, labels: Mapping[str, str]) -> list[Document]:
        """The objects of a kind, or pods, with these labels; none of a kind that the cluster does not know."""
        place = KINDS.get(kind, _PODS)
        answer = self._ask("GET", self._path(place, self.namespace), {"labelSelector": _selector(labels)}, missing=True)
        return [] if answer is None else list(json.loads(answer.data).get("items") or [])

    def remove(self, kind: str, labels: Mapping[str, str]) -> int:
        """Remove all objects of a kind with these labels, and what they own; returns how many there were."""
        num = len(self.items(kind, labels))
        if num:
            query = {"labelSelector": _selector(labels), "propagationPolicy": "Background"}
            self._ask("DELETE", self._path(KINDS[kind], self.namespace), query).read()
        return num

    def log(self, pod: str, follow: bool, tail: int | None) -> Any:
        """The output of a pod, as a stream of bytes. None if there is none yet, or no more."""
        query = {"follow": "true"} if follow else {}
        if tail is not None:
            query["tailLines"] = str(tail)
        path = f"{self._path(_PODS, self.namespace, pod)}/log"
        return self._ask("GET", path, query, missing=True, times=(_TIMES[0], None if follow else _TIMES[1]))

    def _namespace_of(self, document: Document) -> str:
        own = document["metadata"].get("namespace")
        if own and own != self.namespace:
            raise RoleError(
                f"{document['kind']} {document['metadata']['name']} is for the namespace {own!r}, and this is "
                f"{self.namespace!r}: give --namespace {own}"
            )
        return self.namespace

    @staticmethod
    def _path(place: tuple[str, str], namespace: str, name: str = "") -> str:
        group, collection = place
        return f"{group}/namespaces/{namespace}/{collection}{'/' if name else ''}{name}"

    def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Document | None = None,
        missing: bool = False,
        times: tuple[float, float | None] = _TIMES,
    ) -> Any:
        """The response, unread. `missing`: None instead of an error if what is asked for is not there."""
        headers = {"Accept": "application/json"}
        if method == "PATCH":
            headers["Content-Type"] = "application/apply-patch+yaml"
        try:
            return self._client.call_api(
                path, method, {}, list(query.items()), headers, body,
                auth_settings=["BearerToken"], _preload_content=False, _request_timeout=times,
            )  # fmt: skip
        except self._error as error:
            if missing and error.status == _NOT_FOUND:
                return None
            raise FleetError(f"the cluster at {self.host} refuses {method} {path}: {_said(error)}") from None
        except Exception as error:  # urllib3's: a dozen kinds, which the client does not name
            raise FleetError(
                f"no cluster answers at {self.host}: {type(error).__name__}: {error}. Does `kubectl get pods` work "
                "with this kubeconfig and context?"
            ) from None


def _client() -> tuple[Any, Any]:
    user, otherwise = "fleetrun k8s apply, status, logs and delete", "; or use kubectl apply --server-side -f DIR"
    client, config = (required(f"kubernetes.{name}", user, "k8s", otherwise) for name in ("client", "config"))
    return client, config


def _namespace(config: Any, kubeconfig: str | None, context: str | None) -> str:
    """That of the context; Kubernetes' default if it names none."""
    contexts, active = config.list_kube_config_contexts(kubeconfig)
    chosen = next((found for found in contexts if found["name"] == context), active)
    return str((chosen or {}).get("context", {}).get("namespace") or "default")


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _said(error: Any) -> str:
    """The text of the cluster's own answer, which has a message, or of the exception."""
    try:
        message = json.loads(error.body)["message"]
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"
    hint = ""
    if "field is immutable" in message:
        hint = ". A Job cannot be changed: `fleetrun k8s delete` it first, or give another --name"
    return f"{message}{hint}"
