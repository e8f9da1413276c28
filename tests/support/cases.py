"""A table of cases in one test. Every test of pytest costs a millisecond or two in each process, with its fixtures and
its report: thousands of small ones cost minutes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

Test = Callable[..., None]


def each_of(names: str | Sequence[str], values: Iterable[Any], ids: Callable[[Any], Any] | Iterable[Any] | None = None):
    """pytest.mark.parametrize as a loop: the test runs for all cases, up to the first that fails, which is printed.

    For tests without fixtures: those of a test are made once, for all of its cases. Decorators may be stacked.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [_row(columns, value) for value in values]
    own_ids = ids if ids is None or callable(ids) else list(ids)
    assert cases, "no cases"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def for_each(*given: Any, **more: Any) -> None:
            for at, (row, own_id) in enumerate(cases):
                try:
                    test(*given, **more, **dict(zip(columns, row, strict=True)))
                except BaseException:
                    print(f"case of {', '.join(columns)}: {own_id or _id(row, own_ids, at)}")
                    raise

        own = inspect.signature(test)
        left = [parameter for parameter in own.parameters.values() if parameter.name not in columns]
        for_each.__signature__ = own.replace(parameters=left)  # type: ignore[attr-defined]
        return for_each

    return decorate


def _row(columns: Sequence[str], value: Any) -> tuple[tuple[Any, ...], str | None]:
    """The arguments of a case, and its name if it has one."""
    if isinstance(value, type(pytest.param())):
        assert not value.marks, "a case that has a mark is a test of its own"
        return tuple(value.values), value.id
    return ((value,) if len(columns) == 1 else tuple(value)), None


def _id(row: Sequence[Any], ids: Any, at: int) -> str:
    if callable(ids):
        return "-".join(str(ids(one)) for one in row)
    return str(ids[at]) if ids else ", ".join(map(repr, row))
