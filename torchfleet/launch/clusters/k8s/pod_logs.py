"""The output of a job's pods on one terminal, each line with the role that wrote it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from torchfleet.base.errors import FleetError
from torchfleet.launch.clusters.k8s.k8s_api import Cluster
from torchfleet.launch.clusters.k8s.pod_states import PodState, pod_states

_PAUSE = 2.0  # seconds between two looks for new pods
_MOST_LINE = 1 << 16  # bytes of a line that are shown


class JobLogs:
    """Copies lines of all pods to `show`, a line at a time. With `follow` a thread reads each pod."""

    def __init__(
        self, cluster: Cluster, labels: Mapping[str, str], show: Callable[[str], None], tail: int | None
    ) -> None:
        self._cluster, self._labels, self._tail = cluster, labels, tail
        self._show, self._lock = show, threading.Lock()
        self._width = 0
        self._seen: dict[str, threading.Thread] = {}

    def once(self) -> int:
        """What there is now, one pod after the other; returns how many pods there are."""
        states = self._states()
        for state in states:
            if state.has_output:
                self._copy(state, follow=False)
        return len(states)

    def follow(self) -> int:
        """Until all pods have ended, those that replace others among them; returns how many roles there were."""
        while True:
            states = self._states()
            for state in states:
                if state.has_output and state.pod not in self._seen:
                    reader = threading.Thread(target=self._copy, args=(state, True), daemon=True)
                    self._seen[state.pod] = reader
                    reader.start()
            if all(state.has_ended for state in states):
                for reader in self._seen.values():
                    reader.join()
                if [state.pod for state in self._states()] == [state.pod for state in states]:
                    return len(states)  # no pod has replaced another meanwhile
                continue
            time.sleep(_PAUSE)

    def _states(self) -> list[PodState]:
        states = pod_states(self._cluster.items("Pod", self._labels))
        self._width = max((len(state.title) for state in states), default=0)
        return states

    def _copy(self, state: PodState, follow: bool) -> None:
        """Lines of one pod. A stream that breaks is said, and ends: the others go on."""
        try:
            stream = self._cluster.log(state.pod, follow, self._tail)
            rest = b""
            for chunk in stream.stream(1 << 14) if stream is not None else ():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._line(state, line)
                if len(rest) > _MOST_LINE:
                    self._line(state, rest)
                    rest = b""
            if rest:
                self._line(state, rest)
        except FleetError as error:
            self._line(state, f"(no more of it: {error})".encode())
        except Exception as error:  # urllib3's, from the middle of a stream
            self._line(state, f"(no more of it: {type(error).__name__}: {error})".encode())

    def _line(self, state: PodState, line: bytes) -> None:
        with self._lock:
            self._show(f"{state.title:{self._width}} | {line.decode(errors='replace')}")
