"""`fleetrun k8s serve`: writes the manifests of a model server for Kubernetes and for KServe."""

from __future__ import annotations

import argparse
import posixpath
import sys
from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.command_line import Parser
from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s.k8s_job import check_name, name_of
from torchfleet.launch.clusters.k8s.k8s_yaml import stream_of, write_folder
from torchfleet.launch.clusters.k8s.pod_resources import CPUS, MEMORY
from torchfleet.launch.clusters.k8s.serving import K8sServing
from torchfleet.launch.clusters.k8s.serving_pods import kserve_documents, plain_documents
from torchfleet.launch.clusters.k8s_options import add_pod_options, object_or_none, pod_settings
from torchfleet.observe.commands import serve_command
from torchfleet.ps.tables.settings.table_size import parse_bytes

FORMATS = ("plain", "kustomize", "kserve")
KSERVE = "kserve"  # the folder of the InferenceService, which `kubectl apply -f DIR` does not enter
_MOST = 1000  # pods of a role
# The manifests give these to `fleet serve` themselves.
_OWN = (
    "--host",
    "--port",
    "--token_file",
    "--tls_cert",
    "--tls_key",
    "--shards",
    "--backups",
    "--key_dir",
    "--cluster",
)


def main(arguments: Sequence[str]) -> int:
    """Run `fleetrun k8s serve` with these arguments and return its exit status. Raises FleetError."""
    own, more = _split(arguments)
    options = _parser().parse_args(own)
    job = serving_of(options, more)
    if options.output is None:
        if options.format == "kustomize":
            raise RoleError("--format kustomize is a folder: add -o DIR")
        made = kserve_documents(job) if options.format == "kserve" else plain_documents(job)
        sys.stdout.write(stream_of(made))
        return 0
    folder = Path(options.output)
    if options.format == "kserve":
        paths = write_folder(folder, job, kserve_documents(job), False, ())
        _note(f"wrote {len(paths)} files to {folder}. Next: kubectl apply --server-side -f {folder}")
        return 0
    paths = write_folder(folder, job, plain_documents(job), options.format == "kustomize", ())
    paths += write_folder(folder / KSERVE, job, kserve_documents(job), False, ())
    flag = "-k" if options.format == "kustomize" else "-f"
    _note(
        f"wrote {len(paths)} files to {folder}. Next: kubectl apply --server-side {flag} {folder}; with KServe, "
        f"instead of it: kubectl apply --server-side -f {folder / KSERVE}"
    )
    return 0


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options of this command, and the options of `fleet serve`, which follow `--`."""
    given = list(arguments)
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="fleetrun k8s serve",
        description="Write the manifests of a model server: Service, Deployment, HorizontalPodAutoscaler, "
        "PodDisruptionBudget, and a KServe InferenceService that takes their place. With -o DIR into a folder, else to "
        "standard output.",
        usage="fleetrun k8s serve --image IMAGE --model MODEL [-o DIR] [options] [-- options of fleet serve]",
        allow_abbrev=False,
    )
    made.add_argument("--image", required=True, help="torchfleet is installed in it, with the extra `serve`")
    made.add_argument("--model", required=True, metavar="PATH", help="the saved model: a path in the pods, or a URL")
    made.add_argument("--model_in_image", action="store_true", help="the path of --model is in the image")
    scale = made.add_argument_group("scale")
    scale.add_argument("--min_replicas", type=int, default=2, metavar="N", help="pods at least (default: 2)")
    scale.add_argument("--max_replicas", type=int, default=10, metavar="N", help="pods at most (default: 10)")
    scale.add_argument(
        "--cpu_target", type=int, default=70, metavar="PERCENT", help="use of cores at which pods are added (70)"
    )
    scale.add_argument("--cpus", type=float, default=CPUS, metavar="N", help=f"cores of a pod (default: {CPUS:g})")
    scale.add_argument("--memory", metavar="SIZE", help="memory of a pod, such as 8GB (default: 4GB)")
    _add_shards(made.add_argument_group("tables larger than a pod"))
    secret = made.add_argument_group("secrets: names of Secrets of the namespace, which you create")
    secret.add_argument("--token_secret", metavar="SECRET", help="its key `token` is what clients send as bearer token")
    secret.add_argument("--tls_secret", metavar="SECRET", help="of type kubernetes.io/tls: serve HTTPS")
    add_pod_options(made.add_argument_group("pods"))
    output = made.add_argument_group("output")
    output.add_argument("--name", help="of all objects (default: that of the model)")
    output.add_argument("--namespace", metavar="NAME", help="(default: that of the user who applies the manifests)")
    output.add_argument("--format", choices=FORMATS, default="plain", help="(default: plain)")
    output.add_argument("-o", "--output", metavar="DIR", help="a new or empty folder for the manifests")
    return made


def _add_shards(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--shards", type=int, default=0, metavar="N", help="rows on N read-only servers (default: none)")
    group.add_argument("--shard_replicas", type=int, choices=(1, 2), default=1, help="2: every shard has a backup")
    group.add_argument("--shard_cpus", type=float, metavar="N", help=f"cores (default: {CPUS:g})")
    group.add_argument("--shard_memory", metavar="SIZE", help="memory of each server (default: 4GB)")
    group.add_argument(
        "--key_secret",
        metavar="SECRET",
        help="needed with --shards: kubectl create secret generic SECRET --from-file=DIR, DIR of fleetrun --keygen",
    )


def serving_of(options: argparse.Namespace, arguments: Sequence[str]) -> K8sServing:
    """Return the model server that these options describe. Raises RoleError for invalid combinations."""
    _check(options)
    passed = _passed(options, arguments)
    settings = pod_settings(options)
    _check_model(options, [claim.path for claim in settings["claims"]])
    name = options.name if options.name is not None else name_of(options.model.rstrip("/"))
    return K8sServing(
        name=check_name(name, "--name"),
        image=options.image,
        model=options.model,
        arguments=tuple(arguments),
        namespace=check_name(options.namespace, "--namespace", 63) if options.namespace is not None else None,
        min_replicas=options.min_replicas,
        max_replicas=options.max_replicas,
        timeout_s=passed.timeout_s,
        cpu_target=options.cpu_target,
        cpus=options.cpus,
        memory=parse_bytes(options.memory, "--memory") if options.memory else MEMORY,
        num_shards=options.shards,
        has_backups=options.shard_replicas == 2,
        shard_cpus=CPUS if options.shard_cpus is None else options.shard_cpus,
        shard_memory=parse_bytes(options.shard_memory, "--shard_memory") if options.shard_memory else MEMORY,
        token_secret=object_or_none("--token_secret", options.token_secret),
        tls_secret=object_or_none("--tls_secret", options.tls_secret),
        key_secret=object_or_none("--key_secret", options.key_secret),
        **settings,
    )


def _check(options: argparse.Namespace) -> None:
    if not options.image.strip() or options.image.startswith("-") or " " in options.image:
        raise RoleError(f"--image: expected the name of an image, found {options.image!r}")
    if not 1 <= options.min_replicas <= options.max_replicas <= _MOST:
        raise RoleError(
            f"--min_replicas {options.min_replicas}, --max_replicas {options.max_replicas}: expected 1 <= min <= max "
            f"<= {_MOST}"
        )
    bounds = {"cpu_target": (1, 100), "shards": (0, _MOST), "user": (1, 1 << 31), "cpus": (0.1, 1e4)}
    bounds |= {} if options.shard_cpus is None else {"shard_cpus": (0.1, 1e4)}
    for name, (least, most) in bounds.items():
        if not least <= getattr(options, name) <= most:
            raise RoleError(f"--{name}: expected a number from {least:g} to {most:g}, found {getattr(options, name):g}")
    about_shards = {"--shard_replicas 2": options.shard_replicas == 2, "--key_secret": options.key_secret is not None}
    about_shards["--shard_cpus"] = options.shard_cpus is not None
    about_shards["--shard_memory"] = options.shard_memory is not None
    given = next((name for name, is_given in about_shards.items() if is_given), None)
    if not options.shards and given:
        raise RoleError(f"{given} is about the servers of shards, and there are none: add --shards N")
    if options.shards and options.key_secret is None:
        raise RoleError(
            "--shards: servers that other pods reach need keys. Make them with fleetrun --keygen DIR and kubectl "
            "create secret generic NAME --from-file=DIR, and give --key_secret NAME"
        )


def _passed(options: argparse.Namespace, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of `fleet serve` in the pods. Raises RoleError for those that the manifests set or exclude."""
    parser: argparse.ArgumentParser = Parser("fleet")
    serve_command.add_commands(parser.add_subparsers())
    # parse_args exits with status 2 for options that fleet serve refuses
    passed, plain = (parser.parse_args(["serve", options.model, *more]) for more in (arguments, ()))
    given = {name for name in _OWN if getattr(passed, name[2:]) != getattr(plain, name[2:])}  # also if abbreviated
    given |= {part.partition("=")[0] for part in arguments} & set(_OWN)
    if given:
        raise RoleError(f"-- {min(given)}: the manifests set it themselves; leave it out")
    if passed.grpc_port:
        raise RoleError("-- --grpc_port: the Service of the manifests leads to HTTP alone; leave it out")
    if passed.follow and options.shards:
        raise RoleError("-- --follow and --shards exclude each other: servers of shards have read one save")
    return passed


def _check_model(options: argparse.Namespace, claimed: Sequence[str]) -> None:
    """Raise RoleError for a path that is not in a volume of the pods, unless the user says that it is in the image."""
    if "://" in options.model and options.model_in_image:
        raise RoleError(
            f"--model_in_image is about a path in the image, and --model {options.model} is a URL: use one of them"
        )
    if "://" in options.model or options.model_in_image:
        return
    path = posixpath.normpath(options.model)
    if not any(path == claim or path.startswith(f"{claim}/") for claim in claimed):
        raise RoleError(
            f"--model {options.model}: pods cannot read it. Expected a URL such as s3://bucket/model, or a path below "
            "a volume of the pods (--pvc CLAIM=/PATH:ro), or with --model_in_image a path in the image"
        )


def _note(text: str) -> None:
    print(f"[fleetrun] {text}", file=sys.stderr, flush=True)
