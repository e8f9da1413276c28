"""The kernels once more, in plain Python and numpy: short, slow, and what every kernel is held against.

Arithmetic on weights is float32 and in the order of the kernels' docstrings. numpy and numba both round every
operation by itself (no fused multiply-add), so twin and kernel agree to the bit.
"""

from __future__ import annotations

import math

import numpy as np

from torchfleet.ps.kernels import hashmap, packed_buckets, random
from torchfleet.ps.kernels.hashing import NUM_SECRETS
from torchfleet.ps.kernels.hashmap import BUCKET, MOVED, NEW, NEXT_ROW, NUM_FREE, NUM_KEYS, OLD
from torchfleet.ps.tables.rows.packed_map import PackedMap

MASK = (1 << 64) - 1
M1, M2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
OWNER_SALT = 0x6A09E667F3BCC909
GOLDEN = 0x9E3779B97F4A7C15
CUT = 0.022750131948179195
F = np.float32


# kernels/hashing


def mix(x):
    """SplitMix64's finaliser, of a Python int or of an array of uint64."""
    x = (x ^ (x >> 30)) * M1 & MASK
    x = (x ^ (x >> 27)) * M2 & MASK
    return x ^ (x >> 31)


def unmix(x: int) -> int:
    """The inverse of `mix`: undo its steps from the last to the first."""
    x = _unshift(x, 31) * pow(M2, -1, 1 << 64) & MASK
    x = _unshift(x, 27) * pow(M1, -1, 1 << 64) & MASK
    return _unshift(x, 30)


def _unshift(y: int, shift: int) -> int:
    """The x with y = x ^ (x >> shift): every pass makes `shift` more of the high bits right."""
    x = y
    for _ in range(64 // shift):
        x = y ^ (x >> shift)
    return x


def secret(seed: int) -> list[int]:
    """A secret of a map, from a number."""
    return [mix((seed + (i + 1) * GOLDEN) & MASK) for i in range(NUM_SECRETS)]


def scramble(key, secret: list[int]):
    """Four rounds over the halves, of a Python int or of an array of uint64: the low half changes first."""
    halves = [key >> 32, key & 0xFFFFFFFF]
    for i in range(4):
        other, half = halves
        halves = [half ^ (((secret[2 * i] * other & MASK) + secret[2 * i + 1] & MASK) >> 32), other]
    return halves[0] << 32 | halves[1]


def unscramble(hashed: int, secret: list[int]) -> int:
    """The inverse of `scramble`: undo its rounds from the last to the first."""
    halves = [hashed >> 32, hashed & 0xFFFFFFFF]
    for i in reversed(range(4)):
        half, other = halves
        halves = [other, half ^ ((secret[2 * i] * other + secret[2 * i + 1] & MASK) >> 32)]
    return halves[0] << 32 | halves[1]


def owner_of(key: int, num_owners: int) -> int:
    return (mix(key ^ OWNER_SALT) >> 32) * num_owners >> 32


# kernels/hashmap


def key_with_tag(tag: int, low: int, secret: list[int]) -> int:
    """A key whose hash under this secret is `tag` in its high and `low` in its low half."""
    return unscramble(tag << 32 | low, secret)


def _secret_place(index) -> int:
    return packed_buckets.SECRET if isinstance(index, PackedMap) else hashmap.SECRET


def secret_of(index) -> list[int]:
    return index._state[_secret_place(index) :].view(np.uint64).tolist()


def set_secret(index, seed: int) -> list[int]:
    """Of a map that has no keys yet. Returns its secret."""
    assert not index.num_keys
    index._state[_secret_place(index) :] = np.array(secret(seed), np.uint64).view(np.int64)
    return secret(seed)


def keys_and_rows(index) -> dict[int, int]:
    """What a KeyMap holds, read from its slots; asserts all that a search relies on.

    Every bucket is filled from its front; every bucket between a key's home and its own is full; the last bucket is
    empty; a key is in the array that `moved` says; no row has two keys, and a row is either in use or on the free list.
    """
    moved = int(index._state[MOVED])
    found: dict[int, int] = {}
    for which in (OLD, NEW):
        if which == OLD and not index._migrating:
            continue
        num_buckets = int(index._num_buckets[which])
        slots = index._slots[which].reshape(-1, BUCKET)
        taken = slots != 0
        assert not taken[-1].any(), "the last bucket must stay empty"
        counts = taken.sum(axis=1)
        assert (taken == (np.arange(BUCKET) < counts[:, None])).all(), "a bucket is filled from its front"
        numbers = np.arange(len(slots))
        # The first bucket that is not full, from each bucket on: where a search that starts there ends.
        ends = np.minimum.accumulate(np.where(counts < BUCKET, numbers, len(slots))[::-1])[::-1]
        first = moved if which == OLD else 0  # old buckets below it are leftovers that are not read
        bucket, place = np.nonzero(taken[first:])
        bucket += first
        slot = slots[bucket, place]
        rows = ((slot & 0xFFFFFFFF) - 1).astype(np.int64)
        keys = np.ascontiguousarray(index.words[rows, :2]).view(np.uint64).reshape(-1)
        tags = slot >> np.uint64(32)
        assert (tags == scramble(keys, secret_of(index)) >> 32).all(), "a slot's tag is that of its row's key"
        homes = (tags * np.uint64(num_buckets) >> np.uint64(32)).astype(np.int64)
        assert (homes <= bucket).all()
        assert (bucket <= ends[homes]).all(), "a bucket between a key's home and its own is not full"
        if index._migrating:
            old_homes = tags * index._num_buckets[OLD] >> np.uint64(32)
            assert ((old_homes < moved) == (which == NEW)).all(), "a key is in the wrong one of the two arrays"
        held = dict(zip(keys.tolist(), rows.tolist(), strict=True))
        assert len(held) == len(keys), "a key has two slots"
        assert not held.keys() & found.keys()
        found |= held
    free = index._free_rows[: int(index._state[NUM_FREE])].tolist()
    assert sorted([*found.values(), *free]) == list(range(int(index._state[NEXT_ROW])))
    assert len(found) == int(index._state[NUM_KEYS])
    return found


# kernels/packed_buckets


def packed_keys_and_rows(index) -> dict[int, int]:
    """What a PackedMap holds, read from its tags; asserts all that a search relies on.

    Every bucket is filled from its front; every bucket between a key's home and its own is full; the last bucket is
    empty; a tag is that of the key; an empty place has no marks.
    """
    num_old, num_new = index._num_buckets.tolist()
    unmoved = int(index._state[packed_buckets.UNMOVED])
    tags = index._tags.view(np.uint8)[: len(index._words)].reshape(-1, packed_buckets.BUCKET)
    taken = tags != 0
    assert not taken[-1].any(), "the last bucket must stay empty"
    counts = taken.sum(axis=1)
    assert (taken == (np.arange(packed_buckets.BUCKET) < counts[:, None])).all(), "a bucket is filled from its front"
    ends = np.minimum.accumulate(np.where(counts < packed_buckets.BUCKET, np.arange(len(tags)), len(tags))[::-1])[::-1]
    bucket, place = np.nonzero(taken)
    rows = bucket * packed_buckets.BUCKET + place
    keys = np.ascontiguousarray(index._words[rows, :2]).view(np.uint64).reshape(-1)
    hashes = scramble(keys, secret_of(index))
    high, low = hashes >> np.uint64(32), hashes & np.uint64(0xFFFFFFFF)
    assert (tags[bucket, place] == 1 + (low * np.uint64(255) >> np.uint64(32))).all(), "a tag is not that of its key"
    old_homes, new_homes = (
        (high * np.uint64(num) >> np.uint64(32)).astype(np.int64) for num in (max(num_old, 1), num_new)
    )
    homes = np.where(old_homes < unmoved, old_homes, new_homes)
    assert (homes <= bucket).all()
    assert (bucket <= ends[homes]).all(), "a bucket between a key's home and its own is not full"
    both = index._marks[: len(tags), None] >> np.arange(packed_buckets.BUCKET, dtype=np.uint32) & np.uint32(0x10001)
    assert not both[~taken].any(), "an empty place is marked"
    found = dict(zip(keys.tolist(), rows.tolist(), strict=True))
    assert len(found) == len(keys) == index.num_keys, "a key has two rows"
    return found


# kernels/merge


def unique(keys):
    places: dict[int, int] = {}
    inverse = [places.setdefault(key, len(places)) for key in keys.tolist()]
    return np.array(list(places), np.uint64), np.array(inverse, np.int32)


def sum_by_key(keys, grads):
    """np.add.at is unbuffered: it adds one row after the other, in order and in float32.

    From -0.0 on, which leaves every number as it is: 0.0 + -0.0 would lose the sign.
    """
    distinct, inverse = unique(keys)
    sums = np.full((len(distinct), grads.shape[1]), -0.0, F)
    np.add.at(sums, inverse, grads)
    return distinct, sums


# kernels/partition


def group_by_owner(keys, owners, num_owners):
    """(starts, keys by owner, their places)."""
    places = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[places], np.arange(num_owners + 1))
    return starts, keys[places], places


# kernels/random


def _ratio(terms, x: float) -> float:
    above = below = 0.0
    for over, under in reversed(terms.tolist()):
        above, below = above * x + over, below * x + under
    return above / below


def _log(x: float) -> float:
    exponent = 0
    while x < 0.7071067811865476:
        x, exponent = x * 2.0, exponent - 1
    s = (x - 1.0) / (x + 1.0)
    total = 0.0
    for k in range(23, 0, -2):
        total = total * (s * s) + 1.0 / k
    return 2.0 * s * total + exponent * 0.6931471805599453


def normal_quantile(p: float) -> float:
    """The kernel's steps; that they are a quantile function is checked against the standard library's."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(random._CENTRE, 0.180625 - q * q)
    r = math.sqrt(-_log(p if q < 0 else 1.0 - p))
    x = _ratio(random._TAIL, r - 1.6) if r <= 5.0 else _ratio(random._FAR_TAIL, r - 5.0)
    return -x if q < 0 else x


def uniform(base: int, d: int) -> float:
    bits = mix((base + (d + 1) * GOLDEN) & MASK) >> 11
    return min((bits + 0.5) / 2.0**53, 0.9999999999999999)


def first_value(stream: int, key: int, dim: int, kind: str, a: float = 0.0, b: float = 0.0):
    """The first value of one row."""
    base = mix((stream + mix((key + GOLDEN) & MASK)) & MASK)
    of = {
        "constant": lambda u: a,
        "uniform": lambda u: a + (b - a) * u,
        "normal": lambda u: a + b * normal_quantile(u),
        "truncated_normal": lambda u: a + b * normal_quantile(CUT + (1.0 - 2.0 * CUT) * u),
    }[kind]
    return np.array([of(uniform(base, d)) for d in range(dim)], F)


# kernels/rows: a store here is two-dimensional, (row, word)


def gather(store, offset, rows, num_words):
    found = store[np.maximum(rows, 0), offset : offset + num_words].copy()
    found[rows < 0] = 0
    return found


def scatter(store, offset, rows, values) -> None:
    for row, value in zip(rows, values, strict=True):
        store[row, offset : offset + len(value)] = value


def row_sgd(store, offset, rows, grads, lr, low=-np.inf, high=np.inf) -> None:
    w = slice(offset, offset + grads.shape[1])
    store[rows, w] = np.clip(store[rows, w] - F(lr) * grads, F(low), F(high))


def row_adagrad(store, offset, rows, grads, lr, eps, low=-np.inf, high=np.inf) -> None:
    dim = grads.shape[1]
    w, s = slice(offset, offset + dim), slice(offset + dim, offset + 2 * dim)
    sums = store[rows, s] + grads * grads
    store[rows, s] = sums
    store[rows, w] = np.clip(store[rows, w] - F(lr) * (grads / (np.sqrt(sums) + F(eps))), F(low), F(high))


def row_adam(store, offset, rows, grads, lr, beta1, beta2, eps, step, low=-np.inf, high=np.inf) -> None:
    dim = grads.shape[1]
    w, m, v = (slice(offset + i * dim, offset + (i + 1) * dim) for i in range(3))
    rate = F(lr * math.sqrt(1 - beta2**step) / (1 - beta1**step))
    means, squares = store[rows, m], store[rows, v]
    means = means + (grads - means) * F(1 - beta1)
    squares = squares + (grads * grads - squares) * F(1 - beta2)
    store[rows, m], store[rows, v] = means, squares
    store[rows, w] = np.clip(store[rows, w] - rate * (means / (np.sqrt(squares) + F(eps))), F(low), F(high))


# kernels/sparse_rules


def _words(offset, dim, *numbers):
    return [slice(offset + i * dim, offset + (i + 1) * dim) for i in numbers]


def row_momentum_sgd(store, offset, rows, grads, lr, momentum, dampening, nesterov, low=-np.inf, high=np.inf) -> None:
    w, u = _words(offset, grads.shape[1], 0, 1)
    old = store[rows, u]
    is_first = (old == 0) & np.signbit(old)
    new = np.where(is_first, grads, F(momentum) * old + F(1 - dampening) * grads) + F(0)
    store[rows, u] = new
    move = grads + F(momentum) * new if nesterov else new
    store[rows, w] = np.clip(store[rows, w] - F(lr) * move, F(low), F(high))


def mean_square(grads):
    """In eight lanes; what is over goes to the first, one after the other."""
    dim = grads.shape[1]
    lanes = np.zeros((len(grads), 8), F)
    for start in range(0, dim - dim % 8, 8):
        lanes += grads[:, start : start + 8] * grads[:, start : start + 8]
    for d in range(dim - dim % 8, dim):
        lanes[:, 0] += grads[:, d] * grads[:, d]
    pairs = lanes[:, :4] + lanes[:, 4:]
    return (((pairs[:, 0] + pairs[:, 2]) + (pairs[:, 1] + pairs[:, 3])) / F(dim))[:, None]


def row_rowwise_adagrad(store, offset, rows, grads, lr, eps, momentum, low=-np.inf, high=np.inf) -> None:
    dim = grads.shape[1]
    w, u = _words(offset, dim, 0, 1)
    s = offset + (2 * dim if momentum else dim)
    total = store[rows, s : s + 1] + mean_square(grads)
    store[rows, s : s + 1] = total
    scale = np.sqrt(total) + F(eps)
    if momentum:
        store[rows, u] = F(momentum) * store[rows, u] + grads / scale
        move = F(lr) * store[rows, u]
    else:
        move = F(lr) / scale * grads
    store[rows, w] = np.clip(store[rows, w] - move, F(low), F(high))


def row_rmsprop(store, offset, rows, grads, lr, alpha, eps, centered, momentum, low=-np.inf, high=np.inf) -> None:
    w, s, m, u = _words(offset, grads.shape[1], 0, 1, 2, 3 if centered else 2)
    state = [store[rows, s], store[rows, m] if centered else None, store[rows, u] if momentum else None]
    weights = store[rows, w]
    dense_rmsprop(weights, *state, grads, lr, alpha, eps, centered, momentum, 0.0, 1.0)
    store[rows, w] = np.clip(weights, F(low), F(high))
    for words, values in zip((s, m, u), state, strict=True):
        if values is not None:
            store[rows, words] = values


def row_ftrl(store, offset, rows, grads, lr, l1, l2, beta, power, low=-np.inf, high=np.inf) -> None:
    w, z, n = _words(offset, grads.shape[1], 0, 1, 2)
    weights, sums, squares = store[rows, w], store[rows, z], store[rows, n]
    dense_ftrl(weights, sums, squares, grads, lr, l1, l2, beta, power)
    store[rows, w], store[rows, z], store[rows, n] = np.clip(weights, F(low), F(high)), sums, squares


def row_lion(store, offset, rows, grads, lr, beta1, beta2, low=-np.inf, high=np.inf) -> None:
    w, m = _words(offset, grads.shape[1], 0, 1)
    weights, means = store[rows, w], store[rows, m]
    dense_lion(weights, means, grads, lr, beta1, beta2, 0.0, 1.0)
    store[rows, w], store[rows, m] = np.clip(weights, F(low), F(high)), means


# kernels/dense_rules


def dense_sgd(weights, velocity, grads, lr, momentum, dampening, nesterov, decay, shrink, step) -> None:
    shrunk = weights * F(shrink)
    move = grads + F(decay) * shrunk
    if momentum > 0:
        velocity[:] = move if step == 1 else F(momentum) * velocity + F(1 - dampening) * move
        move = move + F(momentum) * velocity if nesterov else velocity
    weights[:] = shrunk - F(lr) * move


def dense_adagrad(weights, sums, grads, lr, eps, decay, shrink) -> None:
    shrunk = weights * F(shrink)
    g = grads + F(decay) * shrunk
    sums += g * g
    weights[:] = shrunk - F(lr) * g / (np.sqrt(sums) + F(eps))


def dense_adam(weights, means, squares, grads, lr, beta1, beta2, eps, decay, shrink, step) -> None:
    rate, root = F(lr / (1 - beta1**step)), F(math.sqrt(1 - beta2**step))
    shrunk = weights * F(shrink)
    g = grads + F(decay) * shrunk
    means += F(1 - beta1) * (g - means)
    squares[:] = F(beta2) * squares + F(1 - beta2) * (g * g)
    weights[:] = shrunk - rate * means / (np.sqrt(squares) / root + F(eps))


def dense_scaled_momentum(weights, velocity, sums, grads, lr, eps, momentum, decay, shrink) -> None:
    shrunk = weights * F(shrink)
    g = grads + F(decay) * shrunk
    sums += g * g
    velocity[:] = F(momentum) * velocity + g / (np.sqrt(sums) + F(eps))
    weights[:] = shrunk - F(lr) * velocity


def dense_rmsprop(weights, squares, means, velocity, grads, lr, alpha, eps, centered, momentum, decay, shrink) -> None:
    shrunk, mean = weights * F(shrink), F(0)
    g = grads + F(decay) * shrunk
    squares[:] = F(alpha) * squares + F(1 - alpha) * (g * g)
    if centered:
        means += F(1 - alpha) * (g - means)
        mean = means
    move = g / (np.sqrt(np.maximum(squares - mean * mean, F(0))) + F(eps))
    if momentum:
        velocity[:] = F(momentum) * velocity + move
        move = velocity
    weights[:] = shrunk - F(lr) * move


def dense_ftrl(weights, sums, squares, grads, lr, l1, l2, beta, power) -> None:
    """As in the paper. No bounds: numbers that reach 2^100 are no part of the comparisons."""

    def root(n):
        return np.sqrt(n) if power == 0.5 else n ** F(power)

    before = root(squares)
    squares += grads * grads
    sums += grads - (root(squares) - before) * weights / F(lr)
    over = np.abs(sums) - F(l1)
    size = over / ((F(beta) + root(squares)) / F(lr) + F(l2))
    weights[:] = np.where(over <= 0, F(0), -np.sign(sums) * size)


def dense_lion(weights, means, grads, lr, beta1, beta2, decay, shrink) -> None:
    shrunk = weights * F(shrink)
    g = grads + F(decay) * shrunk
    weights[:] = shrunk - F(lr) * np.sign(F(beta1) * means + F(1 - beta1) * g)
    means[:] = F(beta2) * means + F(1 - beta2) * g


def same_bits(a, b) -> bool:
    """Equal to the bit, except that any NaN equals any other: their payload is no part of IEEE arithmetic."""
    return a.shape == b.shape and bool(((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))).all())
