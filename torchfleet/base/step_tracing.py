"""Tracing and profiling of a worker or rank. Called after every step; without a trace, it only reads a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.notices import tell
from torchfleet.base.step_hooks import StepHooks
from torchfleet.base.tracing import span_recorder as tracing
from torchfleet.base.tracing.otlp import OtlpExport
from torchfleet.base.tracing.process_part import ProcessName
from torchfleet.base.tracing.profile_folder import LOOK, Begin, ProfileFolder, ProfileRequest, read
from torchfleet.base.tracing.span_recorder import Recorder
from torchfleet.base.tracing.step_spans import StepSpans

_BEGIN_LOOK = 0.02  # seconds between two checks for the request to begin


class _Tracer:
    """Records the steps of a model from now on into one recorder.

    The model and its optimizers have hooks only while a thread is in a traced step: hooks make an optimizer step slower
    than all of the recording.
    """

    def __init__(
        self,
        recorder: Recorder,
        every: int,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.recorder = recorder
        self._spans = StepSpans(recorder, every)
        self._followed = model, optimizers
        self._hooks: StepHooks | None = None
        self._lock, self._traced = threading.Lock(), set[int]()  # threads in a traced step
        self._before = tracing.use(recorder)
        self.begin_step()

    def begin_step(self) -> None:
        self._spans.begin_step()
        self._note()

    def end_step(self) -> None:
        """The calling thread's step ends, and its next step begins."""
        self._spans.end_step()
        self._note()

    def leave(self) -> None:
        """The calling thread now makes steps that are not traced here."""
        self._spans.leave()
        self._note()

    def remove(self) -> None:
        self._spans.leave()
        self._remove_hooks()
        tracing.use(self._before)

    def _note(self) -> None:
        thread, is_traced = threading.get_ident(), self._spans.is_traced
        if is_traced == (thread in self._traced):
            return
        with self._lock:
            if is_traced:
                self._traced.add(thread)
            else:
                self._traced.discard(thread)
            if self._traced and self._hooks is None:
                self._hooks = StepHooks(self._spans, *self._followed)
            elif not self._traced:
                self._remove_hooks()

    def _remove_hooks(self) -> None:
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None


class _Profile:
    """One requested profile. Its stages: waiting, ready, recording, written."""

    def __init__(self, name: ProcessName, request: ProfileRequest, folder: Path) -> None:
        self.name, self.request, self.folder = name, request, folder
        self.num_steps = 0  # since the request; once recording, the recorded steps
        self.tracer: _Tracer | None = None
        self.is_ready = self.is_over = False
        self._next = 0.0
        self.torch: torch.profiler.profile | None = None
        name.say_here(folder)

    def get_ready(self) -> None:
        if self.request.with_torch:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            self.torch = torch.profiler.profile(activities=kinds)
            self.torch.prepare_trace()  # takes seconds the first time
        self.name.say_ready(self.folder)
        self.is_ready = True

    def may_begin(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + _BEGIN_LOOK
        word = read(self.folder / "begin.json", Begin)
        if time.time() > self.request.until or not self.folder.is_dir():
            self.is_over = True
        return word is not None and time.time_ns() >= word.at

    def is_given_up(self) -> bool:
        """Whether the requester has given up: the profile's folder is gone."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + LOOK
        return not self.folder.is_dir()

    def begin(self, tracer: _Tracer) -> None:
        self.tracer, self.num_steps = tracer, 0
        if self.torch is not None:
            self.torch.start_trace()

    def end(self) -> None:
        """End the profile, and write the recorded spans if it has begun."""
        self.is_over = True
        tracer, self.tracer = self.tracer, None
        if tracer is None:
            return
        try:
            if self.torch is not None:
                self.torch.stop_trace()
        finally:
            tracer.remove()
        if not self.folder.is_dir():
            return  # the requester has given up
        if self.torch is not None:
            self.torch.export_chrome_trace(str(self.name.path(self.folder, "torch.json")))
        self.name.leave_part(self.folder, tracer.recorder)


class StepTracing:
    """Traces one step in `every`, and takes part in profiles that are requested during training."""

    def __init__(
        self,
        name: ProcessName,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        folder: ProfileFolder,
        every: int,
    ) -> None:
        self._name, self._model, self._optimizers, self._folder = name, model, list(optimizers), folder
        self._profile: _Profile | None = None
        self._one = threading.Lock()  # several threads may train
        self._export = OtlpExport(name.role, name.index, name.process) if every else None
        self._tracer = self._follow(self._export.recorder, every) if self._export is not None else None
        self._look()

    def step_made(self) -> None:
        """The calling thread has finished a step of the model."""
        if self._profile is not None:
            with self._one:
                self._guarded_advance()
            return
        if self._tracer is not None:
            self._tracer.end_step()
        self._look()

    def close(self) -> None:
        """End tracing with the training. A profile in progress contains the steps made so far."""
        self._end_profile()
        if self._tracer is not None:
            self._tracer.remove()
        if self._export is not None and (lost := self._export.close()):
            tell(f"torchfleet {self._name.role} {self._name.index}: {lost}")
        self._tracer, self._export = None, None

    def _follow(self, recorder: Recorder, every: int) -> _Tracer:
        return _Tracer(recorder, every, self._model, self._optimizers)

    def _look(self) -> None:
        request = self._folder.look()
        if request is None:
            return
        try:
            self._profile = _Profile(self._name, request, self._folder.of(request))
        except OSError as error:
            self._tell(error)
        else:
            if self._tracer is not None:
                self._tracer.leave()

    def _guarded_advance(self) -> None:
        """Advance the profile. If it cannot be written, give it up and continue training."""
        if self._profile is None:
            return
        try:
            self._advance(self._profile)
        except (OSError, FleetError, RuntimeError) as error:  # Runtime: the script uses torch's profiler too
            self._tell(error)
            self._profile.is_over = True
        if self._profile.is_over:
            self._end_profile()
            if self._tracer is not None:
                self._tracer.begin_step()

    def _advance(self, profile: _Profile) -> None:
        profile.num_steps += 1
        if profile.tracer is not None:
            profile.tracer.end_step()
            if profile.num_steps >= profile.request.steps or profile.is_given_up():
                profile.end()
        elif not profile.is_ready:
            if profile.num_steps > profile.request.skip:
                profile.get_ready()
        elif profile.may_begin():
            profile.begin(self._follow(Recorder(self._name.process), 1))

    def _end_profile(self) -> None:
        profile, self._profile = self._profile, None
        try:
            if profile is not None:
                profile.end()
        except (OSError, RuntimeError) as error:
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        name = f"torchfleet {self._name.role} {self._name.index}"
        tell(f"{name}: this process takes no part in the requested profile: {error}. Training continues.")
