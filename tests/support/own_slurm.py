"""A real Slurm on this machine, for as long as tests need it: munged, slurmctld and a slurmd for every node.

Its configuration, keys, sockets and state lie in a temporary folder, its ports are free ones: another Slurm of this
machine is not touched. Needs root, as slurmd does, and Debian's packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.paths import ROOT
from support.scripts.launching import SOON, clean_environment, wait_until

from torchfleet.launch.roles import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
CORES = 16  # that the nodes say they have; more tasks than real cores only take longer
_CONFIGURATION = """
ClusterName=torchfleet
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,requeue_setup_env_fail
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
MinJobAge=300
OverTimeLimit=0
SwitchType=switch/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP OverSubscribe=YES:8
"""


class Slurm:
    """Commands of this Slurm, run in a folder."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder, self.num_nodes = folder, num_nodes
        self.environment = clean_environment(SLURM_CONF=str(folder / "slurm.conf"), PYTHONPATH=str(ROOT))
        self.daemons: list[subprocess.Popen[bytes]] = []

    def run(self, command: Sequence[str], cwd: Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
        """The command's output, with what it wrote to stderr."""
        return subprocess.run(
            list(command), cwd=cwd, env=self.environment, timeout=timeout, text=True, errors="replace", check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def popen(self, command: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
        """The command, whose output goes to the file `output` of the folder."""
        with open(cwd / "output", "w") as output:
            return subprocess.Popen(
                list(command), cwd=cwd, env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def job(self, number: int | str) -> dict[str, str]:
        """What scontrol says of a job, by field."""
        told = self.run(["scontrol", "show", "job", "-o", str(number)], self._folder).stdout
        return dict(field.partition("=")[::2] for field in told.split())

    def log_of(self, name: str) -> str:
        """The end of a daemon's log."""
        path = self._folder / name
        return path.read_text(errors="replace")[-4000:] if path.exists() else f"no {name}"

    def start(self) -> None:
        _prepare(self._folder, self.num_nodes)
        self._daemon("munged", "--foreground", f"--socket={self._folder}/munge.socket",
                     f"--key-file={self._folder}/munge.key", f"--pid-file={self._folder}/munge.pid",
                     f"--log-file={self._folder}/munge.log", f"--seed-file={self._folder}/munge.seed")  # fmt: skip
        _wait((self._folder / "munge.socket").exists, "munge.log", self)
        self._daemon("slurmctld", "-D", "-i")
        for number in range(self.num_nodes):
            self._daemon("slurmd", "-D", *(("-N", f"n{number}") if self.num_nodes > 1 else ()))
        _wait(self._is_idle, "slurmctld.log", self)

    def stop(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired, AssertionError):
            self.run(["scancel", "--signal=KILL", "--full", "--me"], self._folder, timeout=10)
            self.run(["scancel", "--me"], self._folder, timeout=10)
            wait_until(lambda: not self.run(["squeue", "-h"], self._folder).stdout, SOON, "empty queue")
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in self._left():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _left(self) -> list[psutil.Process]:
        """Whatever a daemon has started and not ended, known by the configuration that it was told."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environment["SLURM_CONF"]:
                    found.append(process)
        return found

    def _daemon(self, *command: str) -> None:
        self.daemons.append(
            subprocess.Popen(
                command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        )  # fmt: skip

    def _is_idle(self) -> bool:
        told = self.run(["sinfo", "-h", "-o", "%T %D"], self._folder).stdout.split()
        return told == ["idle", str(self.num_nodes)]


@contextlib.contextmanager
def started_slurm(num_nodes: int = 1) -> Iterator[Slurm]:
    """A cluster with this number of nodes. Where Slurm cannot run, the test is skipped with the reason."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        pytest.skip("needs Slurm (apt-get install slurm-wlm munge)")
    if os.getuid() != 0:
        pytest.skip("needs root")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    slurm = Slurm(folder, num_nodes)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(folder: Path, num_nodes: int) -> None:
    folder.chmod(0o711)  # munged asks for a way to its socket for all users
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    controller, *ports = free_ports(1 + num_nodes)
    host = socket.gethostname()
    each = f"CPUs={CORES} RealMemory=8000 State=UNKNOWN"
    if num_nodes == 1:
        nodes = f"NodeName={host} NodeAddr=127.0.0.1 Port={ports[0]} {each}"
    else:
        nodes = "\n".join(
            f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} {each}"
            for number, port in enumerate(ports)
        )
    text = _CONFIGURATION.format(host=host, controller=controller, folder=folder, nodes=nodes)
    (folder / "slurm.conf").write_text(text)
    (folder / "state").mkdir()


def _wait(is_there: Callable[[], bool], log: str, slurm: Slurm) -> None:
    deadline = time.monotonic() + 60
    while not is_there():
        ended = [daemon.args for daemon in slurm.daemons if daemon.poll() is not None]
        if ended or time.monotonic() > deadline:
            raise AssertionError(f"Slurm did not start; ended: {ended}. The end of {log}:\n{slurm.log_of(log)}")
        time.sleep(0.2)


if __name__ == "__main__":  # python -m support.own_slurm [NODES]: a shell with a Slurm, to try something out
    with started_slurm(int(sys.argv[1]) if len(sys.argv) > 1 else 1) as own:
        subprocess.run([os.environ.get("SHELL", "bash")], env=own.environment, check=False)
