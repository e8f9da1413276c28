"""Checks the options of `fleetrun slurm` before the file is written, and quotes their texts for it."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.endurance.durability import durability_variables, require_store
from torchfleet.launch.job_spec import JobSpec, Resources

DURABILITY = ("durability", "log_store", "fsync_ms")
_TIME = re.compile(r"[0-9]{1,6}([:-][0-9]{1,3}){0,3}|UNLIMITED")
_NAMES = ("output", "partition", "account", "save_on_stop", "resume", "log_dir", "key_dir", "log_store", "metrics_host")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")  # with the line separators of Unicode
_ESCAPED = re.compile(r"[\\'\x00-\x1f\x7f-\x9f\u2028\u2029]")


def job_name(options: argparse.Namespace) -> str:
    return str(options.job_name or Path(options.script).stem)


def resume_words(text: str) -> list[str]:
    """Return the arguments in the text of --resume. Quotes are read as a shell does; nothing is expanded.

    Raises RoleError if a quote is not closed.
    """
    try:
        return shlex.split(text)
    except ValueError as error:
        raise RoleError(f"--resume: expected arguments as a shell reads them, found {text!r}: {error}") from None


def one_line(word: str) -> str:
    """Return the word quoted for bash, without a line break: control characters are written as escapes."""
    if not _CONTROL.search(word):
        return shlex.quote(word)
    escaped = _ESCAPED.sub(lambda found: "".join(f"\\x{byte:02x}" for byte in found[0].encode()), word)
    return f"$'{escaped}'"


def check(job: JobSpec, options: argparse.Namespace) -> None:
    """Raise RoleError for values out of bounds, control characters in names, and options that exclude others."""
    if job.num_servers == "auto":
        raise RoleError("--server_num auto counts cores of this machine: give a number")
    if job.min_workers is not None:
        raise RoleError(
            "--worker_num MIN:MAX: a job of Slurm has as many tasks from its begin to its end: give one number"
        )
    counts = {name: getattr(options, name) for name in ("server_num", "worker_num", "nodes", "nproc_per_node")}
    for name, value in (*counts.items(), ("signal_seconds", options.signal_seconds)):
        if value is not None and value < 1:
            raise RoleError(f"--{name} must be at least 1, found {value}")
    if options.time is not None and not _TIME.fullmatch(options.time):
        raise RoleError(f"--time expects minutes, H:M:S or D-H:M:S; found {options.time!r}")
    if options.signal_seconds is not None and not (options.time and (options.save_on_stop or options.requeue)):
        raise RoleError(
            f"--signal_seconds {options.signal_seconds}: how long before its limit the job is asked to save, and it is "
            "not asked: add --time TIME, and --save_on_stop DIR or --requeue"
        )
    if options.resume and not options.save_on_stop:
        raise RoleError("--resume needs --save_on_stop DIR, the folder in which it looks for a save")
    # Only the options: the job gets its environment variables from the shell that submits it.
    require_store(durability_variables(options, {}), "a folder that a requeued job finds again")
    _check_characters(options)
    if options.resume:
        resume_words(options.resume)
    _check_kinds(job, options)


def _check_kinds(job: JobSpec, options: argparse.Namespace) -> None:
    for name in ("server_cpus", "worker_cpus", "worker_gpus"):
        number = getattr(options, name)
        if number is not None and number % 1:
            raise RoleError(f"--{name}: Slurm gives whole cores and GPUs to a task, found {number:g}")
    server, worker = job.resources_of("server"), job.resources_of("worker")
    if options.nproc_per_node:
        names = ("server_num", "worker_num", "server_cpus", "server_memory", "het", "save_on_stop", "key_dir")
        more = ("servers_run_script", *DURABILITY)
        wrong = [f"--{name}" for name in (*names, *more) if getattr(options, name)]
        if wrong:
            raise RoleError(
                f"--nproc_per_node makes a collective job, {', '.join(wrong)} one with servers: use one kind"
            )
        return
    if not options.het and server != Resources() and (server.cpus, server.memory) != (worker.cpus, worker.memory):
        raise RoleError(
            "--server_cpus and --server_memory differ from those of workers, and tasks of one component are alike: add "
            "--het, or give both the same"
        )
    if not options.het and worker.gpus:
        raise RoleError("--worker_gpus: without --het the servers would hold GPUs, too. Add --het.")


def _check_characters(options: argparse.Namespace) -> None:
    """Raise RoleError for control characters in names, and for texts that are not UTF-8, as the file is.

    Arguments of the script may have control characters: they are quoted.
    """
    names = {f"--{name}": getattr(options, name) for name in _NAMES}
    found = {**names, "--job_name": options.job_name, "the name of the script": options.script}
    for what, text in (*found.items(), *(("--sbatch", option) for option in options.sbatch)):
        if text is not None and _CONTROL.search(text):
            raise RoleError(
                f"{what}: expected one line without control characters, found {text!r}. Use another name, as it "
                "is written into the batch script"
            )
    for text in (*found.values(), *options.sbatch, *options.arguments):
        if text is not None and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise RoleError(f"expected arguments in UTF-8, as the batch script is, found {text!r}. Use another name")
