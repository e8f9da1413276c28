"""The phases of a training step in the training thread."""

from __future__ import annotations

import threading

from torchfleet.base.tracing.span import MAX_TRACE, PHASE, STEP, Span
from torchfleet.base.tracing.span_recorder import Recorder

DATA, FORWARD, LOSS, BACKWARD, UPDATE = "data", "forward", "loss", "backward", "update"
UNSEEN = "data, forward, backward"  # the model was not called as a whole: the script called parts, or a pipeline ran it


class Moment:
    """A time that another thread may record: on GPUs, backward runs in threads of torch."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.time = 0

    def note(self) -> None:
        """Record the current time, unless a time was recorded before."""
        self.time = self.time or self._recorder.now()


class _Own(threading.local):
    """The calling thread's position in its step."""

    step = 0  # steps made by the thread
    began = 0
    phase = ""
    since = 0
    backward: Moment | None = None  # when gradients reached the outputs of the model


class StepSpans:
    """The steps of all training threads of a process. Each thread traces one step in `every`.

    A phase ends where the next begins. The phase `data`, between the end of a step and the call of the model, covers
    reading data and other work of the loop.
    """

    def __init__(self, recorder: Recorder, every: int = 1) -> None:
        self._recorder, self._every = recorder, every
        self._own = _Own()
        self._lock = threading.Lock()
        self._num_traced = 0
        self._tracks: dict[int, str] = {}  # by thread

    @property
    def is_traced(self) -> bool:
        """Whether the calling thread's current step is traced."""
        return self._recorder.trace != 0

    def begin_step(self) -> None:
        """Begin a step of the calling thread."""
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
        """Begin a phase. The previous phase, if any, ends here."""
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
        """The model has returned. The phase `loss` lasts until the returned moment, which any thread may record; then
        `backward` begins.
        """
        self.enter(LOSS)
        self._own.backward = Moment(self._recorder)
        return self._own.backward

    def end_step(self) -> None:
        """End the step and begin the next."""
        if self.is_traced:
            own = self._own
            self.enter("")
            self._note(f"step {own.step}", STEP, own.began, own.since)
        self.begin_step()

    def leave(self) -> None:
        """Stop tracing the calling thread's current step and discard it."""
        self._recorder.begin(0, "")

    def _note(self, name: str, kind: str, start: int, end: int) -> None:
        if name:
            recorder, track = self._recorder, self._tracks[threading.get_ident()]
            recorder.add(Span(name, kind, start, end, track, recorder.trace, recorder.origin))
