"""Counts the words in blocks of text, looks them up, writes them as numbers, and reads such numbers.

White space is blank, tab, newline, carriage return, vertical tab and form feed; all other bytes are parts of words. A
text holds whole words only, from `begin` to `end`, and eight blanks behind its end, which stop every search.

A map from words to indices, 0, 1, 2, ... in order of first appearance, is kept in four arrays:

- slots_S, a power of two: `tag << 32 | index + 1` or 0 when empty, where the tag is the hash's high half and its low
  bits are the home; a word whose home is taken is stored in the next empty slot. At most half of the slots are taken.
- entries_D3: where the word begins in the arena, its size, its count.
- arena_A: the words' bytes one behind the other, with eight bytes to spare.
- state: how many words there are, how many bytes of the arena are used, and the salt of the hash.

Two words are the same if all their bytes are the same: colliding hashes cost time, but never mix up words.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.intrinsics import load_word, trailing_zeros
from torchfleet.ps.kernels.jit import inlined, kernel
from torchfleet.ps.kernels.numerals import read_digits
from torchfleet.ps.kernels.text import NEWLINE, hash_bytes

PADDING = b" " * 8
NUM_WORDS, ARENA_USED, SALT, MAP_STATE_SIZE = range(4)  # places in a map's `state`
START, SIZE, COUNT = range(3)  # places in an entry
# Places in the state of a writer of ids: bytes written, whether the line has words, words written, words read, unknown.
OUT_USED, OUT_OPEN, NUM_WRITTEN, NUM_READ, NUM_UNKNOWN, WRITER_STATE_SIZE = range(6)
# Places in the state of a reader of ids: ids held, how many of them are whole lines, whether the last line has words,
# words read, and why and where it stopped.
NUM_IDS, WHOLE_LINES, IN_OPEN, IDS_READ, REASON, PLACE, READER_STATE_SIZE = range(7)
FINE, NO_ID, TOO_LARGE = range(3)
END_OF_LINE = -1

_BLANK = np.uint8(32)
_MAX_ID_TEXT = 12  # bytes of an id with what stands before it, and a newline
_U0, _U1, _U3, _U8, _U10, _S11, _S32 = (np.uint64(n) for n in (0, 1, 3, 8, 10, 11, 32))
_LOW = np.uint64(0xFFFFFFFF)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONES = 0x0101010101010101
_HIGH_BITS, _LOW_BITS = np.uint64(0x80 * _ONES), np.uint64(0x7F * _ONES)
_FROM_9, _FROM_14, _BLANKS = np.uint64((0x80 - 9) * _ONES), np.uint64((0x80 - 14) * _ONES), np.uint64(32 * _ONES)


@inlined
def is_space(byte: np.uint8) -> bool:
    return byte == _BLANK or np.uint8(byte - np.uint8(9)) < np.uint8(5)


@inlined
def word_end(text_B: np.ndarray, at: np.uint64) -> np.uint64:
    """Where the first white space from `at` on stands. Eight bytes at a time; no sum carries into the next byte."""
    spaces = _U0
    while True:
        word = load_word(text_B, at)
        low = word & _LOW_BITS
        from_9_to_13 = (low + _FROM_9) & ~(low + _FROM_14) & ~word
        other = word ^ _BLANKS
        spaces = (from_9_to_13 | ~(((other & _LOW_BITS) + _LOW_BITS) | other)) & _HIGH_BITS
        if spaces != _U0:
            break
        at += _U8
    return at + (trailing_zeros(spaces) >> _U3)


@kernel
def behind_last_space(text_B: np.ndarray) -> int:
    """The position behind the last white space; 0 without white space."""
    at = len(text_B)
    while at > 0 and not is_space(text_B[at - 1]):
        at -= 1
    return at


@inlined
def same_bytes(a_A: np.ndarray, a: np.uint64, b_B: np.ndarray, b: np.uint64, size: np.uint64) -> bool:
    done = _U0
    while done + _U8 <= size:
        if load_word(a_A, a + done) != load_word(b_B, b + done):
            return False
        done += _U8
    rest = (_U1 << ((size - done) * _U8)) - _U1
    return ((load_word(a_A, a + done) ^ load_word(b_B, b + done)) & rest) == _U0


@inlined
def slot_of(
    text_B: np.ndarray,
    begin: np.uint64,
    end: np.uint64,
    hashed: np.uint64,
    slots_S: np.ndarray,
    entries_D3: np.ndarray,
    arena_A: np.ndarray,
) -> np.uint64:
    """The slot of the word text_B[begin:end], or the empty one where it belongs."""
    mask = np.uint64(len(slots_S) - 1)
    at, size = hashed & mask, end - begin
    while slots_S[at] != _U0:
        if slots_S[at] >> _S32 == hashed >> _S32:
            index = (slots_S[at] & _LOW) - _U1
            if np.uint64(entries_D3[index, SIZE]) == size and same_bytes(
                arena_A, np.uint64(entries_D3[index, START]), text_B, begin, size
            ):
                break
        at = (at + _U1) & mask
    return at


@kernel
def count_words(
    text_B: np.ndarray,
    begin: int,
    end: int,
    slots_S: np.ndarray,
    entries_D3: np.ndarray,
    arena_A: np.ndarray,
    state: np.ndarray,
) -> int:
    """Count the words of text_B[begin:end]. Stops before a new word for which there is no room; returns
    the position.
    """
    at, stop, salt = np.uint64(begin), np.uint64(end), np.uint64(state[SALT])
    while at < stop:
        if is_space(text_B[at]):
            at += _U1
            continue
        behind = word_end(text_B, at)
        hashed = hash_bytes(text_B, at, behind, salt)
        place = slot_of(text_B, at, behind, hashed, slots_S, entries_D3, arena_A)
        if slots_S[place] != _U0:
            entries_D3[(slots_S[place] & _LOW) - _U1, COUNT] += 1
        else:
            num, start, size = state[NUM_WORDS], state[ARENA_USED], np.int64(behind - at)
            if num == len(entries_D3) or 2 * num >= len(slots_S) or start + size + 8 > len(arena_A):
                break
            for k in range(size):
                arena_A[start + k] = text_B[np.int64(at) + k]
            entries_D3[num, START], entries_D3[num, SIZE], entries_D3[num, COUNT] = start, size, 1
            slots_S[place] = (hashed >> _S32) << _S32 | np.uint64(num + 1)
            state[NUM_WORDS], state[ARENA_USED] = num + 1, start + size
        at = behind
    return np.int64(min(at, stop))


@kernel
def fill_slots(slots_S: np.ndarray, entries_D3: np.ndarray, arena_A: np.ndarray, state: np.ndarray) -> None:
    """Insert all words of the map into empty slots."""
    mask, salt = np.uint64(len(slots_S) - 1), np.uint64(state[SALT])
    for i in range(state[NUM_WORDS]):
        begin = np.uint64(entries_D3[i, START])
        hashed = hash_bytes(arena_A, begin, begin + np.uint64(entries_D3[i, SIZE]), salt)
        at = hashed & mask
        while slots_S[at] != _U0:
            at = (at + _U1) & mask
        slots_S[at] = (hashed >> _S32) << _S32 | np.uint64(i + 1)


@inlined
def put_id(out_O: np.ndarray, at: int, value: np.uint64) -> int:
    """Write the number in decimal; returns the position behind it."""
    num_digits, rest = 1, value // _U10
    while rest != _U0:
        num_digits += 1
        rest //= _U10
    for k in range(at + num_digits - 1, at - 1, -1):
        out_O[k] = np.uint8(np.uint64(48) + value % _U10)
        value //= _U10
    return at + num_digits


@kernel
def encode_words(
    text_B: np.ndarray,
    begin: int,
    end: int,
    slots_S: np.ndarray,
    entries_D3: np.ndarray,
    arena_A: np.ndarray,
    map_state: np.ndarray,
    ids_D1: np.ndarray,
    keep_D1: np.ndarray,
    unknown: int,
    seed: np.uint64,
    out_O: np.ndarray,
    state: np.ndarray,
) -> int:
    """Writes the ids of the words of text_B[begin:end] that are kept, line by line; stops when out_O might not hold
    another one, and returns the place.

    ids_D1[i] is the id of the map's word i, and its last element the id of words that the map does not have; words with
    id -1 are left out. Word number n of the whole text, from 0, is kept if draw(seed, n) < keep_D1[i], where a draw is
    53 bits.
    """
    at, stop, salt = np.uint64(begin), np.uint64(end), np.uint64(map_state[SALT])
    stream = mix(mix(seed) + _GOLDEN)
    used, is_open, number = state[OUT_USED], state[OUT_OPEN], np.uint64(state[NUM_READ])
    last = np.uint64(len(ids_D1) - 1)
    while at < stop and used + _MAX_ID_TEXT <= len(out_O):
        if is_space(text_B[at]):
            if text_B[at] == NEWLINE and is_open:
                out_O[used] = NEWLINE
                used, is_open = used + 1, 0
            at += _U1
            continue
        behind = word_end(text_B, at)
        hashed = hash_bytes(text_B, at, behind, salt)
        slot = slots_S[slot_of(text_B, at, behind, hashed, slots_S, entries_D3, arena_A)]
        index = (slot & _LOW) - _U1 if slot != _U0 else last
        word = ids_D1[index]
        state[NUM_UNKNOWN] += word == unknown
        if word >= 0 and mix(stream + number * _GOLDEN) >> _S11 < keep_D1[index]:
            if is_open:
                out_O[used] = _BLANK
                used += 1
            used, is_open = put_id(out_O, used, np.uint64(word)), 1
            state[NUM_WRITTEN] += 1
        number += _U1
        at = behind
    state[OUT_USED], state[OUT_OPEN], state[NUM_READ] = used, is_open, np.int64(number)
    return np.int64(min(at, stop))


@kernel
def write_ids(ids_N: np.ndarray, begin: int, max_words: int, out_O: np.ndarray, state: np.ndarray) -> int:
    """Writes ids_N[begin:] as text, at most `max_words` and as far as out_O has room; returns the place."""
    used, is_open, num, at = state[OUT_USED], state[OUT_OPEN], 0, begin
    while at < len(ids_N) and used + _MAX_ID_TEXT <= len(out_O):
        if ids_N[at] == END_OF_LINE:
            if is_open:
                out_O[used] = NEWLINE
                used, is_open = used + 1, 0
        elif num == max_words:
            break
        else:
            if is_open:
                out_O[used] = _BLANK
                used += 1
            used, is_open = put_id(out_O, used, np.uint64(ids_N[at])), 1
            num += 1
        at += 1
    state[OUT_USED], state[OUT_OPEN] = used, is_open
    state[NUM_WRITTEN] += num
    return at


@kernel
def parse_ids(text_B: np.ndarray, begin: int, end: int, num_ids: int, ids_N: np.ndarray, state: np.ndarray) -> int:
    """Reads ids from text_B[begin:end] into ids_N, behind those that it holds, and END_OF_LINE after every line that
    has words. Stops at a word that is no number below num_ids (state tells why and where), and when ids_N is full."""
    at, stop, limit = np.uint64(begin), np.uint64(end), np.uint64(num_ids)
    num, whole, is_open, num_read = state[NUM_IDS], state[WHOLE_LINES], state[IN_OPEN], 0
    state[REASON] = FINE
    while at < stop:
        if is_space(text_B[at]):
            if text_B[at] == NEWLINE and is_open:
                if num == len(ids_N):
                    break
                ids_N[num] = END_OF_LINE
                num += 1
                whole, is_open = num, 0
            at += _U1
            continue
        if num == len(ids_N):
            break
        value, behind = read_digits(text_B, at, _U0)
        if behind == at or not is_space(text_B[behind]):
            state[REASON], state[PLACE] = NO_ID, np.int64(at)
            break
        if value >= limit or behind - at > _U10:
            state[REASON], state[PLACE] = TOO_LARGE, np.int64(at)
            break
        ids_N[num] = np.int32(value)
        num, num_read, is_open, at = num + 1, num_read + 1, 1, behind
    state[NUM_IDS], state[WHOLE_LINES], state[IN_OPEN] = num, whole, is_open
    state[IDS_READ] += num_read
    return np.int64(min(at, stop))
