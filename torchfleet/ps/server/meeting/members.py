"""The members of a job: which workers are expected, present, gone after their work, or lost."""

from __future__ import annotations

from typing import Any

from torchfleet.base.errors import CountedOut
from torchfleet.base.role.role_info import GO_ON, LOSS_END, LOSS_WAIT


class Members:
    """The workers of a job by number. Presence keeps their signs of life; this class keeps the conclusions.

    A job has a fixed number of workers, and waits for all of them until they leave. An elastic job waits only for the
    workers that are present. `absent` has the numbers that no meeting and no step waits for.
    """

    def __init__(self, num_workers: int = 0, min_workers: int = 0, on_loss: str = LOSS_END) -> None:
        """`min_workers`: above 0 the job is elastic; it begins with this many workers, and at most `num_workers` join.
        `on_loss`: what the loss of a worker means to the workers that wait for it."""
        self.min_workers, self.on_loss = min_workers, on_loss
        self.go_on = on_loss == GO_ON  # the others go on without a lost worker
        self.wait = on_loss == LOSS_WAIT  # the others wait for a lost worker until the step or meeting times out
        self.absent: set[int] = set(range(num_workers)) if min_workers else set()
        self.left: dict[int, int] = {}  # incarnations of the workers that have left
        self.finished: set[int] = set()  # workers that make no more steps, and have not left yet
        self.lost: dict[int, str] = {}  # lost workers that the others go on without, and why
        self._out: dict[int, tuple[int, int]] = {}  # workers that missed a step: incarnation, step
        self._processes: dict[int, int] = {}  # by worker: the number of its processes that have joined so far

    @property
    def is_elastic(self) -> bool:
        return self.min_workers > 0

    @property
    def num_joined(self) -> int:
        """The number of workers that have ever joined."""
        return len(self._processes)

    def num_present(self, num_workers: int) -> int:
        """The number of workers, out of `num_workers`, that the job waits for."""
        return num_workers - sum(worker < num_workers for worker in self.absent)

    def num_restarts(self, worker: int) -> int:
        """The number of earlier processes of this worker."""
        return max(0, self._processes.get(worker, 0) - 1)

    def expected(self, num_workers: int) -> set[int]:
        """The workers that a step waits for."""
        return set(range(num_workers)) - self.absent

    def begin(self, worker: int, is_new: bool) -> None:
        """A process has joined. `is_new`: it differs from the worker's previous process."""
        self._processes[worker] = self._processes.get(worker, 0) + is_new
        self._out.pop(worker, None)
        self.come(worker)

    def come(self, worker: int) -> bool:
        """The worker is present. Returns whether the others had gone on without it."""
        self.absent.discard(worker)
        self.finished.discard(worker)
        self.left.pop(worker, None)
        return self.lost.pop(worker, None) is not None

    def leave(self, worker: int, incarnation: int = 0) -> None:
        """The worker has finished its work."""
        self.left[worker] = incarnation
        self.absent.add(worker)
        self.finished.discard(worker)
        self.lost.pop(worker, None)

    def finish(self, worker: int) -> bool:
        """The worker has made its last step, and stays. Returns whether this is news."""
        is_news = worker not in self.finished
        self.finished.add(worker)
        self.absent.add(worker)
        return is_news

    def lose(self, worker: int, why: str) -> None:
        """The others go on without the worker."""
        self.lost[worker] = why
        self.absent.add(worker)

    def count_out(self, worker: int, incarnation: int, step: int) -> None:
        """A step was made without the worker. This process may not take part in later steps."""
        self._out.setdefault(worker, (incarnation, step))

    def has_left(self, worker: int, incarnation: int) -> bool:
        """Whether this process has left. A later request of it is a late copy."""
        return bool(incarnation) and self.left.get(worker) == incarnation

    def is_out(self, worker: int, incarnation: int) -> bool:
        """Whether the others have made a step without this process."""
        return worker in self._out and self._out[worker][0] == incarnation

    def check(self, worker: int, incarnation: int) -> None:
        """Raise CountedOut if the others have made a step without this process."""
        if self.is_out(worker, incarnation):
            raise CountedOut(
                f"worker {worker} was counted out at step {self._out[worker][1]}: nothing was heard of it for longer "
                "than FLEET_WORKER_TIMEOUT, and the others went on without it (on_worker_loss=go_on). What this "
                "process still sends is not taken: end it, and start the worker again."
            )

    def is_over(self, num_workers: int) -> bool:
        """Whether all workers have left. A lost worker does not count: it may be started again. An elastic job is not
        over before it has begun: workers may come and leave earlier than worker 0 joins."""
        is_any_here = bool(self.lost or self.finished)
        has_begun = not self.is_elastic or (0 in self._processes and self.num_joined >= self.min_workers)
        return has_begun and bool(num_workers and self.left) and not is_any_here and self.num_present(num_workers) <= 0

    def describe(self, num_workers: int) -> dict[str, object]:
        """For statistics."""
        counts = {"joined": self.num_joined, "left": len(self.left), "lost": dict(sorted(self.lost.items()))}
        most = {"most": num_workers, "least": self.min_workers or num_workers, "on_worker_loss": self.on_loss}
        expected = sorted(self.expected(num_workers))
        return {"present": max(0, self.num_present(num_workers)), "expected": expected, **counts, **most}

    def export(self) -> dict[str, Any]:
        """The state as plain values."""
        return {
            "absent": sorted(self.absent), "left": self.left, "lost": self.lost, "out": self._out,
            "processes": self._processes, "finished": sorted(self.finished),
        }  # fmt: skip

    def restore(self, kept: dict[str, Any]) -> None:
        """Restore the state from the result of `export`."""
        self.absent, self.left, self.lost = set(kept["absent"]), dict(kept["left"]), dict(kept["lost"])
        self._out = {worker: (process, step) for worker, (process, step) in kept["out"].items()}
        self._processes, self.finished = dict(kept["processes"]), set(kept.get("finished", ()))
