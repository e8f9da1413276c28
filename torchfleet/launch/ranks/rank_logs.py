"""The logs of the ranks of one machine, and the ranks' environment, which torch's agent passes through RankLogs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from torchfleet.base.monitor.json_lines import JsonPipe
from torchfleet.base.monitor.log_file import DEFAULT_BYTES, LogFile
from torchfleet.base.monitor.notices import tell
from torchfleet.launch.ranks.rank_memory import RankMemory
from torchfleet.launch.ranks.rendezvous import Rendezvous
from torchfleet.observe.watch.metrics_ports import port_variables
from torchfleet.observe.watch.watchers import Watching


class RankLogs(LogsSpecs):
    """Both streams of rank N go to workerlog.N. torch's agent passes the environment of the ranks through `reify`."""

    def __init__(
        self,
        log_dir: Path,
        environment: Mapping[str, str],
        rendezvous: Rendezvous,
        watching: Watching,
        memory: RankMemory | None = None,
    ) -> None:
        """`memory`: for copies of the ranks' state, if ranks are started again."""
        super().__init__(str(log_dir))
        self._log_dir, self.environment, self._rendezvous = log_dir, environment, rendezvous
        self._watching, self._memory, self._pipes = watching, memory, dict[str, JsonPipe]()
        self.begins: dict[Path, int] = {}  # by log: the offset where the output of the latest start begins

    @property
    def root_log_dir(self) -> str:
        return str(self._log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        self.finish()
        for env in envs.values():
            log = log_of(self._log_dir, env["RANK"])
            if log not in self.begins:
                log.write_bytes(b"")
            self.begins[log] = log.stat().st_size
            status_file_of(self._log_dir, env["RANK"]).unlink(missing_ok=True)
            env.update(
                self.environment,
                **port_variables(self._watching, int(env["LOCAL_RANK"])),
                **(self._memory.variables(int(env["LOCAL_RANK"])) if self._memory is not None else {}),
                FLEET_LOG_FILE=str(self._output(log, env["RANK"])),
                FLEET_STATUS_FILE=str(status_file_of(self._log_dir, env["RANK"])),
                TORCHELASTIC_RESTART_COUNT=str(self._rendezvous.num_starts),  # equal on all machines
                TORCHELASTIC_ERROR_FILE="",
            )
        nowhere = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=nowhere, stderrs=nowhere, error_files=nowhere)

    def _output(self, log: Path, rank: str) -> Path:
        """Return the file that a rank writes to: its log, or a pipe whose lines are converted to JSON."""
        if not self._watching.is_json:
            return log
        pipe = self._log_dir / f".output.rank.{rank}"
        self._pipes[rank] = JsonPipe(pipe, LogFile(log, True, DEFAULT_BYTES, tell), "rank", int(rank))
        return pipe

    def renew(self, rank: str) -> None:
        """Call after one rank has ended, before it is started again: its output goes on in the same log."""
        status_file_of(self._log_dir, rank).unlink(missing_ok=True)
        if rank in self._pipes:
            self._pipes.pop(rank).close()
            self._output(log_of(self._log_dir, rank), rank)

    def finish(self) -> None:
        """Call after the ranks have ended. Blocks until all of their output is in the logs."""
        while self._pipes:
            self._pipes.popitem()[1].close()


def log_of(log_dir: Path, rank: int | str) -> Path:
    return log_dir / f"workerlog.{rank}"


def status_file_of(log_dir: Path, rank: int | str) -> Path:
    return log_dir / f".status.rank.{rank}"
