"""Pods of manifests, as Kubernetes makes them: host names, annotations, variables and commands resolved."""

from __future__ import annotations

import base64
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

Document = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"


def documents_of(text: str) -> list[Document]:
    """Of YAML, read by the parser in C: the one in Python takes ten times as long."""
    return list(yaml.load_all(text, Loader=yaml.CSafeLoader))


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


def jobs_of(documents: Sequence[Document]) -> list[Document]:
    """The Jobs of the roles, without that of the owner, whose pod asks the API of a cluster."""
    found = [document for document in documents if document["kind"] == "Job"]
    return [job for job in found if job["metadata"]["labels"]["app.kubernetes.io/component"] != "owner"]


def pods_of(documents: Sequence[Document]) -> list[Pod]:
    """Every pod of every Job of the roles, in their order."""
    made = []
    for job in jobs_of(documents):
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["parallelism"] == job["spec"]["completions"]
        for index in range(job["spec"]["completions"]):
            annotations = {INDEX: str(index), FAILURES: "0"}
            made.append(Pod(f"{job['metadata']['name']}-{index}", job["spec"]["template"]["spec"], annotations))
    return made


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
