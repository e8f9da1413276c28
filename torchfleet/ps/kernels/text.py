"""From bytes of text to rows of words: the multi-slot format, and the raw rows of the Criteo challenge.

A row is one sample: for each slot a word with the count (only if it may vary), then the values: an int64 takes two
32-bit words, a float32 one.
"""

from __future__ import annotations

import math

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.intrinsics import load_word
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.numerals import GOOD, HARD, RANGE, digit_of, ends_token, read_float, read_int

# Why a line was refused; the result also has the slot and byte.
FINE, NO_COUNT, BAD_COUNT, WRONG_COUNT, NO_VALUE, BAD_INT, BAD_FLOAT, OUT_OF_RANGE, LEFT_OVER, EMPTY = range(10)
TOO_FEW_COLUMNS, TOO_MANY_COLUMNS, BAD_LABEL, BAD_NUMBER = range(10, 14)
# Places in a parser's result: where it stopped, words written, hard numbers, the reason, slot and place of a refusal.
STOPPED_AT, NUM_WORDS, NUM_HARD, REASON, SLOT, PLACE, EXTRA, RESULT_SIZE = range(8)

NEWLINE, TAB, RETURN, BLANK = np.uint8(10), np.uint8(9), np.uint8(13), np.uint8(32)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_U1, _U2, _U8 = np.uint64(1), np.uint64(2), np.uint64(8)
_MAX_COUNT = np.uint64((1 << 31) - 1)
_S32 = np.uint64(32)


@inlined
def skip_blanks(text_B: np.ndarray, at: np.uint64) -> np.uint64:
    while text_B[at] <= BLANK and text_B[at] != NEWLINE and ends_token(text_B[at]):
        at += _U1
    return at


@inlined
def put_int(words_W: np.ndarray, at: np.uint64, value: np.uint64) -> None:
    words_W[at] = np.uint32(value)
    words_W[at + _U1] = np.uint32(value >> _S32)


@kernel
def parse_slots(  # noqa: PLR0912, PLR0915  (one loop over bytes: calls out of it would take its state along)
    text_B: np.ndarray,
    begin: int,
    end: int,
    is_float_S: np.ndarray,
    dims_S: np.ndarray,
    tens_P: np.ndarray,
    fives_P2: np.ndarray,
    bits_1: np.ndarray,
    double_1: np.ndarray,
    words_W: np.ndarray,
    floats_W: np.ndarray,
    starts_N: np.ndarray,
    hard_H5: np.ndarray,
    result_R: np.ndarray,
) -> int:
    """Rows of the whole lines in text_B[begin:end], the last of which ends with a newline too; eight bytes follow.

    A fixed slot has its count in dims_S, others -1. Stops at the first malformed line, at the end, or when starts_N or
    hard_H5 might not hold another line. `hard_H5`: (word, byte, row, byte of its line, slot) of numbers left to Python.
    words_W (and its float view) has a word for every byte and some more.
    """
    at, stop = np.uint64(begin), np.uint64(end)
    num_words, num_hard, num_rows = np.uint64(0), 0, 0
    num_slots = len(dims_S)
    result_R[REASON] = FINE
    while at < stop and num_rows < len(starts_N) - 1:
        line, words_before, hard_before = at, num_words, num_hard
        starts_N[num_rows] = num_words
        reason, slot, place, extra, full = FINE, 0, at, 0, False
        at = skip_blanks(text_B, at)
        if text_B[at] == NEWLINE:
            reason = EMPTY
        while reason == FINE and slot < num_slots:
            at = skip_blanks(text_B, at)
            place = at
            if text_B[at] == NEWLINE:
                reason = NO_COUNT
                break
            count_bits, status = np.uint64(digit_of(text_B[at])), GOOD
            if count_bits < np.uint64(10) and text_B[at + _U1] == BLANK:  # nearly always
                at += _U1
            else:
                count_bits, at, status = read_int(text_B, at)
            if status != GOOD or count_bits > _MAX_COUNT:
                reason = BAD_COUNT
                break
            count, dim, is_float = np.int64(count_bits), dims_S[slot], is_float_S[slot]
            if dim < 0:
                words_W[num_words] = np.uint32(count_bits)
                num_words += _U1
            elif dim != count:
                reason, extra = WRONG_COUNT, count
                break
            for k in range(count):
                at = skip_blanks(text_B, at)
                place = at
                if text_B[at] == NEWLINE:
                    reason, extra = NO_VALUE, (count << 31) + k
                    break
                if is_float:
                    value, at, status = read_float(text_B, at, tens_P, fives_P2, bits_1, double_1)
                    floats_W[num_words] = np.float32(value)
                    if status == HARD:
                        if num_hard == len(hard_H5):
                            full = True
                            break
                        hard_H5[num_hard, 0], hard_H5[num_hard, 1], hard_H5[num_hard, 2] = num_words, place, num_rows
                        hard_H5[num_hard, 3], hard_H5[num_hard, 4] = line, slot
                        num_hard += 1
                    elif status != GOOD:
                        reason = OUT_OF_RANGE if status == RANGE else BAD_FLOAT
                        break
                    num_words += _U1
                else:
                    bits, at, status = read_int(text_B, at)
                    if status != GOOD:
                        reason = OUT_OF_RANGE if status == RANGE else BAD_INT
                        break
                    put_int(words_W, num_words, bits)
                    num_words += _U2
            if full or reason != FINE:
                break
            slot += 1
        if reason == FINE and not full:
            at = skip_blanks(text_B, at)
            place = at
            if text_B[at] != NEWLINE:
                reason = LEFT_OVER
        if reason != FINE or full:
            result_R[REASON], result_R[SLOT], result_R[PLACE], result_R[EXTRA] = reason, slot, place, extra
            at, num_words, num_hard = line, words_before, hard_before
            if full and hard_before == 0:
                num_hard = -1  # one line with more hard numbers than there is room for: the caller provides more
            break
        at += _U1
        num_rows += 1
    starts_N[num_rows] = num_words
    result_R[STOPPED_AT], result_R[NUM_WORDS], result_R[NUM_HARD] = at, num_words, num_hard
    return num_rows


@inlined
def hash_bytes(text_B: np.ndarray, begin: np.uint64, end: np.uint64, seed: np.uint64) -> np.uint64:
    """The string hash of docs/data.md, which must never change. Loads, but does not use, up to seven bytes behind the
    end.
    """
    h = mix(seed + _GOLDEN * (end - begin + _U1))
    at = begin
    while at + _U8 <= end:
        h = mix(h ^ load_word(text_B, at))
        at += _U8
    if at < end:
        h = mix(h ^ (load_word(text_B, at) & ((_U1 << ((end - at) * _U8)) - _U1)))
    return h


@kernel
def hash_all(text_B: np.ndarray, ends_N: np.ndarray, seed: np.uint64, hashes_N: np.ndarray) -> None:
    """Hashes of adjacent strings, followed by eight bytes; ends_N[i] is where string i ends."""
    begin = np.uint64(0)
    for i in range(len(ends_N)):
        end = np.uint64(ends_N[i])
        hashes_N[i] = hash_bytes(text_B, begin, end, seed)
        begin = end


@kernel
def parse_criteo(  # noqa: PLR0912
    text_B: np.ndarray,
    begin: int,
    end: int,
    is_ragged: bool,
    low_13: np.ndarray,
    range_13: np.ndarray,
    hash_size: np.uint64,
    log_scale: bool,
    words_W: np.ndarray,
    floats_W: np.ndarray,
    starts_N: np.ndarray,
    result_R: np.ndarray,
) -> int:
    """As parse_slots, for lines of `label \\t 13 integers \\t 26 strings`. SLOT is the column in a refusal."""
    at, stop = np.uint64(begin), np.uint64(end)
    num_words, num_rows = np.uint64(0), 0
    result_R[REASON] = FINE
    while at < stop and num_rows < len(starts_N) - 1:
        line, row = at, num_words
        starts_N[num_rows] = row
        reason, column, place, is_last = FINE, 0, at, False
        label = np.uint64(0)
        if text_B[at] == NEWLINE or (text_B[at] == RETURN and text_B[at + _U1] == NEWLINE):
            reason = EMPTY
        while reason == FINE and not is_last:
            place = at
            while text_B[at] != TAB and text_B[at] != NEWLINE:
                at += _U1
            is_last = text_B[at] == NEWLINE
            behind = at - _U1 if is_last and at > place and text_B[at - _U1] == RETURN else at
            if column == 0:
                label = np.uint64(digit_of(text_B[place])) if behind == place + _U1 else _U2
                if label > _U1:
                    reason = BAD_LABEL
            elif column < 14:
                value, good = number(text_B, place, behind)
                if not good:
                    reason = BAD_NUMBER
                value = (value - low_13[column - 1]) / range_13[column - 1] if behind > place else 0.0
                if log_scale:
                    value = math.log1p(max(value, 0.0))
                floats_W[num_words] = np.float32(value)
                num_words += _U1
            elif column < 40:
                if is_ragged:
                    words_W[num_words] = np.uint32(1)
                    num_words += _U1
                put_int(words_W, num_words, hash_bytes(text_B, place, behind, np.uint64(column - 13)) % hash_size)
                num_words += _U2
            at += _U1
            if reason == FINE:
                column += 1
        if reason == FINE and column != 40:
            reason = TOO_FEW_COLUMNS if column < 40 else TOO_MANY_COLUMNS
        if reason != FINE:
            result_R[REASON], result_R[SLOT], result_R[PLACE], result_R[EXTRA] = reason, column, place, 0
            at, num_words = line, row
            break
        put_int(words_W, num_words, label)
        num_words += _U2
        num_rows += 1
    starts_N[num_rows] = num_words
    result_R[STOPPED_AT], result_R[NUM_WORDS], result_R[NUM_HARD] = at, num_words, 0
    return num_rows


@inlined
def number(text_B: np.ndarray, first: np.uint64, end: np.uint64) -> tuple[float, bool]:
    """(a decimal integer, 0 for an empty field; whether it is valid: at most 15 digits)."""
    negative = end > first and text_B[first] == np.uint8(45)
    at = first + np.uint64(negative)
    value = np.int64(0)
    good = end - at <= np.uint64(15) and not (negative and at == end)
    while at < end:
        digit = digit_of(text_B[at])
        good = good and digit < np.uint8(10)
        value = value * 10 + np.int64(digit)
        at += _U1
    return np.float64(-value if negative else value), good
