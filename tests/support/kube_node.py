"""Pods as processes of this machine, as a node of Kubernetes runs them: each with an address, a file system and process
numbers of its own, its volumes mounted, its user without rights, its root read-only, its name known to the others.

What differs: the image is this machine, with Python as it runs the tests and the package as it is here. What a pod is
not given by its manifest, or by the image, it does not have.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import os
import secrets
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from support.kube_pods import FAILURES, Document, Pod, pods_of
from support.paths import ROOT

from torchfleet.ps.kernels import jit

_SYSTEM = ("bin", "sbin", "lib", "lib64", "usr", "etc", "dev", "sys")
_PACKAGE, _COMPILED = "/opt/source", "/opt/torchfleet/cache"  # in the image
_IMAGE = {"PATH": "/opt/python/bin:/usr/bin:/bin", "PYTHONPATH": _PACKAGE, "LANG": "C.UTF-8"}


class NoPods(Exception):
    """This machine does not let us make namespaces."""


class Node:
    """Runs pods. `folder` is for their volumes; `claims`: folder of each claim that the manifests do not make."""

    def __init__(self, documents: Sequence[Document], folder: Path, claims: Mapping[str, Path]) -> None:
        self._documents = {(document["kind"], document["metadata"]["name"]): document for document in documents}
        self._folder, self._claims = folder, dict(claims)
        self.pods = pods_of(documents)
        self._tag = f"{os.getpid():x}{secrets.token_hex(2)}"
        self._hub = f"fleet-{self._tag}-hub"
        self._namespaces: list[str] = []
        self._numbers = itertools.count(2)  # 1 is the hub

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
                _kill(pod.process)
        self._remove_network()
        if error[0] is not None:
            for pod in self.pods:
                print(f"== {pod.host}\n{pod.output}")

    def start(self, pod: Pod) -> None:
        script = self._folder / f"{pod.namespace}.sh"
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

    def replace(self, pod: Pod) -> Pod:
        """Kill a pod, and start the one that its Job makes in its place: of the same name, at another address."""
        assert pod.process is not None
        _kill(pod.process)
        failures = {FAILURES: str(int(pod.annotations[FAILURES]) + 1)}
        new = Pod(pod.host, pod.spec, {**pod.annotations, **failures})
        self.pods[self.pods.index(pod)] = new
        self._connect(new)
        for other in self.pods:
            self._hosts(other)  # which sees it at once
        self.start(new)
        return new

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
        root = self._folder / f"{pod.namespace}.root"
        root.mkdir()
        lines = ["set -e", "mount --make-rprivate /", f"mount -t tmpfs root {root}", f"hostname {pod.host}"]
        for name in _SYSTEM:
            place = Path("/") / name
            if place.is_symlink():
                lines.append(f"ln -s {os.readlink(place)} {root}/{name}")
            elif place.exists():
                lines += _bound(place, f"{root}/{name}", recursive=True)
        lines += [f"mkdir {root}/proc", f"mount -t proc proc {root}/proc"]
        lines += _bound(Path(sys.base_prefix), f"{root}{sys.base_prefix}") + _bound(ROOT, f"{root}{_PACKAGE}")
        lines += _bound(Path(sys.prefix), f"{root}/opt/python") + _bound(self._kernels(), f"{root}{_COMPILED}")
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
        lines += [f"mount --bind {self._hosts(pod)} {root}/etc/hosts", f"mount -o remount,ro {root}"]
        for container in pod.spec["initContainers"]:
            lines.append(f"chroot {root} env -i {_words(_variables(_IMAGE))} {_as(pod)} {_words(container['command'])}")
        given = _words(_variables({**_IMAGE, **pod.environment()}))
        there = f"sh -c 'cd {pod.container['workingDir']} && exec \"$@\"' -"
        lines.append(f"exec chroot {root} env -i {given} {_as(pod)} {there} {_words(pod.command())}")
        return "\n".join(lines) + "\n"

    def _hosts(self, pod: Pod) -> Path:
        """The names that a pod knows: DNS has those of all, a pod's own file the short one of its host, too."""
        path = self._folder / f"{pod.namespace}.hosts"
        named = "".join(f"{each.address} {each.name}\n" for each in self.pods)
        path.write_text(f"127.0.0.1 localhost\n{pod.address} {pod.name} {pod.host}\n{named}")
        return path

    def _kernels(self) -> Path:
        """What the image has compiled: what the tests have, at the place where numba looks for it in a pod."""
        source = ROOT / "torchfleet" / "kernels"
        image = self._folder / "image"
        folder = hashlib.sha1(f"{_PACKAGE}/torchfleet/ps/kernels".encode()).hexdigest()
        target = image / "torchfleet" / f"kernels-{jit._stamp(source)}" / f"kernels_{folder}"
        if not image.exists():
            target.mkdir(parents=True)
            for pattern in ("*.nbi", "*.nbc"):
                for path in (source / "__pycache__").glob(pattern):
                    shutil.copy2(path, target)
        return image

    def _volume(self, pod: Pod, volume: Document) -> Path:
        """The folder that stands for a volume, filled."""
        if "persistentVolumeClaim" in volume:
            claim = volume["persistentVolumeClaim"]["claimName"]
            if claim not in self._claims:
                assert ("PersistentVolumeClaim", claim) in self._documents, f"nobody has made the claim {claim}"
                self._claims[claim] = self._folder / f"claim-{claim}"
                self._claims[claim].mkdir()
            _give(self._claims[claim], pod.spec["securityContext"]["fsGroup"])
            return self._claims[claim]
        folder = self._folder / f"{pod.namespace}.{volume['name']}"
        folder.mkdir()
        _give(folder, pod.spec["securityContext"]["fsGroup"])
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
                os.chown(path, 0, pod.spec["securityContext"]["fsGroup"])
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
        for pod in self.pods:
            self._connect(pod)

    def _connect(self, pod: Pod) -> None:
        """A namespace and an address that no pod had before."""
        number = next(self._numbers)
        pod.namespace, pod.address = f"fleet-{self._tag}-{number}", f"10.198.1.{number}"
        self._namespaces.append(pod.namespace)
        end, port = f"fk{self._tag}{number}", f"p{number}"
        _call("ip", "netns", "add", pod.namespace)
        ends = ("netns", pod.namespace, "type", "veth", "peer", "name", port, "netns", self._hub)
        _call("ip", "link", "add", end, *ends)
        _call("ip", "-n", self._hub, "link", "set", port, "master", "pods", "up")
        _call("ip", "-n", pod.namespace, "address", "add", f"{pod.address}/16", "dev", end)
        for device in ("lo", end):
            _call("ip", "-n", pod.namespace, "link", "set", device, "up")

    def _remove_network(self) -> None:
        for namespace in (*self._namespaces, self._hub):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


@contextlib.contextmanager
def node(documents: Sequence[Document], folder: Path, claims: Mapping[str, Path]) -> Iterator[Node]:
    """A node with the network of all pods, none of them started; nothing is left when it is left."""
    with Node(documents, folder, claims) as made:
        yield made


def _give(folder: Path, group: int) -> None:
    """As fsGroup does: the folder is the group's, too, and what is made in it."""
    os.chown(folder, 0, group)
    folder.chmod(0o2777)


def _as(pod: Pod) -> str:
    """The user and the rights that the manifest gives the pod's processes: no capability is left."""
    user = pod.spec["securityContext"]
    assert pod.container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    ids = f"--reuid={user['runAsUser']} --regid={user['runAsGroup']} --groups={user['fsGroup']}"
    return f"setpriv {ids} --no-new-privs --inh-caps=-all --bounding-set=-all"


def _variables(values: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def _words(parts: Sequence[str]) -> str:
    return " ".join(map(shlex.quote, parts))


def _bound(source: Path, target: str, recursive: bool = False) -> list[str]:
    return [f"mkdir -p {target}", f"mount --{'r' if recursive else ''}bind {source} {target}"]


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the first process of a pod, and so all of them. `unshare`, which is `process`, ends with it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for first in psutil.Process(process.pid).children():
            first.kill()
    if process.poll() is None:
        process.wait(20)


def _read(pod: Pod, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        pod.lines.append(line)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoPods(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}")
