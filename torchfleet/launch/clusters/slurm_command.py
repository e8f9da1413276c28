"""`fleetrun slurm`: writes an sbatch file that a person can read and change."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torchfleet.base.command_line import Parser
from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.json_lines import log_format
from torchfleet.base.role.variables import refuse_misspelt
from torchfleet.launch.clusters.job_options import add_counts, add_resources, add_script, check_script, job_spec_of
from torchfleet.launch.clusters.slurm_checks import DURABILITY, check, job_name, one_line, resume_words
from torchfleet.launch.endurance.durability import add_options as add_durability
from torchfleet.launch.job_spec import JobSpec, Resources
from torchfleet.launch.server_command import add_option as add_script_option
from torchfleet.observe.watch.watchers import add_exports

_PLAIN = re.compile(r"[\w.,:@%+=/-]+")  # text that sbatch reads without quotes
_SIGNAL_SECONDS = 120
_EXAMPLES = """examples:
  fleetrun slurm --server_num 2 --worker_num 4 --nodes 3 --time 4:00:00 -o job.sbatch train.py --epochs 3
  fleetrun slurm --server_num 2 --worker_num 4 --het --server_memory 64GB --worker_cpus 8 -o job.sbatch train.py
  fleetrun slurm --server_num 2 --worker_num 4 --time 4:00:00 --requeue --save_on_stop model \\
      --resume '--init_model model' -o job.sbatch train.py --save model
  fleetrun slurm --nproc_per_node 8 --nodes 4 --worker_gpus 8 --insecure -o job.sbatch train.py      collective
  sbatch job.sbatch"""


def main(arguments: Sequence[str]) -> int:
    """Write the file, or print it without -o. Raises RoleError for invalid options."""
    options = _parser().parse_args(arguments)
    refuse_misspelt(os.environ)  # the job has the environment of the shell that submits it
    check_script(options)
    text = sbatch_file(job_spec_of(options), options, arguments)
    if options.output is None:
        print(text, end="")
        return 0
    try:
        Path(options.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise RoleError(f"cannot write {options.output}: {error}") from None
    print(f"{options.output} is written; to submit it: sbatch {shlex.quote(options.output)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="fleetrun slurm",
        description="Write a file for sbatch: a job whose tasks are servers and workers, or machines of a collective "
        "job.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_counts(parser)
    parser.add_argument("--nproc_per_node", type=int, help="a collective job: ranks of each node; one task a node")
    add_resources(parser)
    add = parser.add_argument_group("the job").add_argument
    add("-o", "--output", metavar="FILE", help="the file to write (default: it is printed)")
    add("--job_name", help="(default: the name of the script)")
    add("--nodes", type=int, help="nodes of the job (default: as Slurm decides)")
    add("--time", metavar="TIME", help="limit, as sbatch takes it: minutes, H:M:S or D-H:M:S")
    add("--partition", help="as sbatch takes it")
    add("--account", help="as sbatch takes it")
    add("--het", action="store_true", help="servers and workers as two components, each with its own resources")
    add("--sbatch", action="append", default=[], metavar="OPTION", help="another option of sbatch; several times")
    add("--requeue", action="store_true", help="a job that has saved ahead of its limit is queued again")
    add(
        "--signal_seconds", type=int, metavar="N",
        help="how long before the limit the job is asked to save (default: 120)",
    )  # fmt: skip
    add("--save_on_stop", metavar="DIR", help="where worker 0 then saves; without it the script does: stop_if_asked")
    add("--resume", metavar="ARGUMENTS", help="what the script gets in addition, when there is a save in that folder")
    add("--log_dir", default="log", help="a folder that all nodes see (default: log)")
    add("--key_dir", help="folder of keys (default: keys are made for every job)")
    add("--insecure", action="store_true", help="talk to other nodes without keys")
    add_script_option(parser)
    add_durability(parser.add_argument_group("logs of servers"))
    add_exports(parser.add_argument_group("watching"))
    parser.set_defaults(max_restart=0, max_job_restart=0)
    add_script(parser)
    return parser


def sbatch_file(job: JobSpec, options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """Return the whole file. Every text of the user is one quoted word. Raises RoleError for invalid options."""
    check(job, options)
    made_by = " ".join(one_line(word) for word in arguments)
    lines = ["#!/bin/bash", *_header(job, options), "", f"# made by: fleetrun slurm {made_by}", ""]
    more = ""
    if options.resume:
        manifest = shlex.quote(f"{options.save_on_stop.rstrip('/')}/manifest.json")
        words = shlex.join(resume_words(options.resume))
        lines += ["resume=()", f"[ -e {manifest} ] && resume=({words})", ""]
        more = ' "${resume[@]}"'
    task = [shlex.join([sys.executable, "-m", "torchfleet.launch", *_fleetrun(job, options)])]
    task.append(shlex.join(_script(options)) + more)
    steps = [[shlex.join(part), *task] for part in _srun(job, options)]
    lines.append(" \\\n    ".join(line for number, step in enumerate(steps) for line in ([":"] * bool(number) + step)))
    return "\n".join(lines) + "\n"


def _srun(job: JobSpec, options: argparse.Namespace) -> list[list[str]]:
    """Return the options of srun: one list, or one for each component if servers and workers differ in cores.

    The cores are repeated here: from Slurm 22.05 on, srun does not take them over from sbatch.
    """
    if options.nproc_per_node:
        return [["srun", "--kill-on-bad-exit=1", *_cores(job.resources_of("rank"))]]
    # Servers have the first ranks: a cyclic distribution spreads them over the nodes.
    shared = ["--kill-on-bad-exit=1", "--distribution=cyclic"]
    server, worker = job.resources_of("server"), job.resources_of("worker")
    if not options.het:
        return [["srun", *shared, *_cores(worker)]]
    if server.cpus == worker.cpus:
        return [["srun", *shared, "--het-group=0,1", *_cores(worker)]]
    # If only one component had a number of cores, srun would use this number for the other component, too.
    first, second = ([*shared, f"--het-group={i}", *_cores(each, 1)] for i, each in enumerate((server, worker)))
    return [["srun", *first], second]


def _cores(each: Resources, default: int | None = None) -> list[str]:
    cores = default if each.cpus is None else int(each.cpus)
    return [] if cores is None else [f"--cpus-per-task={cores}"]


def _quoted(text: str) -> str:
    """Quote the text if sbatch would not read it as one value: if it has spaces, quotes or a #."""
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _header(job: JobSpec, options: argparse.Namespace) -> Iterator[str]:
    yield f"#SBATCH --job-name={_quoted(job_name(options))}"
    yield "#SBATCH --open-mode=append"  # a requeued job appends to its earlier output
    if options.requeue:
        yield "#SBATCH --requeue"
    if options.het:
        yield from _component(job.num_servers, job.resources_of("server"), options, None)
        yield "#SBATCH hetjob"
        yield from _component(job.num_workers, job.resources_of("worker"), options, options.nodes)
    elif options.nproc_per_node:
        yield "#SBATCH --ntasks-per-node=1"
        yield from _component(options.nodes or 1, job.resources_of("rank"), options, options.nodes or 1)
    else:
        num_tasks = int(job.num_servers or 1) + (job.num_workers or 1)
        both = job.resources_of("worker")
        yield from _component(num_tasks, Resources(both.cpus, both.memory), options, options.nodes)


def _component(num: int | str | None, each: Resources, options: argparse.Namespace, nodes: int | None) -> Iterator[str]:
    """Yield the #SBATCH lines of one component: tasks with equal resources."""
    yield f"#SBATCH --ntasks={num or 1}"
    given = {
        "nodes": nodes,
        "cpus-per-task": None if each.cpus is None else int(each.cpus),
        "mem-per-cpu": None if each.memory is None else f"{max(1, each.memory // int(each.cpus or 1) >> 20)}M",
        "gpus-per-task": None if each.gpus is None else int(each.gpus),
        "time": options.time,
        "partition": options.partition and _quoted(options.partition),
        "account": options.account and _quoted(options.account),
    }
    yield from (f"#SBATCH --{name}={value}" for name, value in given.items() if value is not None)
    if options.time and (options.save_on_stop or options.requeue):
        yield f"#SBATCH --signal=USR1@{options.signal_seconds or _SIGNAL_SECONDS}"
    yield from (f"#SBATCH {option if option.startswith('-') else f'--{option}'}" for option in options.sbatch)


def _fleetrun(job: JobSpec, options: argparse.Namespace) -> list[str]:
    found = ["--cluster", "slurm"]
    if options.nproc_per_node:
        found += ["--nproc_per_node", str(options.nproc_per_node)]
    else:
        found += ["--server_num", str(job.num_servers or 1), "--worker_num", str(job.num_workers or 1)]
    for name in ("save_on_stop", "key_dir", "metrics_port", "metrics_host", *DURABILITY):
        value = getattr(options, name)
        found += [] if value is None else _option(name, str(value))
    found += _option("log_dir", options.log_dir) if options.log_dir != "log" else []
    if "json" in (options.log_format, log_format()):  # tasks may inherit the variable that selects json
        found += ["--log_format", options.log_format]
    found += [f"--{name}" for name in ("requeue", "insecure", "servers_run_script") if getattr(options, name)]
    return found


def _option(name: str, value: str) -> list[str]:
    """Return the words of an option. A value that begins with - is in the word of its name: alone it would be read as
    an option.
    """
    return [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]


def _script(options: argparse.Namespace) -> list[str]:
    return [*(["-m"] if options.module else []), options.script, *options.arguments]
