"""What a cluster that others use asks of manifests: quotas, evictions, spread, accounts, priorities, elastic workers,
and that nothing is left when a job is over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import kube_pods
from support.messages import naming

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s_command import main

ETCD = ("--replicas", "2", "--coordinator", "etcd://etcd:2379/ctr")
BOTH = (*ETCD, "--durability", "log")
INDEX = "batch.kubernetes.io/job-completion-index"
SERVER = "fleet-server"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


@pytest.fixture
def made(script: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def make(*flags: str) -> list[dict[str, Any]]:
        assert main(["--image", "image", "--name", "ctr", *flags, str(script)]) == 0
        return kube_pods.documents_of(capsys.readouterr().out)

    return make


def templates(found: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for document in found:
        if document["kind"] == "Job":
            yield document["spec"]["template"]
        elif document["kind"] == "JobSet":
            yield from (job["template"]["spec"]["template"] for job in document["spec"]["replicatedJobs"])


def named(found: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(each for each in found if (each["kind"], each["metadata"]["name"]) == (kind, name))


def cores(text: str) -> float:
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ETCD,
        ("--durability", "log"),
        BOTH,
        ("--nnodes", "2", "--nproc_per_node", "2", "--insecure"),
        ("--format", "jobset"),
    ],
    ids=["plain", "replicas", "log", "both", "ranks", "jobset"],
)
def test_no_quota_of_cores_or_memory_refuses_a_container(made: Any, flags: tuple[str, ...]) -> None:
    """A quota of a resource refuses pods of which any container, init containers too, does not say how much."""
    for template in templates(made(*flags)):
        for container in (*template["spec"]["containers"], *template["spec"].get("initContainers", [])):
            given = container["resources"]
            for kind in ("requests", "limits"):
                assert {"cpu", "memory"} <= set(given[kind])
            assert cores(given["requests"]["cpu"]) <= cores(given["limits"]["cpu"])


def test_resources_are_those_that_were_asked_for(made: Any) -> None:
    found = made("--server_memory", "8GB", "--worker_cpus", "2", "--worker_memory", "1GB", "--gpus", "1")
    given = {job["metadata"]["name"]: kube_pods.pods_of([job])[0] for job in kube_pods.jobs_of(found)}
    server, worker = (given[name].container["resources"] for name in ("ctr-server", "ctr-worker"))
    assert server["requests"] == {"cpu": "1000m", "memory": str(8 << 30)}
    assert worker["requests"] == {"cpu": "2000m", "memory": str(1 << 30)}
    assert worker["limits"] == {"cpu": "4000m", "memory": str(1 << 30), "nvidia.com/gpu": "1"}
    assert given["ctr-worker"].environment()["OMP_NUM_THREADS"] == "2"
    (rank,) = kube_pods.pods_of(made("--nproc_per_node", "4", "--insecure"))
    assert rank.container["resources"]["requests"] == {"cpu": "4000m", "memory": str(16 << 30)}
    assert rank.environment()["OMP_NUM_THREADS"] == "1"


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """As Kubernetes matches labels."""
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def pod_labels(found: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The labels of every pod of the roles, with the one that the controller of Indexed Jobs adds."""
    return [
        {**job["spec"]["template"]["metadata"]["labels"], INDEX: str(index)}
        for job in kube_pods.jobs_of(found)
        for index in range(job["spec"]["completions"])
    ]


@pytest.mark.parametrize(("flags", "number"), [(ETCD, INDEX), (BOTH, SERVER)], ids=["replicas", "both"])
def test_of_a_server_and_its_backup_one_is_evicted_at_a_time(made: Any, flags: tuple[str, ...], number: str) -> None:
    found = made("--server_num", "3", "--worker_num", "2", *flags)
    budgets = [each["spec"] for each in found if each["kind"] == "PodDisruptionBudget"]
    pairs = []
    for budget in budgets:
        assert budget["minAvailable"] == 1
        chosen = [labels for labels in pod_labels(found) if selects(budget["selector"], labels)]
        assert {labels["app.kubernetes.io/component"] for labels in chosen} == {"server", "backup"}
        assert len(chosen) == 2
        pairs.append({labels[number] for labels in chosen})
    assert pairs == [{"0"}, {"1"}, {"2"}]
    assert not [each for each in made("--server_num", "3") if each["kind"] == "PodDisruptionBudget"]


def may_be_on(
    constraints: list[dict[str, Any]], pod: dict[str, str], nodes: dict[str, list[dict[str, str]]]
) -> set[str]:
    """The nodes where the scheduler lets a pod be: its documented rule of topologySpreadConstraints."""
    allowed = set(nodes)
    for each in constraints:
        if each["whenUnsatisfiable"] != "DoNotSchedule":
            continue
        same = {key: pod[key] for key in each.get("matchLabelKeys", [])}
        selector = {**each["labelSelector"], "matchLabels": {**each["labelSelector"]["matchLabels"], **same}}
        counts = {node: sum(selects(selector, other) for other in pods) for node, pods in nodes.items()}
        least = 0 if len(nodes) < each.get("minDomains", 1) else min(counts.values())
        allowed &= {node for node, count in counts.items() if count + 1 - least <= each["maxSkew"]}
    return allowed


@pytest.mark.parametrize(("replicas", "number"), [(ETCD, INDEX), (BOTH, SERVER)], ids=["replicas", "both"])
def test_a_required_spread_keeps_pods_waiting_and_a_preferred_one_does_not(
    made: Any, replicas: tuple[str, ...], number: str
) -> None:
    for flags, is_required in (((), False), (("--spread", "require"), True)):
        found = made("--server_num", "2", *replicas, *flags)
        (constraints,) = {str(job["spec"]["template"]["spec"].get("topologySpreadConstraints")): job for job in
                          kube_pods.jobs_of(found) if "worker" not in job["metadata"]["name"]}.values()  # fmt: skip
        rules = constraints["spec"]["template"]["spec"]["topologySpreadConstraints"]
        pods = {(p["app.kubernetes.io/component"], p.get(number)): p for p in pod_labels(found)}
        one = {"a": [pods["server", "0"]]}
        assert bool(may_be_on(rules, pods["backup", "0"], one)) is not is_required
        two = {"a": [pods["server", "0"], pods["server", "1"]], "b": [pods["backup", "1"]]}
        assert may_be_on(rules, pods["backup", "0"], two) == ({"b"} if is_required else {"a", "b"})
        swapped = {"a": [pods["server", "0"]], "b": [pods["server", "1"]]}  # both have room, one is the primary's
        assert may_be_on(rules, pods["backup", "0"], swapped) == ({"b"} if is_required else {"a", "b"})


@pytest.mark.parametrize("spread", ["prefer", "require"])
def test_no_two_constraints_are_alike_and_servers_with_backups_prefer_free_nodes(made: Any, spread: str) -> None:
    """The API server refuses a pod with two constraints of one topology key and effect."""
    for flags in ((), ETCD, BOTH, ("--nnodes", "2", "--insecure")):
        for template in templates(made("--spread", spread, *flags)):
            rules = template["spec"].get("topologySpreadConstraints", [])
            kinds = [(rule["topologyKey"], rule["whenUnsatisfiable"]) for rule in rules]
            assert len(kinds) == len(set(kinds))
    found = made("--server_num", "2", "--spread", spread, *ETCD)
    spread_roles = ("server", "backup")
    for template in templates(found):
        is_spread = template["metadata"]["labels"]["app.kubernetes.io/component"] in spread_roles
        assert ("affinity" in template["spec"]) is is_spread
        if is_spread:
            (term,) = template["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
            selector = term["podAffinityTerm"]["labelSelector"]
            others = [labels for labels in pod_labels(found) if selects(selector, labels)]
            assert sorted(labels["app.kubernetes.io/component"] for labels in others) == sorted(2 * spread_roles)


def test_accounts_and_priorities_are_those_of_all_roles(made: Any) -> None:
    found = made("--service_account", "trainer", "--priority_class", "high")
    for pod in kube_pods.pods_of(found):
        assert (pod.spec["serviceAccountName"], pod.spec["priorityClassName"]) == ("trainer", "high")
        assert pod.spec["automountServiceAccountToken"] is False
    (owner,) = [t for t in templates(found) if t["metadata"]["labels"]["app.kubernetes.io/component"] == "owner"]
    assert (owner["spec"]["serviceAccountName"], owner["spec"]["priorityClassName"]) == ("ctr-owner", "high")


@pytest.mark.parametrize(
    "flags", [(), ETCD, ("--durability", "log"), BOTH, ("--nnodes", "2", "--insecure"), ("--format", "jobset")]
)
def test_the_owner_may_touch_the_objects_of_its_job_and_no_others(made: Any, flags: tuple[str, ...]) -> None:
    found = made(*flags)
    role = named(found, "Role", "ctr-owner")
    command = named(found, "Job", "ctr-owner")["spec"]["template"]["spec"]["containers"][0]["command"]
    cut = command.index("--owned")
    owners, owned = command[command.index("--owners") + 1 : cut], command[cut + 1 :]
    granted = {(rule["resources"][0], name): rule["verbs"] for rule in role["rules"] for name in rule["resourceNames"]}
    asked = {tuple(path.rsplit("/", 2)[1:]): verbs for paths, verbs in ((owners, ["get"]), (owned, ["patch", "delete"]))
             for path in paths}  # fmt: skip
    assert granted == asked
    running = {d["metadata"]["name"] for d in found if d["kind"] in ("Job", "JobSet")} - {"ctr-owner"}
    assert {path.rpartition("/")[2] for path in owners} == running
    kept = {"Job", "JobSet", "PersistentVolumeClaim"}  # volumes outlive the Jobs
    assert sorted(path.rpartition("/")[2] for path in owned) == sorted(
        d["metadata"]["name"] for d in found if d["kind"] not in kept
    )
    if "--nnodes" not in flags:
        assert "api/v1/secrets/ctr-keys" in owned


def test_how_long_finished_jobs_are_kept(made: Any) -> None:
    def ttl(*flags: str) -> tuple[set[Any], Any]:
        found = made(*flags)
        command = [c for t in templates(found) for c in t["spec"]["containers"][0]["command"]]
        cleaned = command[command.index("--clean_on") + 1] if "--clean_on" in command else None
        return {job["spec"].get("ttlSecondsAfterFinished") for job in kube_pods.jobs_of(found)}, cleaned

    assert ttl() == ({86_400}, None)
    assert ttl("--ttl", "600") == ({600}, None)
    assert ttl("--ttl", "60", "--keep_objects") == ({60}, None)
    assert ttl("--clean_pod_policy", "Always") == ({600}, None)  # the owner's pod must have found them
    assert ttl("--clean_pod_policy", "Always", "--keep_objects") == ({0}, None)
    assert ttl("--clean_pod_policy", "Never") == ({None}, None)
    assert ttl("--clean_pod_policy", "OnCompletion") == ({None}, "Complete")
    assert ttl("--clean_pod_policy", "OnFailure") == ({None}, "Failed")
    assert not [d for d in made("--keep_objects") if d["kind"] in ("Role", "RoleBinding", "ServiceAccount")]


def test_elastic_workers_begin_with_the_first_and_evictions_are_no_failures(made: Any) -> None:
    found = made("--server_num", "2", "--worker_num", "2:5")
    for pod in kube_pods.pods_of(found):
        environment = pod.environment()
        assert (environment["FLEET_MIN_WORKERS"], environment["FLEET_NUM_WORKERS"]) == ("2", "5")
    spec = named(found, "Job", "ctr-worker")["spec"]
    assert (spec["completions"], spec["successPolicy"]) == (5, {"rules": [{"succeededIndexes": "0-1"}]})
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    assert evicted in spec["podFailurePolicy"]["rules"]
    servers = named(found, "Job", "ctr-server")["spec"]
    assert "successPolicy" not in servers
    assert evicted not in servers["podFailurePolicy"]["rules"]
    rules = named(made("--worker_num", "1:3"), "Job", "ctr-worker")["spec"]["successPolicy"]["rules"]
    assert rules == [{"succeededIndexes": "0"}]  # a range from 0 to 0 is refused
    assert "successPolicy" not in named(made("--worker_num", "5"), "Job", "ctr-worker")["spec"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--service_account", "A b"), "--service_account"),
        (("--priority_class", "High"), "--priority_class"),
        (("--clean_pod_policy", "Always", "--ttl", "3"), "--clean_pod_policy --ttl"),
        (("--clean_pod_policy", "OnFailure", "--keep_objects"), "OnFailure --keep_objects"),
        (("--clean_pod_policy", "OnCompletion", "--format", "jobset"), "OnCompletion jobset"),
        (("--worker_num", "2:20000"), "--worker_num"),
        (("--worker_num", "2:4", "--nnodes", "2", "--insecure"), "--nnodes --worker_num"),
        (("--ttl", "-1"), "--ttl"),
        (("--ttl", "599"), "--ttl 600 --keep_objects"),
        (("--env", "FLEET_MIN_WORKERS=2"), "FLEET_MIN_WORKERS"),
    ],
)
def test_mistakes_are_named(flags: tuple[str, ...], told: str, script: Path) -> None:
    with pytest.raises(RoleError, match=naming(*told.split())):
        main(["--image", "x", *flags, str(script)])
