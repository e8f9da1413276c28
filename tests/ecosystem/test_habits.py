"""Torch's habits in every mode: docs/torch_habits.md says what runs give, and no outcome is left unexplained."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support.habits import embeddings, page
from support.habits.habit import DIFFERS, HONOURED, LOCAL, MODES, REFUSED, WRONG, Cell, Group, Habit, Port, cells
from support.habits.scripts import Model, sgd, train, values

import torchfleet as fleet
from torchfleet.base.errors import FleetError

pytestmark = pytest.mark.xdist_group("habits")  # kernels and networks are loaded once


@pytest.fixture(scope="module")
def written() -> dict[str, str]:
    return page.sections_of(page.PAGE.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [pytest.param(g, marks=[pytest.mark.long] if g in page.LONG else [], id=g.title) for g in page.GROUPS],
)
def test_the_page_says_what_runs_in_two_modes_give(group: Group, written: dict[str, str]) -> None:
    """A third of the cells, from every row and every mode: all of them take more than a minute."""
    rows = page.part_of(group)
    assert page.wrong(rows) == [], "neither equal to plain torch, nor refused by torchfleet, nor explained"
    found, said = page.kinds_of(rows, written[group.title])
    assert found == said, "`make habits` writes the page anew"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("group", [pytest.param(g, id=g.title) for g in page.GROUPS])
def test_the_page_says_what_runs_give(group: Group, written: dict[str, str]) -> None:
    rows = page.rows_of(group)
    assert page.wrong(rows) == [], "neither equal to plain torch, nor refused by torchfleet, nor explained"
    assert written[group.title] == page.section(group, rows), "`make habits` writes the page anew"


def test_the_page_has_every_group_and_its_sums(written: dict[str, str]) -> None:
    assert list(written) == [group.title for group in page.GROUPS]
    assert page.PAGE.read_text() == page.page(written)


@pytest.mark.parametrize("kind", [torch.nn.Embedding, torch.nn.EmbeddingBag])
def test_every_argument_of_the_constructor_has_a_line(kind: type[torch.nn.Module]) -> None:
    groups = [embeddings.LAYERS if kind is torch.nn.Embedding else embeddings.BAGS, embeddings.SPARSE]
    tried = {argument for group in groups for habit in group.habits for argument in habit.arguments}
    assert set(inspect.signature(kind).parameters) - tried == set()


def test_every_scheduler_and_optimizer_of_torch_has_a_line() -> None:
    names = " ".join(habit.name for group in page.GROUPS for habit in group.habits)
    optimizers = [n for n, kind in vars(torch.optim).items() if inspect.isclass(kind) and n not in OTHERS]
    schedulers = [n for n, kind in vars(torch.optim.lr_scheduler).items() if _is_scheduler(kind)]
    assert [name for name in [*optimizers, *schedulers] if name not in names] == []


OTHERS = {"Optimizer", "Muon"}  # Muon takes matrices alone, and no model of torch's is made of those


def _is_scheduler(kind: Any) -> bool:
    base = torch.optim.lr_scheduler.LRScheduler
    return inspect.isclass(kind) and issubclass(kind, base) and kind is not base and not kind.__name__.startswith("_")


# What the runner makes of an outcome


def outcome(script: Any, mode: str = LOCAL, **more: Any) -> Cell:
    return cells(Habit("made up", script, **more), [mode])[mode]


def raising(error: Exception) -> Any:
    def script(port: Port) -> int:
        if not port.is_plain:
            raise error
        return 1

    return script


@pytest.mark.parametrize("mode", MODES)
def test_a_script_is_run_in_the_mode_that_is_asked_for(mode: str) -> None:
    found: list[Any] = []

    def script(port: Port) -> Any:
        model: Any = Model()
        model, optimizer = port(model, sgd(model))
        losses = train(model, optimizer)
        if not port.is_plain:
            found.extend([fleet.stats()["mode"], len(fleet.stats()["servers"])])
        return losses, values(model)

    assert outcome(script, mode) == Cell(HONOURED)
    assert found == ["sync" if mode == LOCAL else mode, 1 if mode == LOCAL else 2]


def test_a_difference_needs_a_reason_and_a_reason_needs_a_difference() -> None:
    def differing(port: Port) -> float:
        return 1.0 if port.is_plain else 1.001

    reason = {"": "it is another number"}
    assert outcome(differing).kind == WRONG
    assert outcome(differing, differs=reason) == Cell(DIFFERS, "it is another number")
    assert outcome(lambda port: 1.0, differs=reason).kind == WRONG
    assert outcome(lambda port: 1.0) == Cell(HONOURED)


def test_only_errors_of_torchfleet_refuse() -> None:
    assert outcome(raising(FleetError("use that"))) == Cell(REFUSED, "use that")
    assert outcome(raising(RuntimeError("of torch's insides"))).kind == WRONG
    assert outcome(raising(FleetError("use that")), is_needed=True).kind == WRONG


def test_an_error_of_plain_torch_is_honoured_by_the_same_error() -> None:
    def script(port: Port) -> int:
        raise IndexError("too large")

    assert outcome(script) == Cell(HONOURED)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.tensor([1.0, 1.1])),
        ({"a": 1}, {"b": 1}),
        ([1, 2], [1]),
        (float("nan"), 1.0),
        (torch.tensor([float("nan")]), torch.ones(1)),
        ("a", "b"),
    ],
)
def test_whatever_is_not_the_same_is_a_difference(found: Any, expected: Any) -> None:
    assert outcome(lambda port: expected if port.is_plain else found).kind == WRONG
    assert outcome(lambda port: expected) == Cell(HONOURED)


def test_what_was_honoured_and_is_refused_now_is_named() -> None:
    group = Group("made up")
    before, after = ({"it": dict.fromkeys(MODES, Cell(kind, "no"))} for kind in (HONOURED, REFUSED))
    assert page.given_up(page.section(group, before), page.section(group, after)) == [f"it ({m})" for m in MODES]
    assert page.given_up(page.section(group, after), page.section(group, before)) == []
