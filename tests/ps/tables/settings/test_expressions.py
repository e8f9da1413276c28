"""Expressions: a text means what a plain walk over its tree says, and every other text is a clear error."""

from __future__ import annotations

import math
import operator
import re
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.messages import naming
from support.searches import examples

from torchfleet.base.errors import TableError
from torchfleet.ps.tables.settings.expressions import MAX_CHARACTERS, MAX_DEPTH, parse

NAMES = ("show", "click", "slot", "age_days")
FLOATS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])
POWER = {"or": 1, "and": 2, "not": 3, "+": 5, "-": 5, "*": 6, "/": 6, "neg": 7}
SIGNS = ("or", "and", "<", "<=", ">", ">=", "==", "!=", "+", "-", "*", "/")
COMPARISONS = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": lambda a, b: a < b or a > b,
}


def divide(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if a == 0 or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1, b)


def logarithm(x: float) -> float:
    return float(np.log(x)) if x > 0 else math.nan if x != 0 else -math.inf


ARITHMETIC = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": divide,
    "neg": operator.neg,
    "abs": abs,
    "min": lambda a, b: a if a < b or math.isnan(a) else b,
    "max": lambda a, b: a if a > b or math.isnan(a) else b,
    "log": logarithm,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
}


def value(tree, row):
    """The oracle: Python's own arithmetic, on one row."""
    if isinstance(tree, float):
        return tree
    if isinstance(tree, str):
        return row[tree]
    head, *rest = tree
    if head == "and":
        return value(rest[0], row) and value(rest[1], row)
    if head == "or":
        return value(rest[0], row) or value(rest[1], row)
    if head == "not":
        return not value(rest[0], row)
    return (COMPARISONS | ARITHMETIC)[head](*(value(part, row) for part in rest))


def written(tree, power: int = 0) -> str:
    """The tree as text, with parentheses only where they are needed below an operator of this power."""
    if isinstance(tree, float):
        return repr(tree)
    if isinstance(tree, str):
        return tree
    head, *rest = tree
    if head in ("min", "max", "abs", "log", "sqrt"):
        return f"{head}({', '.join(written(part) for part in rest)})"
    own = POWER.get(head, 4)
    if head == "not":
        text = f"not {written(rest[0], own)}"
    elif head == "neg":
        text = f"-{written(rest[0], own)}"
    else:  # to the left; a comparison has no comparison on either side
        text = f"{written(rest[0], own + (own == 4))} {head} {written(rest[1], own + 1)}"
    return f"({text})" if own < power else text


def numbers(children):
    pair = st.tuples(st.sampled_from("+-*/"), children, children)
    extreme = st.tuples(st.sampled_from(["min", "max"]), children, children)
    single = st.tuples(st.sampled_from(["neg", "abs", "log", "sqrt"]), children)
    return pair | extreme | single


LEAVES = st.sampled_from(NAMES) | st.integers(0, 100).map(float) | st.floats(0, 1e300).map(abs)
NUMBERS = st.recursive(LEAVES, numbers, max_leaves=8)
COMPARED = st.tuples(st.sampled_from(sorted(COMPARISONS)), NUMBERS, NUMBERS)
CONDITIONS = st.recursive(
    COMPARED,
    lambda part: st.tuples(st.sampled_from(["and", "or"]), part, part) | st.tuples(st.just("not"), part),
    max_leaves=6,
)
ROWS = st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, FLOATS)), max_size=6)


@pytest.mark.slow
@settings(max_examples=examples(120))
@given(CONDITIONS, ROWS)
def test_a_condition_means_what_a_walk_over_its_tree_says(tree, rows):
    text = written(tree)
    if len(text) > MAX_CHARACTERS:
        return
    condition = parse(text, NAMES)
    assert condition.names == {name for name in NAMES if name in text}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = condition({name: np.array([row[name] for row in rows], np.float32) for name in NAMES})
    assert found.dtype == np.bool_
    assert found.tolist() == [bool(value(tree, row)) for row in rows], text


def holds(text: str, **columns) -> list[bool]:
    return parse(text, columns)({name: np.array(column) for name, column in columns.items()}).tolist()


def test_the_examples_of_the_documentation():
    text = "count >= 3 and (show > 1 or not slot == 7)"
    assert holds(text, count=[3, 2, 5, 3], show=[2, 2, 0, 0], slot=[7, 7, 7, 1]) == [True, False, False, True]
    text = "unseen_days > 3 and score < 0.5 * age_days"
    assert holds(text, unseen_days=[4, 3, 4], score=[1.0, 1.0, 3.0], age_days=[6, 6, 6]) == [True, False, False]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 + 3 * 4 == 14", True),
        ("10 - 4 - 3 == 3", True),
        ("16 / 4 / 2 == 2", True),
        ("-2 * -3 == 6", True),
        ("2 - -3 == 5", True),
        ("not 1 < 2 or 1 < 2", True),
        ("not (1 < 2 or 1 < 2)", False),
        ("1 < 2 or 1 < 2 and 2 < 1", True),
        ("(1 < 2 or 1 < 2) and 2 < 1", False),
        ("not not 1 < 2", True),
        (".5 + 5. + 1e-3 + 2E+1 == 25.501", True),
        ("1 / 0 > 1e308 and -1 / 0 < -1e308", True),
        ("0 / 0 == 0 / 0 or 0 / 0 != 0 / 0 or 0 / 0 < 1 or log(-1) >= 1", False),
        ("not log(-1) > 0", True),
        ("max(1, min(5, 3)) == 3 and abs(-2) == 2 and sqrt(9) == 3 and log(1) == 0", True),
        ("\t1<\n2 \r", True),
    ],
)
def test_what_operators_mean(text, expected):
    assert holds(text, show=[1, 2]) == [expected] * 2


def test_columns_of_any_type_are_compared_as_float64():
    """As uint32, 1 - 2 would be large; as float32, 2^24 + 1 would be 2^24."""
    columns = {"show": np.array([1, 5], np.uint32), "click": np.array([2, 2], np.uint32)}
    assert parse("show - click < 0", NAMES)(columns).tolist() == [True, False]
    assert parse("slot == 16777217", NAMES)({"slot": np.array([1 << 24, (1 << 24) + 1])}).tolist() == [False, True]


def test_the_result_is_a_new_array_as_long_as_the_columns():
    found = parse("1 < 2", NAMES)({"show": np.zeros(3)})
    found[0] = False  # writable
    assert found.tolist() == [False, True, True]
    assert parse("show > 1", NAMES)({"show": np.zeros(0), "other": np.zeros(9)}).shape == (0,)
    assert parse("1 < 2", NAMES)({}).shape == ()


def test_only_the_columns_that_it_names_are_looked_at():
    class Wary(dict):
        def __missing__(self, name):
            raise AssertionError(name)

    assert parse("show > 1", NAMES)(Wary(show=np.array([2]))).tolist() == [True]


def test_a_text_is_read_once():
    assert parse("show > 1.5", ["show", "click"]) is parse("show > 1.5", ("click", "show"))
    assert parse("show > 1.5", ["show"]) == parse("show > 1.5", ["show", "click"])
    assert parse("show > 1.5", ["show"]) != parse("show > 1.50", ["show"])
    assert "steps" not in repr(parse("show > 1.5", ["show"]))


ALLOWED = "age_days, click, show, slot"


@pytest.mark.parametrize(
    ("text", "column", "named"),
    [
        ("", 1, ""),
        ("show", 1, "'show'"),
        ("  show + 1", 3, "'show + 1'"),
        ("show and click", 1, "'show'"),
        ("show > 1 or click", 13, "'click'"),
        ("not show", 5, "'show'"),
        ("1 + (show > 1) > 2", 6, "the condition 'show > 1'"),
        ("-(show > 1) > 2", 3, "the condition 'show > 1'"),
        ("(not show > 1) == 1", 2, "the condition 'not show > 1'"),
        ("show == not click > 1", 9, ""),
        ("log(show > 1) > 2", 5, "the condition 'show > 1'"),
        ("min(1, show > 1) > 2", 8, "the condition 'show > 1'"),
        ("1 < show < 5", 1, "a < b and b < c"),
        ("views > 1", 1, f"{ALLOWED}, a number"),
        ("show > 1 and min > 1", 14, ALLOWED),
        ("show > 1 AND click > 1", 8, ""),
        ("exp(show) > 1", 1, "min, max, abs, log, sqrt"),
        ("show(1) > 1", 1, "'show(1)'"),
        ("(show)(1) > 1", 1, "'(show)(1)'"),
        ("min(show) > 1", 1, "min takes 2 numbers, found 1"),
        ("abs(show, 1) > 1", 1, "abs takes 1 numbers, found 2"),
        ("min(show, *slot) > 1", 11, "'*slot'"),
        ("min(show, b=slot) > 1", 1, "'min(show, b=slot)'"),
        ("abs() > 1", 1, "found 0"),
        ("(show > 1", 1, ""),
        ("show > 1)", 9, ""),
        ("show >", 7, ""),
        ("show > and", 8, ""),
        ("show >> 1", 1, "'show >> 1'"),
        ("show // 1 > 1", 1, "'show // 1'"),
        ("show ** 2 > 1", 1, "'show ** 2'"),
        ("+show > 1", 1, "'+show'"),
        ("show > 1 click", 8, ""),
        ("show > 0x10", 8, "'0x10'"),
        ("show > 1_000", 8, "'1_000'"),
        ("show > 1j", 8, "'1j'"),
        ("show > 1e999", 8, "'1e999'"),
        ("show > 1" + "0" * 400, 8, "1.8e308"),
        ("show > True", 8, "'True'"),
        ("show > None", 8, "'None'"),
        ("show in slot", 1, "'show in slot'"),
        ("show is slot", 1, "'show is slot'"),
        ("(show, click) > 1", 1, "'(show, click)'"),
        ("show > 1 if slot > 1 else click > 1", 1, ""),
        ("show = 1", 6, ""),
        ("show > 1 & click > 1", 10, "'&'"),
        ("show > '1'", 8, '"\'"'),
        ("show > 1 # note", 10, "'#'"),
        ("show.real > 1", 1, "'show.real'"),
        ("show[0] > 1", 5, "'['"),
        ("lambda: 1", 7, "':'"),
        ("show > １", 8, "'１'"),  # a digit to Python's float, but no ASCII
        ("ｓhow > 1", 1, "'ｓ'"),  # Python takes it for an s
        ("show > 1\0", 9, r"'\x00'"),
    ],
)
def test_an_error_says_where_and_what(text, column, named):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python's tokenizer, about 1and
        with pytest.raises(TableError) as raised:
            parse(text, NAMES)
    found = re.match(r"condition .*, column ([0-9]+): (.*)", str(raised.value), re.DOTALL)
    assert found
    assert named in found[2]
    if named:  # else Python's parser says where, each version in its own way
        assert int(found[1]) == column
    else:
        assert 1 <= int(found[1]) <= len(text) + 1


@pytest.mark.parametrize(
    "text",
    ["(" * 500, "(" * 249 + ")" * 249, "-" * 499 + "1", "not " * 124, "abs(" * 125, "min(1," * 83, "(-" * 250],
)
def test_hostile_nesting_is_an_error_also_when_the_stack_is_nearly_full(text):
    def deep(levels):
        return deep(levels - 1) if levels else parse(text, NAMES)

    with pytest.raises(TableError):
        parse(text, NAMES)
    for left in (20, 40, 80, 160, 320):
        with pytest.raises(TableError):
            deep(sys.getrecursionlimit() - stack_depth() - left)


def stack_depth():
    frame, num = sys._getframe(), 0
    while frame is not None:
        frame, num = frame.f_back, num + 1
    return num


@pytest.mark.parametrize("level", ["({})", "abs({})"])
def test_parentheses_are_bounded(level):
    def nested(num):
        text = "1"
        for _ in range(num):
            text = level.format(text)
        return text + " < 2"

    assert holds(nested(MAX_DEPTH), show=[0]) == [True]
    with pytest.raises(TableError, match=naming(MAX_DEPTH)):
        parse(nested(MAX_DEPTH + 1), NAMES)


def test_the_deepest_nesting_is_read_with_room_on_the_stack():
    """Every level opened at the right of the weakest to the strongest operator: the most calls that a level takes."""
    text = "1<2 or 1<2 and not 0<1+2*-(" * 9 + "1" + ")" * 9
    level = "1 < 2 or 1 < 2 and not "
    assert holds(level * 10 + "(" * MAX_DEPTH + "1 < 2" + ")" * MAX_DEPTH, show=[0]) == [True]
    with pytest.raises(TableError, match=r"column \d"):  # conditions where numbers are expected
        parse(text, NAMES)


def test_long_texts_are_errors_and_long_chains_are_not():
    text = "show" + "+1" * 246 + " > 1"
    assert len(text) == MAX_CHARACTERS
    assert holds(text, show=[-245, -244]) == [False, True]
    with pytest.raises(TableError, match=naming(MAX_CHARACTERS, "1,000,000")):
        parse("1" * 1_000_000, NAMES)


@pytest.mark.slow
@settings(max_examples=examples(100), deadline=None)
@given(st.text(max_size=60) | st.lists(st.sampled_from([*SIGNS, *NAMES, *"()-,1", "not", "min"])).map(" ".join))
def test_any_text_is_a_condition_or_a_table_error(text):
    try:
        found = parse(text, NAMES)(dict.fromkeys(NAMES, np.arange(3)))
    except TableError:
        return
    assert found.shape == (3,)
