"""Pods of manifests as processes of this machine, as a node of Kubernetes would run them: each with an address, a file
system and process numbers of its own, its volumes mounted, its variables resolved, its name in the others' DNS.

What differs: the image is this machine (Python as it runs the tests, the package as it is here), and the user is the
tests' own, root, though without capabilities. What a pod is not given by its manifest it does not have.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.paths import ROOT

Document = dict[str, Any]
_SYSTEM = ("bin", "sbin", "lib", "lib64", "usr", "etc", "dev", "sys")
_IMAGE = {"PATH": "/opt/python/bin:/usr/bin:/bin", "PYTHONPATH": "/opt/torchfleet", "LANG": "C.UTF-8"}
INDEX = "batch.kubernetes.io/job-completion-index"


class NoPods(Exception):
    """This machine does not let us make namespaces."""


@dataclass
class Pod:
    """A pod that an Indexed Job makes of its template."""

    host: str
    spec: Document
    annotations: dict[str, str]
    address: str = ""
    namespace: str = ""
    process: subprocess.Popen[str] | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def container(self) -> Document:
        return self.spec["containers"][0]

    @property
    def name(self) -> str:
        """As others find it in DNS."""
        return f"{self.host}.{self.spec['subdomain']}"

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def environment(self) -> dict[str, str]:
        """The container's variables, in their order: a value may use those before it."""
        found: dict[str, str] = {}
        for variable in self.container["env"]:
            if "valueFrom" in variable:
                path = variable["valueFrom"]["fieldRef"]["fieldPath"]
                named = re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)
                assert named, path
                found[variable["name"]] = self.annotations.get(named[1], "")
            else:
                found[variable["name"]] = expanded(variable["value"], found)
        return {**found, "HOSTNAME": self.host, "JOB_COMPLETION_INDEX": self.annotations[INDEX]}

    def command(self) -> list[str]:
        return [expanded(part, self.environment()) for part in self.container["command"]]


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """As Kubernetes expands commands and variables: $(NAME) if there is such a one, $$ for $."""

    def value(found: re.Match[str]) -> str:
        if found[0] == "$$":
            return "$"
        return variables.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def pods_of(documents: Sequence[Document]) -> list[Pod]:
    """Every pod of every Job, in their order."""
    made = []
    for job in (document for document in documents if document["kind"] == "Job"):
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["parallelism"] == job["spec"]["completions"]
        for index in range(job["spec"]["completions"]):
            annotations = {INDEX: str(index), "batch.kubernetes.io/job-index-failure-count": "0"}
            made.append(Pod(f"{job['metadata']['name']}-{index}", job["spec"]["template"]["spec"], annotations))
    return made


class Node:
    """Runs pods. `folder` is for their volumes; `claims`: folder of each claim that the manifests do not make."""

    def __init__(self, documents: Sequence[Document], folder: Path, claims: Mapping[str, Path]) -> None:
        self._documents = {(document["kind"], document["metadata"]["name"]): document for document in documents}
        self._folder, self._claims = folder, dict(claims)
        self.pods = pods_of(documents)
        self._tag = f"{os.getpid():x}{secrets.token_hex(2)}"
        self._hub = f"fleet-{self._tag}-hub"

    def __enter__(self) -> Node:
        try:
            self._make_network()
        except NoPods:
            self._remove_network()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for pod in self.pods:
            if pod.process is not None:
                pod.process.kill()  # and with it all that is in the pod: unshare --kill-child
                pod.process.wait(20)
        self._remove_network()
        if error[0] is not None:
            for pod in self.pods:
                print(f"== {pod.host}\n{pod.output}")

    def start(self, pod: Pod) -> None:
        script = self._folder / f"{pod.host}.sh"
        script.write_text(self._script(pod))
        isolated = ["unshare", "--mount", "--pid", "--uts", "--fork", "--kill-child", "sh", str(script)]
        pod.process = subprocess.Popen(
            ["ip", "netns", "exec", pod.namespace, *isolated],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        threading.Thread(target=_read, args=(pod, pod.process), daemon=True).start()

    def ask(self, pod: Pod, path: str) -> str:
        """The status of a GET to the pod's health port, as the kubelet asks; from beside the pods, not inside."""
        ports = {port["name"]: port["containerPort"] for port in pod.container["ports"]}
        code = (
            "import sys, urllib.error, urllib.request\n"
            "try: print(urllib.request.urlopen(sys.argv[1], timeout=5).status)\n"
            "except urllib.error.HTTPError as error: print(error.code)\n"
            "except OSError as error: print(error)"
        )
        url = f"http://{pod.address}:{ports['health']}{path}"
        command = ["ip", "netns", "exec", self._hub, sys.executable, "-c", code, url]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()

    def _script(self, pod: Pod) -> str:
        """A shell script that makes the pod's file system and becomes its first process."""
        root = self._folder / f"{pod.host}.root"
        root.mkdir()
        lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs root {root}", f"hostname {pod.host}"]
        for name in _SYSTEM:
            place = Path("/") / name
            if place.is_symlink():
                lines.append(f"ln -s {os.readlink(place)} {root}/{name}")
            elif place.exists():
                lines += _bound(place, f"{root}/{name}", recursive=True)
        lines += [f"mkdir {root}/proc", f"mount -t proc proc {root}/proc"]
        lines += _bound(Path(sys.base_prefix), f"{root}{sys.base_prefix}")
        lines += _bound(Path(sys.prefix), f"{root}/opt/python") + _bound(ROOT, f"{root}/opt/torchfleet")
        volumes = {volume["name"]: volume for volume in pod.spec["volumes"]}
        for mount in pod.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            target = f"{root}{mount['mountPath']}"
            if volume.get("emptyDir", {}).get("medium") == "Memory":
                lines.append(f"mount -t tmpfs memory {target}")
                continue
            lines += _bound(self._volume(pod, volume), target)
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {target}")
        hosts = self._folder / "hosts"
        named = (f"{each.address} {each.name}\n" for each in self.pods)
        hosts.write_text("127.0.0.1 localhost\n" + "".join(named))
        lines += [f"mount --bind {hosts} {root}/etc/hosts", f"mount -o remount,ro {root}"]
        variables = {**_IMAGE, **pod.environment()}
        given = " ".join(shlex.quote(f"{name}={value}") for name, value in variables.items())
        command = " ".join(shlex.quote(part) for part in pod.command())
        there = shlex.quote(pod.container["workingDir"])
        without_rights = "setpriv --no-new-privs --bounding-set=-all"
        lines.append(
            f"exec chroot {root} env -i {given} {without_rights} sh -c 'cd {there} && exec \"$@\"' - {command}"
        )
        return "\n".join(lines) + "\n"

    def _volume(self, pod: Pod, volume: Document) -> Path:
        """The folder that stands for a volume, filled."""
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if claim not in self._claims:
                assert ("PersistentVolumeClaim", claim) in self._documents, f"nobody has made the claim {claim}"
                self._claims[claim] = self._folder / f"claim-{claim}"
                self._claims[claim].mkdir()
            return self._claims[claim]
        folder = self._folder / f"{pod.host}.{volume['name']}"
        folder.mkdir()
        for kind, source in (("ConfigMap", "configMap"), ("Secret", "secret")):
            if source not in volume:
                continue
            asked = volume[source]
            data = self._documents[kind, asked.get("secretName") or asked["name"]]["data"]
            for item in asked["items"]:
                text = data[item["key"]]
                path = folder / item["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(text, validate=True) if kind == "Secret" else text.encode())
                path.chmod(asked.get("defaultMode", 0o644))
        return folder

    def _make_network(self) -> None:
        """A bridge, and for each pod a namespace with a cable to it."""
        missing = [tool for tool in ("ip", "unshare", "setpriv", "chroot") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            raise NoPods(f"needs root and the programs ip, unshare, setpriv and chroot; missing: {missing}")
        _call("ip", "netns", "add", self._hub)
        inside = ("ip", "-n", self._hub, "link")
        _call(*inside, "add", "pods", "type", "bridge")
        _call(*inside, "set", "pods", "up")
        _call("ip", "-n", self._hub, "address", "add", "10.198.0.1/16", "dev", "pods")
        for number, pod in enumerate(self.pods):
            pod.namespace, pod.address = f"fleet-{self._tag}-{number}", f"10.198.1.{number + 1}"
            end, port = f"fk{self._tag}{number}", f"p{number}"
            _call("ip", "netns", "add", pod.namespace)
            _call("ip", "link", "add", end, "netns", pod.namespace, "type", "veth", "peer", "name", port, "netns",
                  self._hub)  # fmt: skip
            _call(*inside, "set", port, "master", "pods", "up")
            _call("ip", "-n", pod.namespace, "address", "add", f"{pod.address}/16", "dev", end)
            for device in ("lo", end):
                _call("ip", "-n", pod.namespace, "link", "set", device, "up")

    def _remove_network(self) -> None:
        for namespace in (*(pod.namespace for pod in self.pods if pod.namespace), self._hub):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def node(documents: Sequence[Document], folder: Path, claims: Mapping[str, Path]) -> Iterator[Node]:
    """A node with the network of all pods, none of them started; nothing is left when it is left."""
    with Node(documents, folder, claims) as made:
        yield made


def _bound(source: Path, target: str, recursive: bool = False) -> list[str]:
    return [f"mkdir -p {target}", f"mount --{'r' if recursive else ''}bind {source} {target}"]


def _read(pod: Pod, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        pod.lines.append(line)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPods(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")


def secret_texts(secret: Document) -> list[str]:
    """The secret keys themselves, as a file of keys has them between quotes."""
    found = (base64.b64decode(text).decode() for name, text in secret["data"].items() if name.endswith("_secret"))
    return [re.findall(r'secret-key = "(.{40})"', text)[0] for text in found]


def pods_of_job_set(document: Document) -> list[Pod]:
    """The pods that JobSet's controller makes: their host names have the number of the Job between name and index."""
    made = []
    for job in document["spec"]["replicatedJobs"]:
        assert job["replicas"] == 1
        spec = {**job["template"]["spec"]["template"]["spec"], "subdomain": document["spec"]["network"]["subdomain"]}
        for index in range(job["template"]["spec"]["completions"]):
            host = f"{document['metadata']['name']}-{job['name']}-0-{index}"
            made.append(Pod(host, spec, {INDEX: str(index)}))
    return made
