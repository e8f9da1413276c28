"""Tables of cases in one test."""

from __future__ import annotations

import inspect

import pytest
from support.cases import each_of

SEEN: list[object] = []


@each_of("number", [1, pytest.param(2, id="two")])
@each_of(("letter", "word"), [("a", "one"), ("b", "other")], ids=["first", "second"])
def test_all_combinations_run(number: int, letter: str, word: str) -> None:
    SEEN.append((number, letter, word))


class TestWithin:
    @each_of("letter", "ab")
    def test_methods_and_fixtures_work(self, letter: str, capsys: pytest.CaptureFixture[str]) -> None:
        print(letter)
        assert capsys.readouterr().out == f"{letter}\n"


def test_they_have_run() -> None:
    del SEEN[:]
    test_all_combinations_run()
    assert SEEN == [(1, "a", "one"), (1, "b", "other"), (2, "a", "one"), (2, "b", "other")]
    assert inspect.signature(test_all_combinations_run).parameters == {}


def test_the_case_that_fails_is_named_and_its_error_is_that_of_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    @each_of("divisor", [1, 0, 2], ids=lambda value: f"by {value}")
    def divide(divisor: int) -> None:
        print(1 / divisor)

    with pytest.raises(ZeroDivisionError):
        divide()
    assert capsys.readouterr().out == "1.0\ncase of divisor: by 0\n"


def test_no_case_and_marks_are_refused() -> None:
    with pytest.raises(AssertionError):
        each_of("number", [])
    with pytest.raises(AssertionError):
        each_of("number", [pytest.param(1, marks=pytest.mark.long)])
