"""Manifests of `fleetrun k8s`: valid for Kubernetes' own schemas, of several versions and without unknown fields; what
each option does to them; secrets in the Secret alone; text that every YAML parser reads alike."""

from __future__ import annotations

import base64
import functools
import itertools
import json
import re
import shutil
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from support import kube_pods
from support.extras import Late, imported
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s.k8s_job import K8sJob, check_name, name_of
from torchfleet.launch.clusters.k8s.k8s_yaml import text_of
from torchfleet.launch.clusters.k8s.manifests import config_map, jobs
from torchfleet.launch.clusters.k8s.pod_template import literal
from torchfleet.launch.clusters.k8s.script_files import MOST_BYTES, ScriptFile, config_map_files, script_files
from torchfleet.launch.clusters.k8s_command import KUBECTL, main

kubernetes_validate = Late("kubernetes_validate")

VERSIONS = ("1.29", "1.31", "1.34", "1.37")  # from the oldest that has all fields on
ETCD = ("--replicas", "2", "--coordinator", "etcd://etcd:2379/ctr")
SERVERS = ("--server_num", "3", "--worker_num", "4")
RANKS = ("--nproc_per_node", "2", "--nnodes", "3", "--insecure")
FLAGS: dict[str, tuple[str, ...]] = {
    "plain": SERVERS,
    "defaults": (),
    "log": (*SERVERS, "--durability", "log", "--log_size", "5Gi", "--storage_class", "fast", "--fsync_ms", "0"),
    "replicas": (*SERVERS, *ETCD, "--max_restart", "3"),
    "both": (*SERVERS, *ETCD, "--durability", "log", "--max_restart", "3"),
    "both shared": (*SERVERS, *ETCD, "--durability", "log", "--shared_logs", "--storage_class", "many"),
    "restarts": (*SERVERS, "--max_restart", "5", "--save_on_stop", "/data/model", "--grace", "90", "--ttl", "600"),
    "resources": (*SERVERS, "--server_cpus", "2", "--server_memory", "8GB", "--worker_cpus", "0.5", "--worker_memory",
                  "512MB", "--gpus", "1"),
    "placement": (*SERVERS, "--node_selector", "pool=cpu", "--node_selector", "example.com/zone=a", "--toleration",
                  "spot", "--toleration", "gpu=yes:NoSchedule", "--image_pull_secret", "registry", "--namespace", "ml"),
    "volumes": (*SERVERS, "--pvc", "data=/data:ro", "--pvc", "models=/models", "--env", "A=$(B) $$ é\n#", "--env",
                "B=1e3", "--env_secret", "s3", "--user", "1234", "--name", "other"),
    "production": (*SERVERS, *ETCD, "--service_account", "trainer", "--priority_class", "high", "--spread", "require",
                   "--clean_pod_policy", "OnCompletion", "--namespace", "ml"),
    "kept": (*SERVERS, "--keep_objects", "--clean_pod_policy", "Never"),
    "watched": (*SERVERS, "--metrics_port", "9400", "--log_format", "json"),
    "watched ranks": (*RANKS, "--metrics_port", "9400"),
    "collective": RANKS,
    "collective gpus": ("--nnodes", "2", "--gpus", "4", "--insecure", "--max_restart", "2"),
    "jobset": (*SERVERS, "--format", "jobset", "--max_job_restart", "3"),
    "jobset log": (*SERVERS, "--format", "jobset", "--durability", "log"),
    "jobset both": (*SERVERS, *ETCD, "--format", "jobset", "--durability", "log"),
    "elastic": ("--server_num", "2", "--worker_num", "2:4"),
    "jobset collective": (*RANKS, "--format", "jobset"),
}  # fmt: skip


@pytest.fixture(scope="module")
def schemas_are_read_once() -> Iterator[None]:
    validating = imported("kubernetes_validate.utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validating, "schema_contents", functools.lru_cache(validating.schema_contents))
        yield


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    (folder / "models").mkdir(parents=True)
    (folder / "train.py").write_text("import models.net\nif True:\n\ttab = 'é'  \n")
    (folder / "models" / "net.py").write_text("")
    return folder / "train.py"


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["--image", "registry.example/torchfleet:1", *arguments]) == 0
    return kube_pods.documents_of(capsys.readouterr().out)


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [document for document in found if document["kind"] == kind]


def built_in(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A JobSet is of a kind that Kubernetes does not know: the Jobs that its controller makes of it."""
    if document["kind"] != "JobSet":
        return [document]
    replicated = document["spec"]["replicatedJobs"]
    return [{"apiVersion": "batch/v1", "kind": "Job", **job["template"]} for job in replicated]


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.usefixtures("schemas_are_read_once")
def test_manifests_are_valid_in_every_version_without_unknown_fields(
    name: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made(capsys, *FLAGS[name], str(script), "--epochs", "1")
    for document in itertools.chain.from_iterable(map(built_in, found)):
        for version in VERSIONS[name == "elastic" :]:  # which is for 1.31 on
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.usefixtures("schemas_are_read_once")
def test_the_schemas_find_an_unknown_field_and_a_wrong_type(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = kube_pods.jobs_of(made(capsys, str(script)))[0]
    job["spec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagee"):
        kubernetes_validate.validate(job, VERSIONS[-1], strict=True)
    (service,) = of_kind(made(capsys, str(script)), "Service")
    service["spec"]["publishNotReadyAddresses"] = "true"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(service, VERSIONS[-1], strict=True)


@pytest.mark.parametrize("name", FLAGS)
def test_names_fit_together(name: str, script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pods' DNS names are what others ask for; what a pod mounts is made; every label leads back to the job."""
    found = made(capsys, *FLAGS[name], str(script))
    there = {(document["kind"], document["metadata"]["name"]) for document in found}
    assert len(there) == len(found)
    assert len({document["metadata"]["labels"]["app.kubernetes.io/instance"] for document in found}) == 1
    namespaces = {document["metadata"].get("namespace") for document in found}
    assert namespaces == ({"ml"} if "--namespace" in FLAGS[name] else {None})
    pods = kube_pods.pods_of(found) if "jobset" not in name else kube_pods.pods_of_job_set(of_kind(found, "JobSet")[0])
    hosts = {pod.name for pod in pods}
    for pod in pods:
        assert len(pod.host) <= 63
        environment = pod.environment()
        asked = re.split(r"[,|]", environment.get("FLEET_SERVER_ENDPOINTS", ""))
        asked += [pod.command()[pod.command().index("--master") + 1]] if "--master" in pod.command() else []
        assert {place.rpartition(":")[0] for place in asked if place} <= hosts
        if environment.get("FLEET_GROUP") == "server":
            own = asked[int(environment["FLEET_INDEX"]) * (2 if "|" in environment["FLEET_SERVER_ENDPOINTS"] else 1)
                        + int(environment.get("FLEET_REPLICA", "0"))]  # fmt: skip
            assert own == f"{pod.name}:7000"
        mounted = {mount["name"] for mount in pod.container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod.spec["volumes"]}
        for volume in pod.spec["volumes"]:
            for kind, field, key in (
                ("ConfigMap", "configMap", "name"),
                ("Secret", "secret", "secretName"),
                ("PersistentVolumeClaim", "persistentVolumeClaim", "claimName"),
            ):
                if field in volume and volume[field][key] not in ("data", "models"):
                    assert (kind, volume[field][key]) in there


def test_pods_serve_metrics_that_the_policy_lets_out_and_log_json(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made(capsys, *FLAGS["watched"], str(script))
    (policy,) = of_kind(found, "NetworkPolicy")
    assert policy["spec"]["ingress"][1:] == [{"ports": [{"protocol": "TCP", "port": 9400}]}]
    for job in kube_pods.jobs_of(found):
        template = job["spec"]["template"]
        told = {"prometheus.io/scrape": "true", "prometheus.io/port": "9400", "prometheus.io/path": "/metrics"}
        assert template["metadata"]["annotations"] == told
        (container,) = template["spec"]["containers"]
        assert {"name": "metrics", "containerPort": 9400} in container["ports"]
        environment = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert (environment["FLEET_METRICS_PORT"], environment["FLEET_METRICS_HOST"]) == ("9400", "0.0.0.0")
        assert environment["FLEET_LOG_FORMAT"] == "json"
    (ranks,) = kube_pods.jobs_of(made(capsys, *FLAGS["watched ranks"], str(script)))
    ports = ranks["spec"]["template"]["spec"]["containers"][0]["ports"]
    assert [port["containerPort"] for port in ports if port["name"].startswith("metrics")] == [9400, 9401]
    plain = kube_pods.jobs_of(made(capsys, *SERVERS, str(script)))[0]["spec"]["template"]
    assert "annotations" not in plain["metadata"]


def test_pods_have_no_rights_and_only_the_keys_of_their_role(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for pod in kube_pods.pods_of(made(capsys, *SERVERS, *ETCD, str(script))):
        assert pod.spec["automountServiceAccountToken"] is False
        assert pod.spec["securityContext"]["runAsNonRoot"] is True
        assert pod.spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in (pod.container, *pod.spec["initContainers"]):
            rights = container["securityContext"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["readOnlyRootFilesystem"] is True
            assert rights["capabilities"] == {"drop": ["ALL"]}
        keys = next(volume["secret"] for volume in pod.spec["volumes"] if volume["name"] == "keys")
        secret = {item["key"] for item in keys["items"] if item["key"].endswith("_secret")}
        is_worker = pod.environment()["FLEET_GROUP"] == "worker"
        assert secret == ({"worker.key_secret", "first_worker.key_secret"} if is_worker else {"server.key_secret"})
        assert keys["defaultMode"] == 0o440


def test_keys_are_in_the_secret_alone_and_new_for_every_job(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [made(capsys, *SERVERS, str(script)) for _ in range(2)]
    secrets = [of_kind(found, "Secret")[0] for found in both]
    texts = [kube_pods.secret_texts(secret) for secret in secrets]
    assert not set(texts[0]) & set(texts[1])
    others = json.dumps([document for document in both[0] if document["kind"] != "Secret"])
    assert len(texts[0]) == 4
    for key in texts[0]:
        assert key not in others
        assert base64.b64encode(key.encode()).decode() not in others


def test_what_fails_is_started_again_only_where_that_helps(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rules(flags: tuple[str, ...]) -> dict[str, tuple[int, list[str]]]:
        found = kube_pods.jobs_of(made(capsys, *flags, str(script)))
        return {
            job["metadata"]["name"]: (
                job["spec"]["backoffLimitPerIndex"],
                [rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"]],
            )
            for job in found
        }

    none, some = (0, ["FailJob"]), (3, ["FailJob", "Ignore", "Ignore"])
    counts = ("--server_num", "2", "--worker_num", "2", "--max_restart", "3")
    assert rules(counts) == {"train-server": none, "train-worker": some}  # a server without its rows is of no use
    assert rules((*counts, *ETCD)) == {"train-server": some, "train-backup": some, "train-worker": some}
    logged = rules((*counts, "--durability", "log"))
    assert logged == {"train-server-0": some, "train-server-1": some, "train-worker": some}
    both = rules((*counts, *ETCD, "--durability", "log"))
    replicas = [f"train-{role}-{i}" for role in ("server", "backup") for i in range(2)]
    assert both == {**dict.fromkeys(replicas, some), "train-worker": some}
    assert rules(counts[:4]) == {"train-server": none, "train-worker": none}


def test_with_logs_and_backups_every_replica_has_a_volume_or_both_of_a_server_share_one(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def logs(*flags: str) -> tuple[dict[str, str], dict[tuple[str, str], str]]:
        found = made(capsys, *SERVERS, *ETCD, "--durability", "log", *flags, str(script))
        claims = {claim["metadata"]["name"]: claim["spec"] for claim in of_kind(found, "PersistentVolumeClaim")}
        used = {}
        for pod in kube_pods.pods_of(found):
            environment = pod.environment()
            assert environment["FLEET_DURABILITY"] == "log"  # workers wait for servers that restart
            volumes = [volume for volume in pod.spec["volumes"] if volume["name"] == "server-log"]
            assert len(volumes) == (environment["FLEET_GROUP"] == "server")
            for volume in volumes:
                place = environment["FLEET_INDEX"], environment["FLEET_REPLICA"]
                used[place] = volume["persistentVolumeClaim"]["claimName"]
        return {name: mode for name, spec in claims.items() for mode in spec["accessModes"]}, used

    claims, used = logs()
    assert set(used) == {(str(i), str(replica)) for i in range(3) for replica in range(2)}
    assert len(set(used.values())) == 6
    assert claims == dict.fromkeys(used.values(), "ReadWriteOnce")
    claims, used = logs("--shared_logs")
    assert all(used[str(i), "0"] == used[str(i), "1"] for i in range(3))
    assert len(set(used.values())) == 3
    assert claims == dict.fromkeys(used.values(), "ReadWriteMany")


def test_the_script_and_its_sources_travel(script: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--image", "x", "-o", str(tmp_path / "out"), str(script)]) == 0
    (path,) = (tmp_path / "out").glob("*configmap*")
    data = yaml.safe_load(path.read_text())["data"]
    assert data == {"train.py": script.read_text(), "models__net.py": ""}
    (secret,) = (tmp_path / "out").glob("*secret*")
    assert secret.stat().st_mode & 0o777 == 0o600
    with pytest.raises(RoleError, match=naming(tmp_path / "out")):
        main(["--image", "x", "-o", str(tmp_path / "out"), str(script)])
    large = script.with_name("large.json")
    large.write_text("1" * MOST_BYTES)
    with pytest.raises(RoleError, match=naming("ConfigMap", "1,048,576", "large.json", "--in_image")):
        config_map_files(script_files(script, named=[str(large)])[0])
    bad = script.with_name("bad name.py")
    bad.write_text("")
    with pytest.raises(RoleError, match=naming("bad name.py")):
        config_map_files(script_files(script, named=[str(bad)])[0])


def test_kustomize_lists_every_file(script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["--image", "x", "--namespace", "ml", "--format", "kustomize", "-o", str(out), str(script)]) == 0
    found = yaml.safe_load((out / "kustomization.yaml").read_text())
    assert found["namespace"] == "ml"
    assert sorted(found["resources"]) == sorted(p.name for p in out.iterdir() if p.name != "kustomization.yaml")


def test_a_dry_run_prints_commands_and_no_keys(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--image", "x", "--dry_run", *SERVERS, str(script), "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "train-worker, 4 pods: python -m torchfleet.launch.clusters.member /script/train.py --epochs 2" in out
    assert "FLEET_NUM_WORKERS=4" in out
    assert "kind:" not in out


# Text that Kubernetes reads as it was given


@settings(max_examples=examples(20))
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30))
def test_a_command_and_a_variable_arrive_as_they_were_given(text: str) -> None:
    job = K8sJob("job", "image", ("/app/train.py", text), 1, 1, environment=(("V", text),))
    (pod,) = kube_pods.pods_of([yaml.safe_load(text_of(jobs(job, [])[-1]))])
    assert pod.command()[-1] == text
    assert pod.environment()["V"] == text
    assert kube_pods.expanded(literal(text), {"A": "wrong"}) == text


# Numbers, truths and nothing, as YAML 1.1 and 1.2 have them; parsers of both are among Kubernetes' tools.
_NO_TEXT = re.compile(
    r"~|null|true|false|yes|no|on|off|y|n|[-+]?[0-9][0-9_]*([eE:.].*)?|0[xob][0-9a-fA-F_]+|[-+]?\.(inf|nan|[0-9].*)|"
    r"[-+]?[0-9.]+[eE][-+]?[0-9]+|[0-9]{4}-.*|=|<<",
    re.IGNORECASE,
)


@settings(max_examples=examples(60))
@given(st.one_of(st.text(string.printable, max_size=20), st.from_regex(_NO_TEXT, fullmatch=True)))
def test_no_text_can_be_taken_for_a_number_or_a_truth(text: str) -> None:
    written = text_of({"data": {text: text}})
    assert yaml.safe_load(written) == {"data": {text: text}}
    for event in yaml.parse(written):
        if isinstance(event, yaml.ScalarEvent) and event.style is None:
            assert not _NO_TEXT.fullmatch(event.value)


@settings(max_examples=examples(30))
@given(st.text(max_size=60))
def test_every_script_has_a_name_that_kubernetes_takes(text: str) -> None:
    assert check_name(name_of(f"/a/{text}.py"), "x")


@settings(max_examples=examples(20))
@given(st.text(string.printable + "é\u2028\x85\t", max_size=60))
def test_a_script_arrives_as_it_is(text: str) -> None:
    job = K8sJob("job", "image", ("/script/a.py",), 1, 1)
    written = text_of(config_map(job, [ScriptFile("a.py", "a.py", text)]))
    assert yaml.safe_load(written)["data"] == {"a.py": text}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--name", "Train"), "--name 40"),
        (("--name", "a" * 41), "--name"),
        (("--server_num", "auto"), "--server_num"),
        (("--worker_num", "0"), "--worker_num 1"),
        (("--env", "1A=b"), "--env NAME=VALUE"),
        (("--env", "FLEET_ROLE=WORKER"), "FLEET_ROLE"),
        (("--pvc", "data"), "--pvc CLAIM=/PATH"),
        (("--pvc", "data=/keys/x"), "/keys"),
        (("--pvc", "data=/a/../b"), "--pvc"),
        (("--pvc", "a=/data", "--pvc", "b=/data"), "/data"),
        (("--toleration", "a=b:Never"), "NoSchedule"),
        (("--node_selector", "pool"), "--node_selector LABEL=VALUE"),
        (("--gpus", "0.5"), "GPUs"),
        (("--log_size", "5Gi"), "--durability log"),
        (("--durability", "log", "--log_size", "5 GB"), "--log_size"),
        (("--durability", "log", "--shared_logs"), "--shared_logs --replicas"),
        ((*ETCD, "--shared_logs"), "--shared_logs --durability"),
        (("--replicas", "2"), "--replicas"),
        (("--no_wait_for_backups",), "--no_wait_for_backups --replicas"),
        (("--max_job_restart", "1"), "--format jobset"),
        (("--max_restart", "-1"), "--max_restart 0"),
        (("--nnodes", "2"), "--insecure"),
        (("--nnodes", "2", "--server_num", "2", "--insecure"), "--nnodes --server_num"),
        (("--format", "kustomize"), "-o DIR"),
        (("--env_secret", "A b"), "--env_secret"),
        (("--metrics_host", "0.0.0.0"), "--metrics_host"),
        (("--metrics_port", "65536"), "--metrics_port 1 65535"),
        (("--nnodes", "2", "--gpus", "8", "--insecure", "--metrics_port", "65530"), "--metrics_port 8"),
    ],
)
def test_mistakes_are_named(flags: tuple[str, ...], message: str, script: Path) -> None:
    with pytest.raises(RoleError, match=naming(*message.split())):
        main(["--image", "x", *flags, str(script)])


def test_a_script_that_is_not_here_may_be_in_the_image(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RoleError, match="--in_image"):
        main(["--image", "x", "/app/train.py"])
    found = made(capsys, "--in_image", "/app/train.py", "--epochs", "2")
    assert not of_kind(found, "ConfigMap")
    assert kube_pods.jobs_of(found)[0]["spec"]["template"]["spec"]["containers"][0]["command"][3:] == [
        "/app/train.py", "--epochs", "2",
    ]  # fmt: skip
    assert not of_kind(made(capsys, "-m", "package.train"), "ConfigMap")


@pytest.mark.parametrize("action", KUBECTL)
def test_what_kubectl_does_is_refused_with_its_command_line(action: str) -> None:
    with pytest.raises(RoleError) as raised:
        main([action, "ctr"])
    assert str(raised.value).endswith(KUBECTL[action])


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
@pytest.mark.parametrize("action", KUBECTL)
def test_kubectl_takes_these_command_lines(action: str, script: Path, tmp_path: Path) -> None:
    """There is no cluster: it gets as far as the connection."""
    folder = tmp_path / "out"
    assert main(["--image", "image", "-o", str(folder), str(script)]) == 0
    line = KUBECTL[action].replace("DIR", str(folder)).replace("NAME", "train")
    nowhere = ["--server=http://127.0.0.1:1", "--kubeconfig=/dev/null"]
    done = subprocess.run([*line.split(), *nowhere], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1
    assert "127.0.0.1:1" in done.stderr
    assert "unknown" not in done.stderr


@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_kubectl_reads_a_kustomization(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    flags = ("--image", "image", "--name", "ctr", "--namespace", "team", "--format", "kustomize")
    assert main([*flags, "-o", str(folder), str(script)]) == 0
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=200, check=True)
    found = kube_pods.documents_of(done.stdout)
    assert {document["metadata"]["namespace"] for document in found} == {"team"}
    assert len(found) == len(list(folder.glob("*.yaml"))) - 1
