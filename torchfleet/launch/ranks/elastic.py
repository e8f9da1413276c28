"""Runs the ranks of this machine until they end: rendezvous, torch's agent, signals and the exit status."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from torchfleet.base.monitor.stop_request import REQUEUE
from torchfleet.collective.elastic.memory_files import VARIABLE as MEMORY_FILES
from torchfleet.launch import roles
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.job_watch import JobWatch
from torchfleet.launch.ranks.agent import SIGNALS, Agent
from torchfleet.launch.ranks.rank_logs import RankLogs
from torchfleet.launch.ranks.rank_memory import RankMemory
from torchfleet.launch.ranks.rank_plan import RankPlan
from torchfleet.launch.ranks.rendezvous import ElasticRendezvous, FixedRendezvous, Rendezvous
from torchfleet.launch.ranks.stores import Report, StoreAddress
from torchfleet.launch.surroundings import surroundings

# The launcher may itself run as a process of a job. Its ranks must not inherit that role.
_ROLE_NAMES = (
    "FLAGS_selected_gpus", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FLEET_NUM_WORKERS",
    "FLEET_SERVER_ENDPOINTS", "FLEET_STATUS_FILE", MEMORY_FILES,
)  # fmt: skip


def run(job: JobSpec, plan: RankPlan, log_dir: Path) -> int:
    """Run the job to its end and return its exit status. No rank is left when this returns."""
    _handle_signals()
    _quiet_torch()
    kept = surroundings()
    for name in [name for name in os.environ if name not in kept or name in _ROLE_NAMES or name.startswith("PADDLE_")]:
        del os.environ[name]
    watch = JobWatch(job, log_dir)
    try:
        return _run(job, plan, log_dir, watch)
    except RendezvousError as error:
        watch.report(f"[fleetrun] the job ends: {error}")
        return 1
    except SignalException as stopped:
        watch.report(f"[fleetrun] {stopped.sigval.name}: ended all ranks; logs in {log_dir}")
        return 128 + int(stopped.sigval)
    finally:
        watch.close()


def _run(job: JobSpec, plan: RankPlan, log_dir: Path, watch: JobWatch) -> int:
    rendezvous = _rendezvous(plan, watch.report)
    memory = RankMemory(plan.num_ranks) if job.max_restart else None
    logs = RankLogs(log_dir, plan.environment, rendezvous, job.watching, memory)
    agent = Agent(job, plan.num_ranks, logs, rendezvous, watch)
    try:
        result = agent.run()
    except SignalException as stopped:
        if not plan.is_elastic:  # the other machines of an elastic job continue
            rendezvous.end(_on_this_machine(plan, f"stopped by {stopped.sigval.name}"))
        raise
    if result is None:  # torch returns None on a machine that joined when the job was full
        watch.report(f"[fleetrun] the job has finished with {plan.max_machines} other machines")
    elif result.is_failed():
        rendezvous.end(_on_this_machine(plan, agent.failure))
        return REQUEUE if agent.wants_requeue else 1
    rendezvous.shutdown()
    watch.report(f"[fleetrun] finished; logs in {log_dir}")
    return 0


def _handle_signals() -> None:
    """Stop on the signals that torch handles, also before the ranks run. SIGHUP stays ignored under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in SIGNALS if number != signal.SIGHUP or not is_ignored]
    for number in handled:
        signal.signal(number, _stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in handled)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SignalException("stopped", signal.Signals(number))


def _on_this_machine(plan: RankPlan, what: str) -> str:
    """Return a message for the other machines about what happened on this one."""
    return f"on another machine, {what}" if plan.is_elastic else f"on machine {plan.machine}, {what}"


def _rendezvous(plan: RankPlan, report: Report) -> Rendezvous:
    address = StoreAddress(plan.host, plan.port)
    if plan.machine is None:
        is_here = roles.is_here(str(address), roles.own_addresses())
        return ElasticRendezvous(address, is_here, plan.min_machines, plan.max_machines, report)
    return FixedRendezvous(address, plan.machine, plan.max_machines, report)


def _quiet_torch() -> None:
    """Silence the log messages of torch's launcher: fleetrun reports the same events itself."""
    if "LOGLEVEL" not in os.environ:
        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
