"""The phases of a training step, as the thread that trains goes through them."""

from __future__ import annotations

import threading

from torchfleet.base.tracing.span import MAX_TRACE, PHASE, STEP, Span
from torchfleet.base.tracing.span_recorder import Recorder

DATA, FORWARD, LOSS, BACKWARD, UPDATE = "data", "forward", "loss", "backward", "update"
UNSEEN = "data, forward, backward"  # the model was not called as a whole: parts of it were, or a pipeline ran it


class Moment:
    """A time that another thread may note: on GPUs backward runs in threads of torch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.time = 0

    def note(self) -> None:
        """Now, unless it was noted before."""
        self.time = self.time or self._recorder.now()


class _Own(threading.local):
    """Where the calling thread is in its step."""

    step = 0  # steps that it has made
    began = 0
    phase = ""
    since = 0
    backward: Moment | None = None  # when gradients reached the outputs of the model


class StepSpans:
    """Steps of all training threads of a process: one of `every` is traced, by each thread.

    A phase ends where the next begins. Between the end of a step and the call of the model is `data`: reading, and what
    the loop does otherwise.
    """

    def __init__(self, recorder: Recorder, every: int = 1) -> None:
        self._recorder, self._every = recorder, every
        self._own = _Own()
        self._lock = threading.Lock()
        self._num_traced = 0
        self._tracks: dict[int, str] = {}  # by thread

    @property
    def is_traced(self) -> bool:
        """Whether the step that the calling thread is at is traced."""
        return self._recorder.trace != 0

    def begin_step(self) -> None:
        """A step of the calling thread begins."""
        own = self._own
        own.step += 1
        if own.step % self._every:
            self._recorder.begin(0, "")
            return
        with self._lock:
            self._num_traced += 1
            number = (self._num_traced - 1) % MAX_TRACE + 1
            name = "steps" if not self._tracks else f"steps of thread {len(self._tracks) + 1}"
            track = self._tracks.setdefault(threading.get_ident(), name)
        own.began = own.since = self._recorder.now()
        own.phase = DATA
        self._recorder.begin(number, track)

    def enter(self, phase: str) -> None:
        """The phase before ends here, if there was one."""
        if not self.is_traced:
            return
        own, now = self._own, self._recorder.now()
        if own.phase == DATA and phase == UPDATE:
            own.phase = UNSEEN
        if own.phase == LOSS and own.backward is not None and own.backward.time:
            self._note(LOSS, PHASE, own.since, own.backward.time)
            own.phase, own.since = BACKWARD, own.backward.time
        self._note(own.phase, PHASE, own.since, now)
        own.phase, own.since = phase, now

    def enter_loss(self) -> Moment:
        """The model has returned. What comes is `loss` up to the returned moment, which any thread may note, and
        `backward` from then on."""
        self.enter(LOSS)
        self._own.backward = Moment(self._recorder)
        return self._own.backward

    def end_step(self) -> None:
        """The step ends, and the next begins."""
        if self.is_traced:
            own = self._own
            self.enter("")
            self._note(f"step {own.step}", STEP, own.began, own.since)
        self.begin_step()

    def leave(self) -> None:
        """The calling thread's step is not traced any longer, and is none."""
        self._recorder.begin(0, "")

    def _note(self, name: str, kind: str, start: int, end: int) -> None:
        if name:
            recorder, track = self._recorder, self._tracks[threading.get_ident()]
            recorder.add(Span(name, kind, start, end, track, recorder.trace, recorder.origin))
