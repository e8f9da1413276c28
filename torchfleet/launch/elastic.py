"""The run of a collective job on one machine: torch's agent, and what fleetrun says and does when it is over."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError

from torchfleet.launch import roles
from torchfleet.launch.agent import SIGNALS, Agent, RankLogs
from torchfleet.launch.display import Display
from torchfleet.launch.rank_plan import Plan
from torchfleet.launch.rendezvous import ElasticMeeting, FixedMeeting, Meeting
from torchfleet.launch.stores import Place, Say

# A role that the launcher itself stands in is not its ranks' role.
_ROLES = ("PADDLE_", "FLEET_ROLE", "FLEET_RESTART", "FLEET_NUM_", "FLEET_SERVER_", "FLEET_WORKER_", "FLEET_STATUS_")
_ROLE_NAMES = (
    "TRAINING_ROLE", "FLAGS_selected_gpus", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


def run(plan: Plan, command: Sequence[str], log_dir: Path) -> int:
    """Until the job is over; the exit status. Nothing is left running."""
    _handle_signals()
    _quiet_torch()
    for name in [name for name in os.environ if name in _ROLE_NAMES or name.startswith(_ROLES)]:
        del os.environ[name]
    display = Display()
    try:
        return _run(plan, command, log_dir, display)
    except RendezvousError as error:
        display.say(f"[fleetrun] the job ends: {error}")
        return 1
    except SignalException as stopped:
        display.say(f"[fleetrun] {stopped.sigval.name}: ended all ranks; logs in {log_dir}")
        return 128 + int(stopped.sigval)
    finally:
        display.close()


def _run(plan: Plan, command: Sequence[str], log_dir: Path, display: Display) -> int:
    meeting = _meet(plan, display.say)
    logs = RankLogs(log_dir, plan.environment, meeting)
    agent = Agent(command, plan.num_ranks, plan.max_restart, logs, meeting, display)
    try:
        result = agent.run()
    except SignalException as stopped:
        if not plan.is_elastic:  # the other machines of an elastic job go on
            meeting.end(_told_by(plan, f"stopped by {stopped.sigval.name}"))
        raise
    if result is None:  # torch's word for a machine that came when there were enough
        display.say(f"[fleetrun] the job has finished with {plan.most} other machines")
    elif result.is_failed():
        meeting.end(_told_by(plan, agent.failure))
        return 1
    meeting.shutdown()
    display.say(f"[fleetrun] finished; logs in {log_dir}")
    return 0


def _handle_signals() -> None:
    """As torch does once ranks are running; here already while machines meet. nohup's wish is heard."""
    wanted = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    for number in wanted:
        signal.signal(number, _stop)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(number.name for number in wanted)


def _stop(number: int, frame: FrameType | None) -> None:
    raise SignalException("stopped", signal.Signals(number))


def _told_by(plan: Plan, what: str) -> str:
    return f"on another machine, {what}" if plan.is_elastic else f"on machine {plan.machine}, {what}"


def _meet(plan: Plan, say: Say) -> Meeting:
    place = Place(plan.host, plan.port)
    if plan.machine is None:
        return ElasticMeeting(place, roles.is_here(f"{place}", roles.own_addresses()), plan.least, plan.most, say)
    return FixedMeeting(place, plan.machine, plan.most, say)


def _quiet_torch() -> None:
    """What torch's launcher reports of its own accord, fleetrun says in its own words."""
    if "LOGLEVEL" not in os.environ:
        for name in logging.root.manager.loggerDict:
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
