"""Manifests of `fleetrun k8s serve`: valid for Kubernetes' own schemas, probes of the protocol's paths, secrets by name
alone, and refusals of what pods could not do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support import kube_pods
from support.extras import Late, imported

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s_command import main

kubernetes_validate = Late("kubernetes_validate")

VERSIONS = ("1.29", "1.37")
MODEL = ("--image", "registry.example/torchfleet:1", "--model", "s3://models/ctr")
SHARDS = ("--shards", "3", "--shard_replicas", "2", "--key_secret", "fleet-keys", "--shard_memory", "64GB")
FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "secrets": ("--token_secret", "serving-token", "--tls_secret", "serving-tls", "--env_secret", "s3"),
    "shards": SHARDS,
    "scale": ("--min_replicas", "1", "--max_replicas", "50", "--cpu_target", "60", "--cpus", "4", "--memory", "16GB"),
    "pods": ("--pvc", "models=/models:ro", "--node_selector", "pool=cpu", "--toleration", "spot", "--namespace", "ml",
             "--service_account", "serving", "--priority_class", "high", "--image_pull_secret", "registry",
             "--env", "A=$(B) $$ é", "--user", "1234", "--name", "other"),
}  # fmt: skip


@pytest.fixture(scope="module")
def schemas_are_read_once() -> Iterator[None]:
    validating = imported("kubernetes_validate.utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validating, "schema_contents", functools.lru_cache(validating.schema_contents))
        yield


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """The documents, by kind and name."""
    assert main(["serve", *MODEL, *arguments]) == 0
    found = kube_pods.documents_of(capsys.readouterr().out)
    return {f"{document['kind']} {document['metadata']['name']}": document for document in found}


def built_in(document: dict[str, Any]) -> dict[str, Any]:
    """An InferenceService is of a kind that Kubernetes does not know: the pod that KServe makes of it."""
    if document["kind"] != "InferenceService":
        return document
    scaling = ("minReplicas", "maxReplicas", "scaleMetric", "scaleTarget")
    pod = {name: value for name, value in document["spec"]["predictor"].items() if name not in scaling}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}


@pytest.mark.parametrize("form", ["plain", "kserve"])
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.usefixtures("schemas_are_read_once")
def test_manifests_are_valid_without_unknown_fields(name: str, form: str, capsys: pytest.CaptureFixture[str]) -> None:
    for document in made(capsys, *FLAGS[name], "--format", form).values():
        for version in VERSIONS:
            kubernetes_validate.validate(built_in(document), version, strict=True)


def test_pods_are_probed_scaled_and_kept(capsys: pytest.CaptureFixture[str]) -> None:
    found = made(capsys, *FLAGS["scale"], "--", "--workers", "2", "--timeout_s", "60")
    assert list(found) == ["Service ctr", "PodDisruptionBudget ctr", "Deployment ctr", "HorizontalPodAutoscaler ctr"]
    deployment = found["Deployment ctr"]["spec"]
    assert "replicas" not in deployment  # or kubectl apply would undo what the autoscaler did
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["livenessProbe"]["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert container["command"][3:5] == ["serve", "s3://models/ctr"]
    assert container["command"][-4:] == ["--workers", "2", "--timeout_s", "60"]
    assert (
        deployment["template"]["spec"]["terminationGracePeriodSeconds"] >= 5 + 60 + 3
    )  # the pause, and what has begun
    scaler = found["HorizontalPodAutoscaler ctr"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (1, 50)
    assert scaler["metrics"][0]["resource"]["target"]["averageUtilization"] == 60
    own = deployment["template"]["metadata"]["labels"].items()
    for selector in (
        deployment["selector"]["matchLabels"],
        found["Service ctr"]["spec"]["selector"],
        found["PodDisruptionBudget ctr"]["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= own


def test_secrets_are_named_and_never_written(capsys: pytest.CaptureFixture[str]) -> None:
    found = made(capsys, *FLAGS["secrets"])
    assert not [key for key in found if key.startswith("Secret")]
    pod = found["Deployment ctr"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume}
    assert volumes == {"token": "serving-token", "tls": "serving-tls"}
    paths = {mount["mountPath"] for mount in container["volumeMounts"] if mount.get("readOnly")}
    given = dict(zip(container["command"], container["command"][1:], strict=False))
    for option in ("--token_file", "--tls_cert", "--tls_key"):
        assert given[option].rpartition("/")[0] in paths
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert container["envFrom"] == [{"secretRef": {"name": "s3"}}]


def test_shards_are_stateful_sets_that_the_model_server_asks_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    found = made(capsys, *SHARDS)
    (container,) = found["Deployment ctr"]["spec"]["template"]["spec"]["containers"]
    given = dict(zip(container["command"], container["command"][1:], strict=False))
    for option, role in (("--shards", "shard"), ("--backups", "shard-backup")):
        servers = found[f"StatefulSet ctr-{role}"]["spec"]
        hosts = [f"ctr-{role}-{i}.{servers['serviceName']}:7000" for i in range(servers["replicas"])]
        assert given[option].split(",") == hosts
        (server,) = servers["template"]["spec"]["containers"]
        assert "$(FLEET_INDEX)/3" in server["command"]
        assert server["env"][0]["name"] == "FLEET_INDEX"
        keys = next(volume for volume in servers["template"]["spec"]["volumes"] if volume["name"] == "keys")
        assert "worker.key_secret" not in [item["key"] for item in keys["secret"]["items"]]
    assert "Service ctr-shards" in found


def test_a_folder_has_plain_kinds_and_kserve_apart(tmp_path: Path) -> None:
    assert main(["serve", *MODEL, "-o", str(tmp_path / "made")]) == 0
    kinds = [yaml.safe_load(path.read_text())["kind"] for path in sorted((tmp_path / "made").glob("*.yaml"))]
    assert kinds == ["Service", "PodDisruptionBudget", "Deployment", "HorizontalPodAutoscaler"]
    (path,) = (tmp_path / "made" / "kserve").iterdir()
    service = yaml.safe_load(path.read_text())
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert service["spec"]["predictor"]["containers"][0]["name"] == "kserve-container"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--model", "/models/ctr"),
        ("--shards", "2"),
        ("--key_secret", "keys"),
        ("--min_replicas", "5", "--max_replicas", "4"),
        ("--cpu_target", "0"),
        ("--env", "API_KEY=abcdefgh12345678"),
        ("--token_secret", "Not A Name"),
        ("--format", "kustomize"),
        ("--", "--port", "80"),
        ("--", "--host", "127.0.0.1"),
        ("--", "--tls_c", "file"),
        ("--", "--grpc_port", "8001"),
        (*SHARDS, "--", "--follow"),
    ],
)
def test_what_pods_cannot_do_is_refused(arguments: tuple[str, ...]) -> None:
    with pytest.raises(RoleError):
        main(["serve", *MODEL, *arguments])


def test_options_that_fleet_serve_does_not_know_are_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", *MODEL, "--", "--wokers", "2"])
    assert ended.value.code == 2


def test_a_path_in_a_volume_or_in_the_image_is_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert made(capsys, "--model", "/models/ctr", "--pvc", "models=/models:ro")
    assert made(capsys, "--model", "/opt/ctr", "--model_in_image")
