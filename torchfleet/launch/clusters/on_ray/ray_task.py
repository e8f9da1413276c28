"""A task in a Ray actor, as the supervisor sees it. A thread polls the actor."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torchfleet.base.monitor.log_file import last_bytes
from torchfleet.launch.clusters.on_ray.ray_node import Look, Work
from torchfleet.launch.job_spec import Report, Task
from torchfleet.launch.processes import Output

LOST = -9  # exit status of a process whose node is lost: the same as if it was killed
_LOOK = 0.5  # seconds that an actor waits for output before it answers
_PATIENCE = 5.0  # seconds without an answer after which the process counts as lost
_PAUSE = 0.2  # seconds between two calls of an actor that does not answer


class NodeHandle(Protocol):
    """A Ray actor with blocking calls. They raise NodeLost if the actor does not answer for any reason."""

    def place(self) -> str: ...

    def start(self, work: Work) -> int: ...

    def look(self, timeout: float) -> Look: ...

    def signal(self, number: int) -> None:
        """Send a signal. Does not block."""

    def kill(self) -> None: ...

    def result(self) -> bytes: ...

    def end(self) -> None:
        """End the actor and its process, and remove its keys. This may complete shortly after the call returns."""


class NodeLost(Exception):
    """An actor does not answer: it has ended, its node is lost, or the network to it is down."""


Moved = Callable[[Task, str], dict[str, str]]  # (task, its new address) → current addresses of all servers that moved


class RayTask:
    """Implements RunningTask. The log is on the driver's machine.

    `needed`: for an elastic worker, returns whether the job still needs it. An elastic worker counts as finished while
    Ray has no resources for it. When its node is lost, `gone` is called, and it counts as finished again.
    """

    def __init__(
        self,
        work: Work,
        node: NodeHandle,
        log_dir: Path,
        output: Output,
        report: Report,
        moved: Moved,
        needed: Callable[[], bool] | None = None,
        gone: Callable[[Task], None] = lambda task: None,
    ) -> None:
        self._needed, self._gone = needed, gone
        self.task, self.log, self.num_restarts = work.task, log_dir / work.task.log_name, 0
        self._work, self._node, self._output, self._report, self._moved = work, node, output, report, moved
        self._status: dict[str, Any] = {}
        self.result = b""  # the pickled result of the function, once the task has ended
        self._returncode: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._returncode, self._status = (None if self._needed is None else 0), {}
        self.is_waiting = self._needed is not None  # for resources
        self._is_over = threading.Event()  # set when this start is over
        self._thread = threading.Thread(target=self._run, args=(self._is_over, self.num_restarts), daemon=True)
        self._thread.start()

    @property
    def returncode(self) -> int | None:
        return self._returncode

    def status(self) -> dict[str, Any]:
        return self._status

    def last_lines(self, num: int = 20) -> list[str]:
        return last_bytes(self.log, 16384).decode(errors="replace").splitlines()[-num:]

    def signal(self, number: int) -> None:
        self._node.signal(number)

    def restart(self) -> None:
        """Start the task again on the current node of the actor: another node if its own was lost."""
        self._end_thread()
        self.num_restarts += 1
        self._begin()

    def kill(self) -> None:
        with contextlib.suppress(NodeLost):
            self._node.kill()
        self._end_thread()
        self._returncode = LOST if self._returncode is None else self._returncode

    def close(self) -> None:
        self._end_thread()
        self._node.end()
        self._output.close()

    def _end_thread(self) -> None:
        self._is_over.set()
        self._thread.join(timeout=2 * _LOOK)

    def _run(self, is_over: threading.Event, restart: int) -> None:
        """Run one start of the task to its end."""
        try:
            while not self._is_gone(is_over, restart):
                pass
        except NodeLost as error:
            self._report(f"[fleetrun] {self.task.name}: {error}")
            self._returncode = LOST
        except Exception as error:  # the actor refused the work: every other node would refuse it too
            self._report(f"[fleetrun] {self.task.name} cannot be started: {error}")
            self._returncode = 1

    def _is_gone(self, is_over: threading.Event, restart: int) -> bool:
        """Start the task and watch it. Returns False if it is an elastic worker that lost its node and waits again."""
        try:
            if self._needed is not None:
                place = self._again(self._node.place, is_over)
                self.is_waiting = self._needed()
                if not self.is_waiting:
                    return True
                self._report(f"[fleetrun] {self.task.name} joins on {place}")
                self._returncode, self.is_waiting = None, False
            self._watch(is_over, self._start(is_over, restart))
        except NodeLost:
            if self._needed is None or is_over.is_set():
                raise
            self._report(f"[fleetrun] {self.task.name} is gone with its node; the others go on")
            self._gone(self.task)
            self._returncode, self._status, self.is_waiting = 0, {}, self._needed()
            return not self.is_waiting
        return True

    def _start(self, is_over: threading.Event, restart: int) -> int:
        work = self._work
        if restart:
            environment = {**work.task.environment, "FLEET_RESTART": str(restart)}
            place = self._again(self._node.place, is_over)
            task = dataclasses.replace(work.task, environment=environment)
            work = dataclasses.replace(work, task=task, moved=self._moved(work.task, place))
        number: int = self._again(lambda: self._node.start(work), is_over)
        return number

    def _again(self, call: Callable[[], Any], is_over: threading.Event) -> Any:
        """Repeat a call until the actor answers: Ray may still have to start it."""
        begun, told = time.monotonic(), ""
        while True:
            try:
                return call()
            except NodeLost as error:
                if is_over.is_set():
                    raise
                if self._needed is None and time.monotonic() > begun + _PATIENCE and str(error) != told:
                    self._report(f"[fleetrun] {self.task.name} waits for a node of the cluster: {error}")
                    told = str(error)
            is_over.wait(_PAUSE)

    def _watch(self, is_over: threading.Event, number: int) -> None:
        heard = time.monotonic()
        while not is_over.is_set():
            try:
                look = self._node.look(_LOOK)
            except NodeLost:
                if time.monotonic() - heard > _PATIENCE:
                    raise
                is_over.wait(_PAUSE)
                continue
            heard = time.monotonic()
            if look.start != number:
                raise NodeLost("its node was lost, and Ray has started another actor in its place")
            if look.output:
                self._output.write(look.output)
            self._status = look.status or self._status
            if self._needed is not None and not look.status.get("steps") and not self._needed():
                self._node.kill()  # it started after the job was done
                self._returncode = 0
                return
            if look.returncode is not None:
                self.result = self._node.result() if self._work.function else b""
                self._returncode = look.returncode
                return
