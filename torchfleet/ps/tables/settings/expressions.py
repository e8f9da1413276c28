"""Conditions on statistics, written by users: `count >= 3 and (show > 1 or not slot == 7)`.

    condition   condition or condition | condition and condition | not condition | number < number | ( condition )
    number      3 | 0.5 | 1e-3 | name | number + number | - number | min(number, number) | ( number )

From weakest to strongest: or, and, not, < <= > >= == !=, + -, * /, unary -. Comparisons do not chain: `1 < show < 5` is
an error, write `1 < show and show < 5`. Numbers are float64 and follow IEEE (1 / 0 is infinite, log(-1) is NaN), with
one exception: every comparison with NaN is false, `!=` too.

Python's own parser (`ast.parse`) reads the text, and nothing of it is ever run as Python: the nodes that are listed
here become a list of steps in postfix order, each one a function named here. Every other node is an error.
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from torchfleet.base.errors import TableError

MAX_CHARACTERS = 500
MAX_DEPTH = 32  # nested parentheses, including those of functions

_FOREIGN = re.compile(r"[^A-Za-z0-9_.+\-*/()<>=!, ]")  # no string, no comment, no other alphabet
_DECIMAL = re.compile(r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")  # not 0x10, 1_000, True


class _Operation(NamedTuple):
    """Applied to the last `num` results."""

    num: int
    apply: Callable[..., Any]


def _smaller(a: Any, b: Any) -> Any:
    return np.where((a < b) | np.isnan(a), a, b)  # np.minimum's choice between 0.0 and -0.0 differs by machine


def _larger(a: Any, b: Any) -> Any:
    return np.where((a > b) | np.isnan(a), a, b)


def _differs(a: Any, b: Any) -> Any:
    return (a < b) | (a > b)


_LOGICAL: dict[type[ast.boolop], Callable[..., Any]] = {ast.And: np.logical_and, ast.Or: np.logical_or}
_COMPARISONS: dict[type[ast.cmpop], Callable[..., Any]] = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: _differs,
}
_ARITHMETIC: dict[type[ast.operator], Callable[..., Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
}
_FUNCTIONS = {
    "min": _Operation(2, _smaller),
    "max": _Operation(2, _larger),
    "abs": _Operation(1, np.abs),
    "log": _Operation(1, np.log),
    "sqrt": _Operation(1, np.sqrt),
}

_Step = float | str | _Operation  # a number, the name of a column, or an operation on the results so far


@dataclass(frozen=True)
class Expression:
    """A parsed condition. Two are equal if their texts are."""

    text: str
    names: frozenset[str]  # names of the columns that it reads
    steps: tuple[_Step, ...] = field(repr=False, compare=False)

    def __call__(self, columns: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.bool_]:
        """Mask of the rows for which the condition holds: a new array of the columns' length. Reads only columns in
        `names`.

        A condition without names gives a mask of the first column's length.
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
    """Parse `text` as a condition over the `allowed` columns. Raises TableError, which names the position."""
    if len(text) > MAX_CHARACTERS:
        raise TableError(f"condition: expected at most {MAX_CHARACTERS} characters, found {len(text):,}")
    return _parse(text, frozenset(allowed))


@functools.lru_cache(maxsize=256)  # a declaration is parsed each time it is used
def _parse(text: str, allowed: frozenset[str]) -> Expression:
    reader = _Reader(text, allowed)
    reader.read()
    return Expression(text, frozenset(step for step in reader.steps if isinstance(step, str)), tuple(reader.steps))


class _Reader:
    """Translates the nodes of a parsed text into steps. Each node must be a condition or a number, as its place
    requires.
    """

    def __init__(self, text: str, allowed: frozenset[str]) -> None:
        self.text, self.allowed = text, allowed
        one_line = re.sub(r"[\t\r\n]", " ", text).rstrip()
        self.source = one_line.lstrip()  # Python takes no space before an expression
        self.start = len(one_line) - len(self.source)
        self.steps: list[_Step] = []

    def fail(self, at: int, problem: str) -> NoReturn:
        """Raise TableError for the position `at` in `source`."""
        raise TableError(f"condition {self.text!r}, column {self.start + at + 1}: {problem}")

    def read(self) -> None:
        foreign = _FOREIGN.search(self.source)
        if foreign:
            self.fail(foreign.start(), f"expected a number, a name or an operator, found {foreign.group()!r}")
        depth = 0
        for at, character in enumerate(self.source):
            depth += (character == "(") - (character == ")")
            if depth > MAX_DEPTH:
                self.fail(at, f"expected at most {MAX_DEPTH} levels of parentheses, found more")
        try:
            self.condition(ast.parse(self.source, mode="eval").body)
        except SyntaxError as error:
            end = len(self.source) + 1  # Python says 0 where the text ends too early
            at = min(error.offset or end, end) - 1
            self.fail(at, f"{error.msg}. Expected comparisons like 'show > 1', with and, or, not and parentheses")
        except (RecursionError, MemoryError):
            self.fail(0, "it is nested too deep")

    def condition(self, node: ast.expr) -> None:
        match node:
            case ast.BoolOp(op, values):
                self.condition(values[0])
                for value in values[1:]:
                    self.condition(value)
                    self.steps.append(_Operation(2, _LOGICAL[type(op)]))
            case ast.UnaryOp(ast.Not(), operand):
                self.condition(operand)
                self.steps.append(_Operation(1, np.logical_not))
            case ast.Compare(left, [op], [right]) if type(op) in _COMPARISONS:
                self.number(left)
                self.number(right)
                self.steps.append(_Operation(2, _COMPARISONS[type(op)]))
            case ast.Compare(ops=[_, _, *_]):
                self.fail(node.col_offset, "comparisons do not chain. Instead of a < b < c: a < b and b < c")
            case _:
                signs = "< <= > >= == != and or not"
                self.fail(node.col_offset, f"expected a condition like 'show > 1' ({signs}), found {self.said(node)}")

    def number(self, node: ast.expr) -> None:
        match node:
            case ast.Constant() if _DECIMAL.fullmatch(self.segment(node)):
                self.constant(node)
            case ast.Name(name) if name in self.allowed:
                self.steps.append(name)
            case ast.BinOp(left, op, right) if type(op) in _ARITHMETIC:
                self.number(left)
                self.number(right)
                self.steps.append(_Operation(2, _ARITHMETIC[type(op)]))
            case ast.UnaryOp(ast.USub(), operand):
                self.number(operand)
                self.steps.append(_Operation(1, np.negative))
            case ast.Call(ast.Name(name), arguments, []) if name in _FUNCTIONS:
                if len(arguments) != _FUNCTIONS[name].num:
                    wanted = f"{_FUNCTIONS[name].num} numbers"
                    self.fail(node.col_offset, f"{name} takes {wanted}, found {len(arguments)}")
                for argument in arguments:
                    self.number(argument)
                self.steps.append(_FUNCTIONS[name])
            case _:
                names, functions = ", ".join(sorted(self.allowed)), ", ".join(_FUNCTIONS)
                allowed = f"{names}, a number, + - * / of them, or one of the functions {functions}"
                self.fail(node.col_offset, f"expected one of {allowed}; found {self.said(node)}")

    def constant(self, node: ast.Constant) -> None:
        found = float(self.segment(node))
        if not math.isfinite(found):
            self.fail(node.col_offset, f"expected a number below 1.8e308, found {self.said(node)}")
        self.steps.append(found)

    def segment(self, node: ast.expr) -> str:
        return self.source[node.col_offset : node.end_col_offset]

    def said(self, node: ast.expr) -> str:
        """The source of a node, for an error message."""
        is_condition = isinstance(node, (ast.Compare, ast.BoolOp)) or isinstance(getattr(node, "op", None), ast.Not)
        return f"{'the condition ' * is_condition}{self.segment(node)!r}"
