"""Conditions on statistics, written by users: `count >= 3 and (show > 1 or not slot == 7)`.

    condition   condition or condition | condition and condition | not condition | number < number | ( condition )
    number      3 | 0.5 | 1e-3 | name | number + number | - number | min(number, number) | ( number )

From weakest to strongest: or, and, not, < <= > >= == !=, + -, * /, unary -. Comparisons do not chain: `1 < show < 5` is
an error, `1 < show and show < 5` is how to say it. Numbers are float64 and follow IEEE (1 / 0 is infinite, log(-1) is
NaN), but for one thing: every comparison with NaN is false, `!=` too.

Nothing of a text is ever run as Python: it becomes a list of steps in postfix order, each one a function named here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError

MAX_CHARACTERS = 500
MAX_DEPTH = 32  # parentheses, functions, `not` and `-` inside each other

_CONDITION, _NUMBER = "a condition", "a number"
_END = "the end"
_TOKEN = re.compile(
    r"(?P<number>(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z_0-9]*)"
    r"|(?P<sign>[<>=!]=|[-+*/()<>,])"
    r"|(?P<space>[ \t\r\n]+)"
)


class _Operation(NamedTuple):
    """Done with the last `num` results, which must be of the kind `takes`; the outcome is of the kind `gives`."""

    num: int
    takes: str
    gives: str
    apply: Callable[..., Any]
    power: int = 0  # how strongly it binds what stands on its two sides


class _Token(NamedTuple):
    kind: str
    text: str
    column: int  # from 1

    def __str__(self) -> str:
        return self.text if self.kind == "end" else f"'{self.text}'"


def _smaller(a: Any, b: Any) -> Any:
    return np.where((a < b) | np.isnan(a), a, b)  # np.minimum's choice between 0.0 and -0.0 differs by machine


def _larger(a: Any, b: Any) -> Any:
    return np.where((a > b) | np.isnan(a), a, b)


def _differs(a: Any, b: Any) -> Any:
    return (a < b) | (a > b)


def _comparison(apply: Callable[..., Any]) -> _Operation:
    return _Operation(2, _NUMBER, _CONDITION, apply, power=4)


_BINARY: dict[str, _Operation] = {
    "or": _Operation(2, _CONDITION, _CONDITION, np.logical_or, power=1),
    "and": _Operation(2, _CONDITION, _CONDITION, np.logical_and, power=2),
    "<": _comparison(np.less),
    "<=": _comparison(np.less_equal),
    ">": _comparison(np.greater),
    ">=": _comparison(np.greater_equal),
    "==": _comparison(np.equal),
    "!=": _comparison(_differs),
    "+": _Operation(2, _NUMBER, _NUMBER, np.add, power=5),
    "-": _Operation(2, _NUMBER, _NUMBER, np.subtract, power=5),
    "*": _Operation(2, _NUMBER, _NUMBER, np.multiply, power=6),
    "/": _Operation(2, _NUMBER, _NUMBER, np.divide, power=6),
}
_PREFIX: dict[str, _Operation] = {
    "not": _Operation(1, _CONDITION, _CONDITION, np.logical_not, power=3),
    "-": _Operation(1, _NUMBER, _NUMBER, np.negative, power=7),
}
_FUNCTIONS: dict[str, _Operation] = {
    "min": _Operation(2, _NUMBER, _NUMBER, _smaller),
    "max": _Operation(2, _NUMBER, _NUMBER, _larger),
    "abs": _Operation(1, _NUMBER, _NUMBER, np.abs),
    "log": _Operation(1, _NUMBER, _NUMBER, np.log),
    "sqrt": _Operation(1, _NUMBER, _NUMBER, np.sqrt),
}

_Step = float | str | _Operation  # a number, a name's column, or what to do with the results so far


@dataclass(frozen=True)
class Expression:
    """A condition that has been read. Two are equal if their texts are."""

    text: str
    names: frozenset[str]  # that it uses
    steps: tuple[_Step, ...] = field(repr=False, compare=False)

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Where it holds: a new array, as long as the columns. Only columns in `names` are looked at.

        A condition that uses no name is as long as the first column of all.
        """
        stack: list[Any] = []
        with np.errstate(all="ignore"):
            for step in self.steps:
                if isinstance(step, float):
                    stack.append(np.float64(step))
                elif isinstance(step, str):
                    stack.append(np.asarray(columns[step], np.float64))
                else:
                    arguments = stack[-step.num :]
                    stack[-step.num :] = [step.apply(*arguments)]
        like = self.names or list(columns)[:1]
        holds = np.empty(np.broadcast_shapes(*(np.shape(columns[name]) for name in like)), np.bool_)
        holds[...] = stack.pop()
        return holds


def parse(text: str, allowed: Collection[str]) -> Expression:
    """The condition that `text` says, over columns with the `allowed` names. Raises TableError, which says where."""
    if len(text) > MAX_CHARACTERS:
        raise TableError(f"condition: expected at most {MAX_CHARACTERS} characters, found {len(text):,}")
    return _parse(text, frozenset(allowed))


@lru_cache(maxsize=256)  # a declaration is read wherever it is looked at
def _parse(text: str, allowed: frozenset[str]) -> Expression:
    parser = _Parser(text, allowed)
    parser.whole()
    names = frozenset(step for step in parser.steps if isinstance(step, str))
    return Expression(text, names, tuple(parser.steps))


class _Parser:
    """Reads by precedence: `operation` takes all that binds at least as strongly as its caller asks."""

    def __init__(self, text: str, allowed: frozenset[str]) -> None:
        self.text = text
        self.allowed = allowed
        self.steps: list[_Step] = []
        self.tokens = self.tokenize()
        self.at = 0

    @property
    def token(self) -> _Token:
        return self.tokens[self.at]

    def fail(self, column: int, problem: str) -> NoReturn:
        raise TableError(f"condition {self.text!r}, column {column}: {problem}")

    def tokenize(self) -> list[_Token]:
        tokens, at = [], 0
        while at < len(self.text):
            match = _TOKEN.match(self.text, at)
            if match is None:
                hint = "; to compare, write ==" if self.text[at] == "=" else ""
                self.fail(at + 1, f"expected a number, a name or an operator, found {self.text[at]!r}{hint}")
            if match.lastgroup != "space":
                tokens.append(_Token(str(match.lastgroup), match.group(), at + 1))
            at = match.end()
        return [*tokens, _Token("end", _END, len(self.text) + 1)]

    def whole(self) -> None:
        start = self.token.column
        kind = self.operation(0, 0)
        if self.token.kind != "end":
            self.fail(self.token.column, f"expected an operator or the end, found {self.token}")
        if kind != _CONDITION:
            self.fail(start, f"expected a condition like 'show > 1', found {kind}")

    def operation(self, power: int, depth: int) -> str:
        """An operand, and all operators behind it that bind at least as strongly as `power`; returns its kind."""
        start = self.token.column
        kind = self.operand(depth)
        while (operator := _BINARY.get(self.token.text)) is not None and operator.power >= power:
            sign = self.take()
            if operator.power == 4 and kind == _CONDITION:
                self.fail(start, f"{sign} compares numbers, found a condition. Instead of a < b < c: a < b and b < c")
            self.expect_kind(operator, sign, kind, start)
            right = self.token.column
            self.expect_kind(operator, sign, self.operation(operator.power + 1, depth), right)
            self.steps.append(operator)
            kind = operator.gives
        return kind

    def operand(self, depth: int) -> str:
        """One number, name, function, parenthesis, or prefix with what it binds."""
        if depth > MAX_DEPTH:
            self.fail(self.token.column, f"expected at most {MAX_DEPTH} levels of nesting, found more")
        token = self.take()
        if token.text in _PREFIX:
            prefix, start = _PREFIX[token.text], self.token.column
            self.expect_kind(prefix, token, self.operation(prefix.power, depth + 1), start)
            self.steps.append(prefix)
            return prefix.gives
        if token.text == "(":
            kind = self.operation(0, depth + 1)
            self.close(token)
            return kind
        if token.kind == "name" and token.text not in _BINARY:
            return self.function(token, depth) if self.token.text == "(" else self.name(token)
        if token.kind != "number":
            self.fail(token.column, f"expected a number, a name or '(', found {token}")
        if not math.isfinite(float(token.text)):
            self.fail(token.column, f"expected a number below 1.8e308, found {token}")
        self.steps.append(float(token.text))
        return _NUMBER

    def name(self, token: _Token) -> str:
        if token.text not in self.allowed:
            self.fail(token.column, f"expected one of {', '.join(sorted(self.allowed))}; found {token}")
        self.steps.append(token.text)
        return _NUMBER

    def function(self, token: _Token, depth: int) -> str:
        if token.text not in _FUNCTIONS:
            self.fail(token.column, f"expected one of the functions {', '.join(_FUNCTIONS)}; found {token}")
        function, opening = _FUNCTIONS[token.text], self.take()
        for i in range(function.num):
            if i and self.take().text != ",":
                found = self.tokens[self.at - 1]
                self.fail(found.column, f"expected ',': {token} takes {function.num} numbers; found {found}")
            start = self.token.column
            self.expect_kind(function, token, self.operation(0, depth + 1), start)
        self.close(opening)
        self.steps.append(function)
        return function.gives

    def take(self) -> _Token:
        """The next token; the end stays where it is."""
        token = self.token
        self.at += token.kind != "end"
        return token

    def close(self, opening: _Token) -> None:
        if self.token.text != ")":
            self.fail(self.token.column, f"expected ')' for the '(' in column {opening.column}, found {self.token}")
        self.take()

    def expect_kind(self, operation: _Operation, sign: _Token, kind: str, column: int) -> None:
        if kind != operation.takes:
            self.fail(column, f"{sign} expects {operation.takes}, found {kind}")
