"""`fleetrun k8s`: writes the manifests of a job. kubectl applies them and shows the state of the job."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s.k8s_job import K8sJob
from torchfleet.launch.clusters.k8s.k8s_yaml import stream_of, write_folder
from torchfleet.launch.clusters.k8s.manifests import documents, jobs, new_keys
from torchfleet.launch.clusters.k8s.script_files import ScriptFile, script_files
from torchfleet.launch.clusters.k8s_options import job_of, k8s_parser

_SHOWN = 5  # at most this many names of files that were left out
KUBECTL = {  # kubectl commands for the manifests: DIR is their folder, NAME is the job's name
    "apply": "kubectl apply --server-side -f DIR",
    "status": "kubectl get jobs,pods -l app.kubernetes.io/instance=NAME",
    "logs": "kubectl logs -l app.kubernetes.io/instance=NAME --prefix --follow --tail=-1 --max-log-requests=100",
    "delete": "kubectl delete -f DIR",
}


def main(arguments: Sequence[str]) -> int:
    """Run `fleetrun k8s` with these arguments and return its exit status. Raises FleetError."""
    if arguments and arguments[0] in KUBECTL:
        raise RoleError(f"fleetrun k8s writes manifests only. For `{arguments[0]}`: {KUBECTL[arguments[0]]}")
    return _write(k8s_parser().parse_args(arguments))


def _write(options: argparse.Namespace) -> int:
    job = job_of(options)
    files, others = _files(options)
    if options.dry_run:
        print("\n".join(describe(job, files)))
        return 0
    if others:
        named = ", ".join(others[:_SHOWN]) + (", ..." if len(others) > _SHOWN else "")
        _note(f"{len(others)} files of the script's folder are no source and stay here: {named}")
    made = documents(job, files, {} if job.is_collective else new_keys())
    if options.output is None:
        sys.stdout.write(stream_of(made))
        return 0
    folder = Path(options.output)
    with_kustomization = options.format == "kustomize"
    paths = write_folder(folder, job, made, with_kustomization)
    flag = "-k" if with_kustomization else "-f"
    _note(f"wrote {len(paths)} files to {folder}. Next: kubectl apply --server-side {flag} {folder}")
    return 0


def _files(options: argparse.Namespace) -> tuple[list[ScriptFile], list[str]]:
    if options.module or options.in_image:
        return [], []
    return script_files(Path(options.script).absolute(), options.script_alone)


def describe(job: K8sJob, files: list[ScriptFile]) -> list[str]:
    """Return the lines of --dry_run: every Job with its pods, their command and their environment."""
    lines = []
    for made in jobs(job, files):
        container = made["spec"]["template"]["spec"]["containers"][0]
        num = made["spec"]["completions"]
        lines.append(f"{made['metadata']['name']}, {num} pod{'s' * (num > 1)}: {' '.join(container['command'])}")
        for variable in container["env"]:
            value = variable.get("value", variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"))
            lines.append(f"    {variable['name']}={value}")
    return lines


def _note(text: str) -> None:
    print(f"[fleetrun] {text}", file=sys.stderr, flush=True)
