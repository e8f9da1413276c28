"""The objects that make the Jobs of a job the owners of its other objects: Kubernetes removes these with the Jobs.

A reference to an owner needs the owner's uid, which the cluster assigns when it creates the Job, so no manifest can
contain it. A small pod sets the references (adopt.py). Its rights cover only these objects, by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchfleet.launch.clusters.k8s.k8s_job import OWNER, WORK, Document, K8sJob
from torchfleet.launch.clusters.k8s.pod_resources import SMALL
from torchfleet.launch.clusters.k8s.pod_template import NO_RIGHTS, k8s_object, labels, placement, security

ADOPT = ("python", "-m", "torchfleet.launch.clusters.k8s.adopt")
_DAY = 86_400
_RESOURCES = {
    "Service": "services", "NetworkPolicy": "networkpolicies", "Secret": "secrets", "ConfigMap": "configmaps",
    "PodDisruptionBudget": "poddisruptionbudgets", "ServiceAccount": "serviceaccounts", "Role": "roles",
    "RoleBinding": "rolebindings", "Job": "jobs", "JobSet": "jobsets",
}  # fmt: skip


def owner(job: K8sJob, objects: Sequence[Document], running: Sequence[Document]) -> list[Document]:
    """Return a ServiceAccount, its rights, and the Job whose pod makes `running` the owners of `objects` and of the
    account and its rights. Volumes of logs are left out: their data outlives the Jobs."""
    name = f"{job.name}-{OWNER}"
    account = k8s_object(job, "v1", "ServiceAccount", name)
    account["automountServiceAccountToken"] = False
    role = k8s_object(job, "rbac.authorization.k8s.io/v1", "Role", name)
    binding = k8s_object(job, "rbac.authorization.k8s.io/v1", "RoleBinding", name)
    binding["roleRef"] = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    namespace = {"namespace": job.namespace} if job.namespace else {}
    binding["subjects"] = [{"kind": "ServiceAccount", "name": name, **namespace}]
    owned = [*(each for each in objects if each["kind"] in _RESOURCES), account, role, binding]
    verbs = ["get", "patch"] if job.cleans_on else ["get"]
    # Clusters with the admission plugin OwnerReferencesPermissionEnforcement require `delete`, too, to change owners.
    role["rules"] = [_rule(each, verbs) for each in running] + [_rule(each, ["patch", "delete"]) for each in owned]
    return [account, role, binding, _job(job, name, [_path(each) for each in running], [_path(each) for each in owned])]


def _rule(document: Document, verbs: list[str]) -> Document:
    group = document["apiVersion"].rpartition("/")[0]
    names = [document["metadata"]["name"]]
    return {"apiGroups": [group], "resources": [_RESOURCES[document["kind"]]], "resourceNames": names, "verbs": verbs}


def _path(document: Document) -> str:
    """Return the place of an object in the API, without its namespace: apis/batch/v1/jobs/NAME."""
    version = document["apiVersion"]
    base = f"apis/{version}" if "/" in version else f"api/{version}"
    return f"{base}/{_RESOURCES[document['kind']]}/{document['metadata']['name']}"


def _job(job: K8sJob, name: str, owners: list[str], owned: list[str]) -> Document:
    made = k8s_object(job, "batch/v1", "Job", name)
    made["metadata"]["labels"] = labels(job, OWNER)
    cleaning = ["--clean_on", job.cleans_on] if job.cleans_on else []
    container: Document = {
        "name": OWNER,
        "image": job.image,
        "command": [*ADOPT, *cleaning, "--owners", *owners, "--owned", *owned],
        "workingDir": WORK,
        "resources": SMALL,
        "volumeMounts": [{"name": "work", "mountPath": WORK}],
        "securityContext": dict(NO_RIGHTS),
    }
    spec: Document = {
        "restartPolicy": "Never",
        "serviceAccountName": name,
        "automountServiceAccountToken": True,  # the only pod with a token
        "enableServiceLinks": False,
        "securityContext": security(job),
        "containers": [container],
        "volumes": [{"name": "work", "emptyDir": {}}],
        **placement(job),
    }
    made["spec"] = {
        "backoffLimit": 6,
        "ttlSecondsAfterFinished": _DAY if job.ttl is None else job.ttl,
        "template": {"metadata": {"labels": labels(job, OWNER)}, "spec": spec},
    }
    return made
