"""Protects a job on one machine from the machine's other users: with keys or sockets made when the job starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from torchfleet.base.errors import RoleError
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.roles import JobLayout
from torchfleet.ps.net.keys import is_private
from torchfleet.ps.net.private_jobs import IPC, KEYS, PrivateJob

KINDS = (KEYS, IPC)
_TEXTS = {
    KEYS: "keys of its own, made at the start, in a folder that only this user can enter (FLEET_KEY_DIR)",
    IPC: "sockets in a folder that only this user can enter, made at the start (FLEET_SOCKET_DIR)",
}


def kind_of(job: JobSpec, layout: JobLayout, private: str | None, plain: bool) -> str | None:
    """Return KEYS or IPC if the job gets a private folder; None if it has keys, if the user declined protection, or if
    other launchers take part in it. Raises RoleError for options that contradict each other or the job."""
    if private and plain:
        raise RoleError(f"--private {private} keeps other users of this machine out, --plain lets them in: use one")
    option = "--plain" if plain else f"--private {private}"
    if (private or plain) and job.key_dir:
        raise RoleError(
            f"{option} and --key_dir (FLEET_KEY_DIR) {job.key_dir} exclude each other: leave one of them out"
        )
    if (private or plain) and not _is_all_here(layout):
        raise RoleError(
            f"{option} is for jobs whose processes all are on this machine, with servers on its loopback interface. "
            "Use --key_dir with keys for all machines, or say --insecure."
        )
    if plain or job.key_dir or not _is_all_here(layout):
        return None
    return private or IPC  # as private as keys, without the cost of encryption: benchmarks/log.md


def told(kind: str | None) -> list[str]:
    """Return the line of `--dry_run` about the protection."""
    return [f"private: {_TEXTS[kind]}; --plain does without"] if kind else []


@contextlib.contextmanager
def private_folder(job: JobSpec, layout: JobLayout, kind: str | None) -> Iterator[JobSpec]:
    """Yield the job with a private folder of this kind. The folder is removed at the end. Raises SecurityError."""
    if kind is None:
        yield job
        return
    made = PrivateJob(layout.listening, kind)
    try:
        yield dataclasses.replace(job, **dataclasses.asdict(made.way))
    finally:
        made.close()


def _is_all_here(layout: JobLayout) -> bool:
    """Whether this launcher starts every process, and no other machine can reach a server."""
    return layout.is_all_here and all(is_private(f"tcp://{place}") for place in layout.listening)
