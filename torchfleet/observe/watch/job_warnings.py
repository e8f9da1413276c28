"""Warnings about a running job: a straggler, a full queue, a stale network, repeated requests, silence, a server
without its backup, little memory or disk."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from torchfleet.base import cgroups
from torchfleet.base.monitor.freshness import OLD_NETWORK, Ages, summed
from torchfleet.base.monitor.freshness import median as median_age
from torchfleet.base.monitor.snapshot import JobSnapshot, RoleSnapshot
from torchfleet.base.role.role_info import HETER_WORKER
from torchfleet.observe.watch import figures
from torchfleet.observe.watch.job_totals import is_training
from torchfleet.observe.watch.missing_backups import MissingBackups

_WINDOW = 10.0  # seconds for which a condition must hold before it is a warning
_HOLD = 10.0  # seconds without the condition before the warning ends
_SLOW = 0.5  # of the others' rate
_FULL = 0.9  # of a queue, on average
_WAITS = 0.5  # share of time waited from which a full queue is a warning; healthy jobs wait for a quarter
# Seconds. A worker does not report while it evaluates, a heter worker while it computes.
_SILENT = {"server": 15.0, HETER_WORKER: 60.0, "worker": 60.0, "rank": 60.0}
_MAY = {"worker": ": evaluating, saving, or stuck", "rank": ": evaluating, saving, or stuck"}  # what silence may be
_SERVING = ("server", HETER_WORKER)
_MACHINE = 5.0  # seconds between two checks of memory and disk
_LITTLE_MEMORY = 0.05  # of all
_LITTLE_DISK = 200_000_000  # bytes
_MANY_PUSHES = 200  # with fewer pushes in the window, staleness is not significant

_BACKUP = "backup "  # begins the identities of warnings about servers without a backup

Found = tuple[str, str]  # (identity of a warning, its text)


class JobWarnings:
    """Checks one snapshot after another. Times are those of the snapshots."""

    def __init__(self, log_dir: Path | None = None) -> None:
        self._log_dir = log_dir
        self._looks: dict[str, deque[tuple[float, RoleSnapshot]]] = {}  # the snapshots of the last window, by key
        self._changed: dict[str, tuple[float, object]] = {}  # when a status last changed, and to what
        self._ages: deque[tuple[float, Ages]] = deque()
        self._machine: tuple[float, list[Found]] = (0.0, [])
        self.backups = MissingBackups()
        self._active: dict[str, tuple[float, str]] = {}  # (when the condition last held, text)
        self.new: list[str] = []  # texts that were not active in the previous snapshot

    def look(self, snapshot: JobSnapshot) -> list[str]:
        """Return the active warnings, including those that held a moment ago."""
        now = snapshot.time
        self._note(snapshot)
        before = set(self._active)
        for key, text in self._found(snapshot):
            self._active[key] = now, text
        self._active = {key: kept for key, kept in self._active.items() if now - kept[0] <= _held(key)}
        self.new = [text for key, (_, text) in self._active.items() if key not in before]
        return [text for _, text in self._active.values()]

    def _note(self, snapshot: JobSnapshot) -> None:
        for role in snapshot.roles:
            looks = self._looks.setdefault(role.key, deque())
            looks.append((snapshot.time, role))
            while snapshot.time - looks[0][0] > _WINDOW:
                looks.popleft()
            said = role.state, role.num_restarts, _report(role)
            if role.key not in self._changed or self._changed[role.key][1] != said:
                self._changed[role.key] = snapshot.time, said

    def _found(self, snapshot: JobSnapshot) -> Iterator[Found]:
        workers = [role for role in snapshot.training if is_training(role)]
        yield from self._stragglers(workers, snapshot.time)
        for worker in workers:
            yield from self._queue(worker, snapshot.time)
            yield from self._retries(worker)
        yield from self._old_network(snapshot)
        yield from self._silence(snapshot)
        for server, seconds in self.backups.look(snapshot).items():
            yield (
                f"{_BACKUP}{server}",
                f"server {server} without a backup for {figures.duration(seconds)}: if it is lost, so are its rows",
            )
        if snapshot.time - self._machine[0] >= _MACHINE:
            self._machine = snapshot.time, list(self._short_of())
        yield from self._machine[1]

    def _window(self, role: RoleSnapshot, now: float) -> list[RoleSnapshot]:
        """Return the snapshots of a process over a full window of training; empty if the window is not full yet."""
        looks = self._looks[role.key]
        is_whole = now - looks[0][0] >= 0.8 * _WINDOW and len(looks) > 2
        training = [found for _, found in looks if is_training(found) and found.status.get("steps")]
        return training if is_whole and len(training) == len(looks) else []

    def _stragglers(self, workers: list[RoleSnapshot], now: float) -> Iterator[Found]:
        means = {}
        for worker in workers:
            if looks := self._window(worker, now):
                means[worker.key] = sum(look.status.get("samples_per_s", 0.0) for look in looks) / len(looks)
        for worker in workers if len(means) == len(workers) > 1 else []:
            others = median(rate for key, rate in means.items() if key != worker.key)
            if not worker.status.get("samples_per_s"):
                continue  # no progress: it evaluates or saves, or the silence check reports it
            if others > 0 and means[worker.key] < _SLOW * others:
                told = f"{figures.rate(means[worker.key])} samples/s, {figures.share(means[worker.key] / others)} of"
                yield (
                    f"slow {worker.key}",
                    f"{worker.name} is slow: {told} what the others make ({figures.rate(others)})",
                )

    def _queue(self, worker: RoleSnapshot, now: float) -> Iterator[Found]:
        status, looks = worker.status, self._window(worker, now)
        if not looks or "queue_size" not in status:
            return
        filled = sum(look.status.get("queue", 0) for look in looks) / len(looks) / max(1, status["queue_size"])
        waits = sum(look.status.get("waiting", 0.0) for look in looks) / len(looks)
        if filled >= _FULL and waits >= _WAITS:
            told = (
                f"({status['queue']} of {status['queue_size']}), and training waits {figures.share(waits)} of the time"
            )
            cure = "start more servers (--server_num), or use larger batches"
            yield f"queue {worker.key}", f"the queue of {worker.name} is full {told}: {cure}"

    def _retries(self, worker: RoleSnapshot) -> Iterator[Found]:
        first = self._looks[worker.key][0][1]
        num = worker.status.get("retries", 0) - first.status.get("retries", worker.status.get("retries", 0))
        if num > 0 and first.status.get("steps"):  # servers may not have started before its first step
            yield (
                f"retries {worker.key}",
                f"{worker.name} sent {figures.plural(num, 'request')} again in the last {_WINDOW:.0f} s: answers come "
                "late, or not at all",
            )

    def _old_network(self, snapshot: JobSnapshot) -> Iterator[Found]:
        """Check the staleness of the network over the pushes of the last window, not of the whole job."""
        total = summed(role.status.get("staleness_dense", {}) for role in snapshot.of("server"))
        self._ages.append((snapshot.time, total))
        while snapshot.time - self._ages[0][0] > _WINDOW:
            self._ages.popleft()
        before = self._ages[0][1]
        recent = {age: num - before.get(age, 0) for age, num in total.items() if num > before.get(age, 0)}
        age = median_age(recent)
        if age is not None and age >= OLD_NETWORK and sum(recent.values()) >= _MANY_PUSHES:
            yield "old", f"the network is old: half of the gradients come from one of {age} updates ago or more"

    def _silence(self, snapshot: JobSnapshot) -> Iterator[Found]:
        # Processes that serve end, and report no more, when all workers of the job have left.
        is_over = bool(snapshot.training) and not any(
            role.state in ("starting", "waiting") or is_training(role) for role in snapshot.training
        )
        for kind, most in _SILENT.items():
            if is_over and kind in _SERVING:
                continue
            quiet = {
                role.index: snapshot.time - self._changed[role.key][0]
                for role in snapshot.of(kind)
                if role.state == "running" and role.status.get("pid") and not role.status.get("left")
            }
            silent = {index: seconds for index, seconds in quiet.items() if seconds >= most}
            if silent:
                who = f"{kind}{'s' * (len(silent) > 1)} {figures.ranges(list(silent))}"
                told = f"no report for {figures.duration(min(silent.values()))}{_MAY.get(kind, '')}"
                yield f"silent {kind}", f"{who}: {told}"

    def _short_of(self) -> Iterator[Found]:
        left, limit = cgroups.memory_left(), cgroups.memory_limit()
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        total = machine if limit is None else min(limit, machine)
        if left is not None and left < _LITTLE_MEMORY * total:
            yield "memory", f"memory is short: {figures.size(max(0, left))} of {figures.size(total)} are left here"
        if self._log_dir is not None:
            try:
                free = shutil.disk_usage(self._log_dir).free
            except OSError:
                return
            if free < _LITTLE_DISK:
                yield "disk", f"the disk of {self._log_dir} is full: {figures.size(free)} are left"


def _held(key: str) -> float:
    """Return for how long a warning is shown after its condition has ended. Those with a running time end at once."""
    return 0.0 if key.startswith(_BACKUP) else _HOLD


def _report(role: RoleSnapshot) -> object:
    """Return a value that changes while the process reports. A worker's rates are cleared when it does not."""
    status = role.status
    return status if role.role in _SERVING else [status.get(name) for name in ("pid", "steps", "samples", "metrics")]
