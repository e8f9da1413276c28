"""Random numbers: first values are a function of (seed, table, key) and nothing else, to the bit."""

from __future__ import annotations

import math
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import twins
from support.cases import each_of
from support.searches import examples

from torchfleet.ps.kernels.random import CONSTANT, NORMAL, TRUNCATED_NORMAL, UNIFORM, initialise, normal_quantile
from torchfleet.ps.tables.settings.spec import Initializer, TableSpec
from torchfleet.ps.tables.sparse_table import SparseTable

KINDS = {"constant": CONSTANT, "uniform": UNIFORM, "normal": NORMAL, "truncated_normal": TRUNCATED_NORMAL}
SETTINGS = [("constant", 0.25, 0.0), ("uniform", -0.5, 0.5), ("normal", 0.0, 1.0), ("truncated_normal", 1.0, 0.02)]

# Recorded output, on purpose: a promise to every table that was ever saved, and to servers of another architecture
# in the same fleet. These bits must never change. (kind, a, b, seed, table, key, four float32 as hex)
GOLDEN = [
    ("uniform", -0.5, 0.5, 0, "user", 0x0, "be15a81b 3e84b516 3da85d76 be718f05"),
    ("uniform", -0.5, 0.5, 0, "user", 0x1, "bead5bac 3e74289d be8c466c 3eab759f"),
    ("uniform", -0.5, 0.5, 0, "user", 0x8000000000000000, "be94c09c beff986a be4e925c 3c33a108"),
    ("uniform", -0.5, 0.5, 0, "user", 0xFFFFFFFFFFFFFFFF, "3e40199a bdd44e5a bea56b06 3d9dbcc6"),
    ("uniform", -0.5, 0.5, 2026, "item", 0x0, "ba9a4cc9 3e730917 be556ca7 be5def53"),
    ("uniform", -0.5, 0.5, 2026, "item", 0x1, "bed041fa 3dfe2a72 bef7b9f1 bed59705"),
    ("normal", 0.0, 1.0, 0, "user", 0x0, "bebff8b6 3f342680 3e5487c7 bf2178a9"),
    ("normal", 0.0, 1.0, 0, "user", 0x1, "bf7d1a1b 3f2376d0 bf408324 3f794051"),
    ("normal", 0.0, 1.0, 0, "user", 0x8000000000000000, "bf4eeaaf c04a3494 bf0785a9 3ce128f3"),
    ("normal", 0.0, 1.0, 0, "user", 0xFFFFFFFFFFFFFFFF, "3efa6510 be8693a7 bf6d5b56 3e46f05b"),
    ("normal", 0.0, 1.0, 2026, "item", 0x0, "bb4162f7 3f229a21 bf0c7cf1 bf12bae4"),
    ("normal", 0.0, 1.0, 2026, "item", 0x1, "bfa91752 3ea1ef3e c008fd04 bfb1714e"),
    ("truncated_normal", 0.0, 0.02, 0, "user", 0x0, "bbea0ae8 3c5a5803 3b81bf3d bc4408ed"),
    ("truncated_normal", 0.0, 0.02, 0, "user", 0x1, "bc97f904 3c466bb8 bc6908ce 3c95c06a"),
    ("truncated_normal", 0.0, 0.02, 2026, "item", 0x8000000000000000, "bc4e8e0b bccf11d2 3d0ad16d 3c6b3715"),
    ("truncated_normal", 0.0, 0.02, 2026, "item", 0xFFFFFFFFFFFFFFFF, "3cb316f9 bc9e30ff 3c495408 3ca883cd"),
]


def first_values(stream: int, keys, dim: int, kind: str, a: float, b: float) -> np.ndarray:
    keys = np.array(keys, np.uint64)
    values, places = np.zeros(len(keys) * dim, np.float32), np.arange(len(keys))
    initialise(values, dim, 0, dim, keys, places, places, np.uint64(stream), KINDS[kind], a, b, np.float32(0))
    return values.reshape(-1, dim)


def pulled(kind: str, a: float, b: float, seed: int, name: str, key: int) -> str:
    table = SparseTable(TableSpec(name, dim=4, seed=seed, initializer=Initializer(kind, a, b)), 1 << 16)
    bits = table.pull(np.array([key], np.uint64)).view(np.uint32)[0]
    return " ".join(f"{word:08x}" for word in bits)


@each_of("golden", GOLDEN, ids=lambda golden: f"{golden[0]}-{golden[4]}-{golden[5]:x}")
def test_first_values_are_those_of_every_release_and_architecture(golden):
    assert pulled(*golden[:-1]) == golden[-1]


@pytest.mark.slow
def test_a_fresh_process_gives_the_same_first_values():
    """Nothing of Python's per-process salting of hashes goes into them."""
    program = (
        "import sys; sys.path[:0] = ['tests', 'tests/ps/kernels']; from test_random import GOLDEN, pulled; "
        "print('\\n'.join(pulled(*golden[:-1]) for golden in GOLDEN))"
    )
    root = __file__.rsplit("/tests/", 1)[0]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == [golden[-1] for golden in GOLDEN]


@settings(max_examples=examples(100))
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.sampled_from(SETTINGS))
def test_first_values_equal_their_twin_in_plain_python_to_the_bit(stream, key, setting):
    kind, a, b = setting
    found = first_values(stream, [key], 9, kind, a, b)[0]
    assert twins.same_bits(found, twins.first_value(stream, key, 9, kind, a, b))


# What a uniform of 53 bits can be at its ends, both sides of the borders between the approximations (0.075, 0.925
# and r = 5, which is p = exp(-25)), and a walk through every power of two.
BORDERS = [0.075, 0.925, 0.5, math.exp(-25), 1 - math.exp(-25), 0.7071067811865476, 1 - 0.7071067811865476]
PROBABILITIES = sorted(
    {2.0**-e for e in range(1, 55)}
    | {1 - 2.0**-e for e in range(1, 54)}
    | {math.nextafter(p, side) for p in BORDERS for side in (0, 1)}
    | set(BORDERS)
    | set(np.linspace(0.001, 0.999, 999).tolist())
)


def test_normal_quantile_is_that_of_the_standard_library():
    for p in PROBABILITIES:
        expected = NormalDist().inv_cdf(p)
        assert normal_quantile(p) == pytest.approx(expected, rel=1e-14, abs=1e-16), p


def test_normal_quantile_inverts_the_normal_distribution():
    """An oracle of another kind: math.erfc. An error dx moves p by a factor of up to 1 + |x| dx, so by 10 · 8 ulps."""
    for p in PROBABILITIES:
        x = normal_quantile(p)
        tail, expected = (p, -x) if p < 0.5 else (1 - p, x)
        assert 0.5 * math.erfc(expected / math.sqrt(2)) == pytest.approx(tail, rel=1e-13), p


def test_normal_quantile_equals_its_twin_in_plain_python_to_the_bit():
    assert [normal_quantile(p) for p in PROBABILITIES] == [twins.normal_quantile(p) for p in PROBABILITIES]


MANY = 200_000


def many(kind: str, a: float, b: float) -> np.ndarray:
    return first_values(123456789, range(MANY // 8), 8, kind, a, b).astype(np.float64)


def test_uniform_values_lie_between_their_bounds_and_fill_them_evenly():
    values = many("uniform", -0.25, 0.75)
    assert values.min() >= -0.25
    assert values.max() <= 0.75
    # Five standard errors: the mean's is sqrt(1/12 / n), a cell's count is nearly Poisson's.
    assert values.mean() == pytest.approx(0.25, abs=5 * math.sqrt(1 / 12 / MANY))
    counts = np.histogram(values, 20, (-0.25, 0.75))[0]
    assert np.abs(counts - MANY / 20).max() < 5 * math.sqrt(MANY / 20)


def test_normal_values_have_the_moments_of_a_normal_distribution():
    values = (many("normal", 3.0, 0.5) - 3.0) / 0.5
    for power, moment, error in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # error: variance of x^power
        assert (values**power).mean() == pytest.approx(moment, abs=5 * math.sqrt(error / MANY)), power
    assert 4 < np.abs(values).max() < 6.5


def test_truncated_normal_values_lie_within_two_deviations():
    values = (many("truncated_normal", 1.0, 0.02) - 1.0) / 0.02
    rounding = 2**-24 / 0.02  # of 1.04 to float32
    assert np.abs(values).max() <= 2 + rounding
    assert np.abs(values).max() > 1.999
    density, inside = NormalDist().pdf(2), 1 - 2 * NormalDist().cdf(-2)
    variance = 1 - 2 * 2 * density / inside
    assert values.mean() == pytest.approx(0, abs=5 * math.sqrt(variance / MANY))
    assert values.var() == pytest.approx(variance, abs=5 * math.sqrt(1.2 / MANY))


def test_values_of_neighbouring_keys_elements_and_streams_are_not_correlated():
    streams = [first_values(stream, range(20_000), 8, "normal", 0.0, 1.0).astype(np.float64) for stream in (5, 6)]
    for one, other in (
        (streams[0][:-1], streams[0][1:]),  # neighbouring keys
        (streams[0][:, :-1], streams[0][:, 1:]),  # neighbouring elements
        (streams[0], streams[1]),  # neighbouring streams
        (streams[0][:-1, 1:], streams[0][1:, :-1]),  # the next key's element before
    ):
        assert abs((one * other).mean()) < 5 / math.sqrt(one.size)
    assert len(np.unique(np.concatenate(streams))) > 0.98 * 320_000  # float32 has 2^32 values: few meet by chance


@pytest.mark.parametrize("setting", SETTINGS[1:], ids=lambda setting: setting[0])
def test_a_first_value_depends_on_neither_order_nor_batch_nor_row(setting):
    keys = np.random.default_rng(2).integers(0, 2**64, 500, dtype=np.uint64)
    spec = TableSpec("t", dim=5, seed=9, initializer=Initializer(*setting))
    at_once = SparseTable(spec, 1 << 20)
    expected = dict(zip(keys.tolist(), at_once.pull(keys), strict=True))
    one_by_one = SparseTable(spec, 1 << 20)
    one_by_one.pull(np.arange(100, dtype=np.uint64))  # so that rows have other numbers
    for key in keys[::-1]:
        assert twins.same_bits(one_by_one.pull(np.array([key]))[0], expected[int(key)])


def test_table_name_and_seed_both_matter():
    def row(name: str, seed: int) -> tuple[float, ...]:
        spec = TableSpec(name, dim=4, seed=seed, initializer=Initializer("uniform", 0.0, 1.0))
        return tuple(SparseTable(spec, 1 << 16).pull(np.array([1], np.uint64))[0].tolist())

    assert len({row(name, seed) for name in ("a", "b", "ab") for seed in (0, 1, 2**63 - 1)}) == 9


def test_only_the_places_named_are_written_and_state_follows_the_value():
    values = np.full(4 * 7, -7, np.float32)
    keys, rows = np.array([10, 11, 12], np.uint64), np.array([3, 0, 2])
    initialise(values, 7, 2, 3, keys, rows, np.array([0, 2]), np.uint64(1), UNIFORM, 0.0, 1.0, np.float32(0.5))
    expected = np.full((4, 7), -7, np.float32)
    for key, row in ((10, 3), (12, 2)):
        expected[row, 2:5] = twins.first_value(1, key, 3, "uniform", 0.0, 1.0)
        expected[row, 5:] = 0.5
    assert twins.same_bits(values.reshape(4, 7), expected)
