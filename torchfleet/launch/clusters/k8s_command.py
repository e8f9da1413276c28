"""`fleetrun k8s`: writes the manifests of a job, or with `serve` of a model server. kubectl applies them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters import k8s_serve
from torchfleet.launch.clusters.k8s.k8s_job import K8sJob
from torchfleet.launch.clusters.k8s.k8s_yaml import stream_of, write_folder
from torchfleet.launch.clusters.k8s.manifests import documents, jobs, new_keys
from torchfleet.launch.clusters.k8s.pod_resources import CPUS, MEMORY
from torchfleet.launch.clusters.k8s.script_files import CONFIG_MAP, ScriptFile, config_map_files, script_files
from torchfleet.launch.clusters.k8s_options import job_of, k8s_parser
from torchfleet.launch.clusters.sent_files import SentFile, described_files

KUBECTL = {  # kubectl commands for the manifests: DIR is their folder, NAME is the job's name
    "apply": "kubectl apply --server-side -f DIR",
    "status": "kubectl get jobs,pods -l app.kubernetes.io/instance=NAME",
    "logs": "kubectl logs -l app.kubernetes.io/instance=NAME --prefix --follow --tail=-1 --max-log-requests=100",
    "delete": "kubectl delete -f DIR",
}


def main(arguments: Sequence[str]) -> int:
    """Run `fleetrun k8s` with these arguments and return its exit status. Raises FleetError."""
    if arguments and arguments[0] == "serve":
        return k8s_serve.main(arguments[1:])
    if arguments and arguments[0] in KUBECTL:
        raise RoleError(f"fleetrun k8s writes manifests only. For `{arguments[0]}`: {KUBECTL[arguments[0]]}")
    return _write(k8s_parser().parse_args(arguments))


def _write(options: argparse.Namespace) -> int:
    job = job_of(options)
    sent, left = _files(options)
    files = config_map_files(sent)
    described = described_files(sent, left, CONFIG_MAP)
    if options.dry_run:
        print("\n".join([*described, *describe(job, files)]))
        return 0
    for line in (*described, *described_defaults(options)):
        note(line)
    made = documents(job, files, {} if job.is_collective else new_keys())
    signs = any(file.sign for file in files)
    private = {kind for kind, is_private in (("Secret", True), ("ConfigMap", signs)) if is_private}
    if options.output is None:
        told = sorted(private & {document["kind"] for document in made})
        if told:
            note(
                f"standard output has secrets (kind {', '.join(told)}): let only yourself read what you write it to, "
                "or give -o DIR"
            )
        sys.stdout.write(stream_of(made))
        return 0
    folder = Path(options.output)
    with_kustomization = options.format == "kustomize"
    paths = write_folder(folder, job, made, with_kustomization, private)
    flag = "-k" if with_kustomization else "-f"
    note(f"wrote {len(paths)} files to {folder}. Next: kubectl apply --server-side {flag} {folder}")
    return 0


def _files(options: argparse.Namespace) -> tuple[list[SentFile], dict[str, str]]:
    if options.module or options.in_image:
        return [], {}
    return script_files(Path(os.path.abspath(options.script)), options.script_alone, options.files)


def described_defaults(options: argparse.Namespace) -> list[str]:
    """Return a line with the default cores and memory of a process if the user left out any of them, else nothing."""
    is_collective = options.nproc_per_node is not None or options.nnodes is not None
    names = [f"{role}_{what}" for role in ("server", "worker") for what in ("cpus", "memory")]
    missing = [f"--{name}" for name in names[2 * is_collective :] if getattr(options, name) is None]
    given = f"{CPUS:g} core and {MEMORY >> 30} GiB for each process"
    return [f"not given: {', '.join(missing)}. The defaults are {given}; memory is also a limit"] if missing else []


def describe(job: K8sJob, files: list[ScriptFile]) -> list[str]:
    """Return the lines of --dry_run: every Job with its pods, their command and their environment."""
    lines = []
    for made in jobs(job, files):
        container = made["spec"]["template"]["spec"]["containers"][0]
        num = made["spec"]["completions"]  # of an elastic job: the maximum
        lines.append(f"{made['metadata']['name']}, {num} pod{'s' * (num > 1)}: {' '.join(container['command'])}")
        for variable in container["env"]:
            value = variable.get("value", variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath"))
            lines.append(f"    {variable['name']}={value}")
    return lines


def note(text: str) -> None:
    print(f"[fleetrun] {text}", file=sys.stderr, flush=True)
