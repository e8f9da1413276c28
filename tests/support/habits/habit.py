"""A habit of torch's users: a short script that runs with plain torch and again in a mode of fleet.

A script takes a `Port`. The port of the plain twin gives everything back as it is; that of a mode calls
`fleet.prepare`. The script returns what a user would look at: losses, parameters, names. Outcomes are equal to plain
torch (honoured), refused by an error of torchfleet, or different for a reason that the registry gives. Anything else is
wrong, and no page is written of it.
"""

from __future__ import annotations

import contextlib
import io
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support import jobs

import torchfleet as fleet
from torchfleet.api.job.worker_role import WorkerRole
from torchfleet.base.errors import FleetError
from torchfleet.base.role.role_info import RoleInfo
from torchfleet.ps.worker.client.client import Client

LOCAL = "one process"
MODES = (LOCAL, "sync", "half_async", "async", "geo", "hybrid")
NEEDED_IN = (LOCAL, "sync", "hybrid")  # modes in which models of other libraries are trained
HONOURED, REFUSED, DIFFERS, WRONG = "honoured", "refused", "differs", "wrong"
RELATIVE, ABSOLUTE = 1e-5, 1e-6  # of a number, as plain torch has it
NUM_SERVERS = 2
PACKAGE = Path(fleet.__file__).parent

Script = Callable[["Port"], Any]


class Port:
    """Called with what a script has made: a model, optimizers, loaders, schedulers. Returns what the loop then uses."""

    def __init__(self, mode: str | None) -> None:
        self.mode = mode

    @property
    def is_plain(self) -> bool:
        return self.mode is None

    def __call__(self, *objects: Any, sparse: int | str | None = 1) -> Any:
        """As `fleet.prepare`; a single object comes back by itself. All tables go to the servers, however small."""
        if self.mode is not None:
            if self.mode == LOCAL:
                settings = jobs.strategy()
            else:
                fleet.init(OneWorker())
                settings = jobs.strategy(self.mode)
            objects = fleet.prepare(*objects, sparse=sparse, strategy=settings)
        return objects if len(objects) > 1 else objects[0]


class OneWorker:
    """A role maker: the only worker of a job with servers."""

    def read(self) -> RoleInfo:
        return jobs.roles(1, NUM_SERVERS)[0]


@dataclass(frozen=True)
class Habit:
    """`differs`: by mode, or for all under "", why the result is not that of plain torch. `arguments`: those of a
    layer's constructor that the script is about. `is_needed`: models of other libraries use it, and it must not be
    refused."""

    name: str
    script: Script
    differs: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    is_needed: bool = False


@dataclass(frozen=True)
class Cell:
    """How a habit came out in one mode, and the sentence that says so: of the error, or of the registry."""

    kind: str
    sentence: str = ""


class Group:
    """Habits that stand in one table of the page."""

    def __init__(self, title: str, about: str = "") -> None:
        self.title, self.about = title, about
        self.habits: list[Habit] = []

    def add(self, name: str, script: Script, differs: str | Mapping[str, str] = "", **more: Any) -> None:
        """`differs`: one reason for all modes, or one by mode."""
        assert name not in {habit.name for habit in self.habits}, name
        reasons = {"": differs} if isinstance(differs, str) else differs
        self.habits.append(Habit(name, script, {mode: why for mode, why in reasons.items() if why}, **more))

    def habit(self, name: str, differs: str | Mapping[str, str] = "", **more: Any) -> Callable[[Script], Script]:
        """A decorator: the script is a habit of this group."""

        def added(script: Script) -> Script:
            self.add(name, script, differs, **more)
            return script

        return added


def cells(habit: Habit, modes: Sequence[str] = MODES) -> dict[str, Cell]:
    """The habit in all modes."""
    expected = run(habit.script, None)
    return {mode: judged(habit, mode, expected, run(habit.script, mode)) for mode in modes}


@dataclass(frozen=True)
class Raised:
    error: Exception

    @property
    def is_own(self) -> bool:
        """Raised by torchfleet on purpose: by an error of its own, or by a `raise` of the package."""
        last = traceback.extract_tb(self.error.__traceback__)[-1]
        is_raised = Path(last.filename).is_relative_to(PACKAGE) and (last.line or "").startswith("raise")
        return isinstance(self.error, FleetError) or is_raised


def run(script: Script, mode: str | None) -> Any:
    """What the script returns, or the error that it ends with."""
    with _alone(mode), warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        torch.manual_seed(7)
        try:
            return script(Port(mode))
        except Exception as error:
            return Raised(error)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def judged(habit: Habit, mode: str, expected: Any, found: Any) -> Cell:
    reason = habit.differs.get(mode, habit.differs.get("", ""))
    if isinstance(found, Raised):
        if isinstance(expected, Raised) and type(found.error) is type(expected.error):
            return Cell(HONOURED)  # torch's own error
        sentence = " ".join(str(found.error).split())
        if not found.is_own:
            return Cell(WRONG, f"{type(found.error).__name__} that is not torchfleet's: {sentence:.300}")
        if habit.is_needed and mode in NEEDED_IN:
            return Cell(WRONG, f"is refused, and models of other libraries need it: {sentence}")
        return Cell(REFUSED, sentence)
    if isinstance(expected, Raised):
        difference = f"plain torch raises {type(expected.error).__name__}"
    else:
        difference = first_difference(found, expected)
    if not difference:
        return Cell(WRONG, f"is equal, though it is said to differ: {reason}") if reason else Cell(HONOURED)
    return Cell(DIFFERS, reason) if reason else Cell(WRONG, f"differs without a reason: {difference}")


def first_difference(found: Any, expected: Any, place: str = "result") -> str:
    """In words; empty if there is none."""
    difference = ""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if found.shape != expected.shape:
            difference = f"{place} has shape {tuple(found.shape)}, in plain torch {tuple(expected.shape)}"
        elif not torch.allclose(found.double(), expected.double(), RELATIVE, ABSOLUTE, equal_nan=True):
            difference = f"{place} is off by {(found.double() - expected.double()).abs().max().item():.2g}"
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        if list(found) != list(expected):
            difference = f"{place} has {list(found)}, in plain torch {list(expected)}"
        else:
            parts = (first_difference(found[name], expected[name], f"{place}[{name!r}]") for name in expected)
            difference = next(filter(None, parts), "")
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)):
        if len(found) != len(expected):
            difference = f"{place} has {len(found)} items, in plain torch {len(expected)}"
        else:
            pairs = enumerate(zip(found, expected, strict=True))
            difference = next(filter(None, (first_difference(*pair, f"{place}[{i}]") for i, pair in pairs)), "")
    elif isinstance(expected, float) and isinstance(found, float):
        both_are_nan = math.isnan(found) and math.isnan(expected)
        if not both_are_nan and not math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            difference = f"{place} is {found:.7g}, in plain torch {expected:.7g}"
    elif found != expected:
        difference = f"{place} is {found!r:.100}, in plain torch {expected!r:.100}"
    return difference


@contextlib.contextmanager
def _alone(mode: str | None) -> Iterator[None]:
    """No job before it and none after it. The servers of a mode are in this process; a step is applied before the next
    one begins: the page is about what torch's options mean, not about the age of what a worker reads."""
    fleet.reset()
    had_group = dist.is_available() and dist.is_initialized()
    servers = jobs.Servers(NUM_SERVERS, 1)
    made = WorkerRole._whole_step_made

    def connect(worker: WorkerRole, number: int | None = None) -> Client:
        servers.make_tables(worker._setup)
        return jobs.Worker._connect(_Linked(worker, servers), number)  # type: ignore[arg-type]

    def step_made(worker: WorkerRole) -> None:
        made(worker)
        if mode in ("async", "half_async"):
            worker.communicator.flush()

    try:
        with contextlib.ExitStack() as patches:
            if mode is not None:
                patches.enter_context(mock.patch.object(WorkerRole, "_whole_step_made", step_made))
            if mode not in (None, LOCAL):
                patches.enter_context(mock.patch.object(WorkerRole, "_connect", connect))
            try:
                yield
            finally:
                fleet.reset()
    finally:
        if dist.is_available() and dist.is_initialized() and not had_group:  # of hybrid mode, whose worker has failed
            dist.destroy_process_group()


class _Linked:
    """What jobs.Worker looks at to connect."""

    def __init__(self, worker: WorkerRole, servers: jobs.Servers) -> None:
        self.info, self._plan, self._servers = worker.info, worker._plan, servers
