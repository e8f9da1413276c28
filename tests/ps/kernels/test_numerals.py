"""Numerals: every number of a text as Python's float and int read it, bit for bit."""

from __future__ import annotations

import struct
import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import names, naming
from support.searches import examples

from torchfleet.base.errors import DataError
from torchfleet.data.reading.formats import LineSource, MultiSlotParser
from torchfleet.data.slots import SampleLayout, Slot

INTS, FLOATS = SampleLayout([Slot("x")]), SampleLayout([Slot("x", dtype="float32")])
BEYOND = 3.4028235677973366e38  # half-way between the largest float32 and what would come next: rounds to infinity
BELOW = float(np.nextafter(BEYOND, 0))


def words_of(layout: SampleLayout, tokens: list[str]) -> np.ndarray:
    """The words of one line with all these values, without their count."""
    text = " ".join([str(len(tokens)), *tokens]) + "\n"
    (rows,) = MultiSlotParser(layout).read([text.encode()], LineSource("part"))
    assert rows.num == 1
    assert rows.words[0] == len(tokens)
    return rows.words[1:]


def read_floats(*tokens: str) -> np.ndarray:
    return words_of(FLOATS, list(tokens)).view(np.float32)


def read_ints(*tokens: str) -> list[int]:
    words = words_of(INTS, list(tokens))
    return words.view(np.int64).tolist()


def refusal(layout: SampleLayout, token: str) -> str:
    with pytest.raises(DataError) as caught:
        words_of(layout, [token])
    return str(caught.value)


def check_floats(tokens: list[str]) -> None:
    """Same bits as Python's float, rounded to float32; a number that float32 cannot hold is refused."""
    fitting = [token for token in tokens if abs(float(token)) < BEYOND]
    expected = np.array([float(token) for token in fitting], np.float64).astype(np.float32)
    found = read_floats(*fitting)
    wrong = np.flatnonzero(found.view(np.uint32) != expected.view(np.uint32))
    assert not len(wrong), [(fitting[i], found[i], expected[i]) for i in wrong[:3]]
    for token in set(tokens) - set(fitting):
        assert "float32" in refusal(FLOATS, token)


def many(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[list[str]]:
    return st.lists(strategy, min_size=1, max_size=60)


def plain(value: Fraction) -> str:
    """All digits of a fraction whose denominator is a power of two."""
    places = value.denominator.bit_length() - 1
    digits = str(abs(value.numerator) * 5**places).rjust(places + 1, "0")
    sign = "-" if value < 0 else ""
    return f"{sign}{digits[:-places]}.{digits[-places:]}" if places else sign + digits


def as_float(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


any_float32 = st.integers(0, 2**32 - 1).map(lambda bits: np.array(bits, np.uint32).view(np.float32).item())
any_double = st.integers(0, 2**64 - 1).map(as_float)
digits = st.text("0123456789", min_size=1, max_size=45)


@st.composite
def decimals(draw: st.DrawFn) -> str:
    """Whatever may stand for a number: signs, points anywhere, any number of digits, any exponent."""
    before, after = draw(st.one_of(st.just(""), digits)), draw(st.one_of(st.just(""), digits))
    if not before + after:
        before = "0"
    point = "." if after else draw(st.sampled_from(["", "."]))
    exponent = draw(
        st.one_of(
            st.just(""),
            st.tuples(
                st.sampled_from("eE"), st.sampled_from(["", "-", "+", "-0", "+00"]), st.integers(0, 400).map(str)
            ).map("".join),
        )
    )
    return draw(st.sampled_from(["", "-", "+"])) + before + point + after + exponent


# float32


@settings(max_examples=examples(60))
@given(
    many(
        st.one_of(any_float32, st.floats(width=32))
        .filter(np.isfinite)
        .map(lambda value: repr(np.float64(value)[()].item()))
    )
)
def test_the_repr_of_any_float32_gives_the_same_float32_back(tokens: list[str]) -> None:
    check_floats(tokens)


@settings(max_examples=examples(60))
@given(st.lists(any_float32.filter(np.isfinite), min_size=1, max_size=60))
def test_nine_digits_or_the_shortest_text_of_a_float32_give_the_same_float32_back(values: list[float]) -> None:
    expected = np.array(values, np.float32).view(np.uint32).tolist()
    for texts in ([f"{v:.8e}" for v in values], [str(np.float32(v)) for v in values]):
        assert read_floats(*texts).view(np.uint32).tolist() == expected


@settings(max_examples=examples(60))
@given(many(st.one_of(any_double, st.floats()).filter(np.isfinite).map(repr)))
def test_the_repr_of_any_double_is_rounded_as_python_and_numpy_do(tokens: list[str]) -> None:
    check_floats(tokens)


@settings(max_examples=examples(50))
@given(many(decimals()))
@example(["0e999999999999999999999", "0.0e-99999999999999999999", "00000000000000000000000000000000000000000000"])
@example(["1e-999999999999999999999", "0" * 30 + "1.5", "0." + "0" * 400 + "1e400"])
@example(["9007199254740993", "9007199254740993e0", "18446744073709551615", "18446744073709551616", "9" * 19, "9" * 20])
@example(["1e22", "1e23", "8.5e22", "9007199254740992e22", "9007199254740993e22", "1e-22", "1e-23", "3e-324", "2e-324"])
def test_decimal_numbers_of_any_form_are_read_as_python_reads_them(tokens: list[str]) -> None:
    check_floats(tokens)


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.integers(1, 10**19 - 1), st.integers(-345, 310)), min_size=1, max_size=60))
def test_up_to_nineteen_digits_with_any_power_of_ten_are_exact(parts: list[tuple[int, int]]) -> None:
    check_floats([f"{mantissa}e{power}" for mantissa, power in parts])


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(0x0010000000000000, 0x47EFFFFFE0000000), st.sampled_from([-1, 0, 1])),
        min_size=1,
        max_size=20,
    )
)
def test_numbers_half_way_between_two_doubles_go_to_the_even_one(parts: list[tuple[int, int]]) -> None:
    tokens = []
    for bits, nudge in parts:
        half = (Fraction(as_float(bits)) + Fraction(as_float(bits + 1))) / 2
        text = plain(half)
        # A digit far behind decides: just below, exactly on, just above.
        if nudge > 0:
            text += "1" if "." in text else ".1"
        elif nudge < 0:
            text = plain(half - Fraction(1, 2 ** (half.denominator.bit_length() + 3)))
        tokens.append(text)
    check_floats(tokens)


@settings(max_examples=examples(60))
@given(
    st.lists(
        st.tuples(st.integers(1, 0x7F7FFFFE), st.sampled_from([-1, 0, 1]), st.sampled_from([1, -1])),
        min_size=1,
        max_size=30,
    )
)
def test_numbers_half_way_between_two_float32s_go_to_the_even_one(parts: list[tuple[int, int, int]]) -> None:
    tokens = []
    for bits, nudge, sign in parts:
        low, high = np.array([bits, bits + 1], np.uint32).view(np.float32).tolist()
        half = (low + high) / 2  # exact in a double
        near = half if nudge == 0 else float(np.nextafter(half, nudge * np.inf))
        tokens += [repr(sign * near), f"{sign * near:.25e}", plain(Fraction(sign * near))]
    check_floats(tokens)


@pytest.mark.parametrize("power", [-342, -324, -65, -28, -27, -5, -4, 0, 22, 23, 24, 27, 28, 55, 308])
def test_the_borders_of_the_fast_path_are_exact(power: int) -> None:
    mantissas = [1, 3, 2**53 - 1, 2**53, 2**53 + 1, 2**54 + 2, 2**63, 2**64 - 1, 10**19 - 1, 9999999999999999999]
    near = [str(mantissa + step) for mantissa in mantissas for step in (-1, 0, 1) if mantissa + step > 0]
    check_floats([f"{mantissa}e{power}" for mantissa in near])


def test_float32s_smaller_than_the_normal_ones_are_kept() -> None:
    smallest = 2.0**-149
    tokens = [
        repr(smallest),
        repr(smallest * 0.5),
        repr(smallest * 0.5000001),
        repr(-smallest),
        "1.1754942e-38",
        "1e-46",
    ]
    check_floats(tokens)
    assert read_floats(repr(smallest)).tolist() == [smallest]
    assert read_floats("1e-60", "-1e-60").tolist() == [0.0, 0.0]


def test_the_sign_of_zero_is_kept() -> None:
    assert read_floats("0", "-0", "-0.0", "+0", "-0e5", "-1e-400").view(np.uint32).tolist() == [
        0,
        2**31,
        2**31,
        0,
        2**31,
        2**31,
    ]


@pytest.mark.parametrize("sign", ["", "-", "+"])
def test_the_largest_float32_is_read_and_the_next_number_refused(sign: str) -> None:
    largest = float(np.finfo(np.float32).max)
    assert abs(read_floats(sign + repr(largest), sign + repr(BELOW))).tolist() == [largest, largest]
    for token in (
        repr(BEYOND),
        "340282356779733661637539395458142568448",
        "3.5e38",
        "1e39",
        "1e400",
        "9" * 400,
        "1e999999999999",
    ):
        said = refusal(FLOATS, sign + token)
        assert names(said, "'x'", "float32")
        assert f"'{sign}{token[:6]}" in said


def test_thousands_of_digits_are_all_read() -> None:
    check_floats(
        [
            "0." + "1" * 5000,
            "1" * 30 + "." + "7" * 5000,
            "0" * 5000 + "5",
            "5" + "0" * 300 + "e-300",
            "1." + "0" * 3000 + "1",
        ]
    )


@each_of(
    "token",
    ["nan", "NaN", "-nan", "inf", "-inf", "+inf", "Infinity", ".", "-", "+", "-.", "e5", ".e5", "1e", "1e+", "1e-",
     "1e5.0", "1.2.3", "--1", "+-1", "1-", "0x10", "1f", "abc", "1,5", "1e5e5", "é", "１", "1\x00", "1\x0b", "1;"],
)  # fmt: skip
def test_what_is_no_finite_number_is_refused(token: str) -> None:
    assert "'x'" in refusal(FLOATS, token)


@each_of("position", range(18))
def test_a_strange_byte_at_any_place_of_a_number_is_found(position: int) -> None:
    """Digits are read eight at a time: a stranger among them must not be taken for one."""
    for layout in (INTS, FLOATS):
        for byte in (set(range(256)) - set(b"0123456789 \t\r\n.eE+-")) if position else set(b":/\xb0\xb5\xff\x80"):
            token = bytearray(b"123456789012345678")
            token[position] = byte
            with pytest.raises(DataError, match=naming("part", "line 1", "'x'")):
                list(MultiSlotParser(layout).read([b"1 " + bytes(token) + b"\n"], LineSource("part")))


def test_many_numbers_of_twenty_digits_in_one_line_take_time_in_proportion() -> None:
    def seconds(num: int) -> float:
        tokens = ["0.1234567890123456789012345"] * num
        begin = time.thread_time()
        assert (read_floats(*tokens) == np.float32(float(tokens[0]))).all()
        return time.thread_time() - begin

    seconds(10)
    assert seconds(16_000) < 1.0  # Python's own float() takes some milliseconds for all of them


# int64


@settings(max_examples=examples(50))
@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=60))
@example([-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 1, 2**63, 2**64 - 1])
@example([10**k for k in range(20)])
@example([10**k - 1 for k in range(1, 20)])
def test_integers_of_64_bits_keep_their_bits(values: list[int]) -> None:
    assert [found % 2**64 for found in read_ints(*map(str, values))] == [value % 2**64 for value in values]


@settings(max_examples=examples(60))
@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 60))
def test_zeros_in_front_change_nothing(value: int, num: int) -> None:
    token = ("-" if value < 0 else "") + "0" * num + str(abs(value))
    assert read_ints(token)[0] % 2**64 == value % 2**64


@settings(max_examples=examples(60))
@given(
    st.one_of(
        st.integers(2**64, 2**130),
        st.integers(-(2**130), -(2**63) - 1),
        st.sampled_from([2**64, -(2**63) - 1, 10**20, 2**128]),
    )
)
@example(2**64)
@example(2**64 + 5)
@example(-(2**63) - 1)
@example(-(2**64))
@example(10**4000)
def test_integers_beyond_64_bits_are_refused(value: int) -> None:
    assert names(refusal(INTS, str(value)), "part", "line 1", "'x'", "int64")


@pytest.mark.parametrize("value", [0, 7, 2**63 - 1])
def test_an_integer_may_have_a_plus_sign_as_in_python(value: int) -> None:
    assert read_ints(f"+{value}") == [int(f"+{value}")]


@each_of(
    "token",
    ["-", "+", "--1", "+-1", "1.0", "1e3", "0x10", "abc", "1-", "1,000", "nan", "é", "１", "1L", "1\x00", "1\x0b"],
)
def test_what_is_no_integer_is_refused(token: str) -> None:
    assert "'x'" in refusal(INTS, token)
