"""Initial values of rows, from a counter-based generator keyed by (seed, table, key).

Element d of a row is a function of (stream, key, d) alone, where the stream depends on seed and table: no state, no
order. Only integer operations, IEEE +, -, *, / and sqrt are used, and no library function whose last bit differs
between machines: rows are bit-identical on x86-64 and aarch64.
"""

from __future__ import annotations

import numpy as np

from torchfleet.ps.kernels.hashing import mix
from torchfleet.ps.kernels.jit import kernel

CONSTANT, UNIFORM, NORMAL, TRUNCATED_NORMAL = range(4)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S11 = np.uint64(11)
_LN2 = 0.6931471805599453
_CUT = 0.022750131948179195  # probability below -2 standard deviations: truncated normals lie within ± 2

# Rational approximations of the normal quantile function, relative error about 1e-16:
# Wichura, "Algorithm AS 241: The Percentage Points of the Normal Distribution", Applied Statistics 37 (1988).
_CENTRE = np.array(
    [
        [3.3871328727963666080e0, 1.0],
        [1.3314166789178437745e2, 4.2313330701600911252e1],
        [1.9715909503065514427e3, 6.8718700749205790830e2],
        [1.3731693765509461125e4, 5.3941960214247511077e3],
        [4.5921953931549871457e4, 2.1213794301586595867e4],
        [6.7265770927008700853e4, 3.9307895800092710610e4],
        [3.3430575583588128105e4, 2.8729085735721942674e4],
        [2.5090809287301226727e3, 5.2264952788528545610e3],
    ]
)
_TAIL = np.array(
    [
        [1.42343711074968357734e0, 1.0],
        [4.63033784615654529590e0, 2.05319162663775882187e0],
        [5.76949722146069140550e0, 1.67638483018380384940e0],
        [3.64784832476320460504e0, 6.89767334985100004550e-1],
        [1.27045825245236838258e0, 1.48103976427480074590e-1],
        [2.41780725177450611770e-1, 1.51986665636164571966e-2],
        [2.27238449892691845833e-2, 5.47593808499534494600e-4],
        [7.74545014278341407640e-4, 1.05075007164441684324e-9],
    ]
)
_FAR_TAIL = np.array(
    [
        [6.65790464350110377720e0, 1.0],
        [5.46378491116411436990e0, 5.99832206555887937690e-1],
        [1.78482653991729133580e0, 1.36929880922735805310e-1],
        [2.96560571828504891230e-1, 1.48753612908506148525e-2],
        [2.65321895265761230930e-2, 7.86869131145613259100e-4],
        [1.24266094738807843860e-3, 1.84631831751005468180e-5],
        [2.71155556874348757815e-5, 1.42151175831644588870e-7],
        [2.01033439929228813265e-7, 2.04426310338993978564e-15],
    ]
)


@kernel
def _ratio(terms_82: np.ndarray, x: float) -> float:
    above, below = terms_82[7, 0], terms_82[7, 1]
    for i in range(6, -1, -1):
        above = above * x + terms_82[i, 0]
        below = below * x + terms_82[i, 1]
    return above / below


@kernel
def _log(x: float) -> float:
    """ln x for 0 < x < 1: x = m 2^e with m near 1, ln m = 2 artanh((m - 1) / (m + 1)) by its series."""
    exponent = 0
    while x < 0.7071067811865476:
        x *= 2.0
        exponent -= 1
    s = (x - 1.0) / (x + 1.0)
    square = s * s
    total = 0.0
    for k in range(23, 0, -2):
        total = total * square + 1.0 / k
    return 2.0 * s * total + exponent * _LN2


@kernel
def normal_quantile(p: float) -> float:
    """The x with P(standard normal < x) = p, for 0 < p < 1."""
    q = p - 0.5
    if abs(q) <= 0.425:
        return q * _ratio(_CENTRE, 0.180625 - q * q)
    r = np.sqrt(-_log(p if q < 0.0 else 1.0 - p))
    x = _ratio(_TAIL, r - 1.6) if r <= 5.0 else _ratio(_FAR_TAIL, r - 5.0)
    return -x if q < 0.0 else x


@kernel
def _uniform(base: np.uint64, d: int) -> float:
    """A number strictly between 0 and 1: (53 random bits + 1/2) / 2^53, rounded to even below 1."""
    bits = mix(base + np.uint64(d + 1) * _GOLDEN) >> _S11
    return min((np.float64(bits) + 0.5) * 1.1102230246251565e-16, 0.9999999999999999)


@kernel
def initialise(
    values: np.ndarray,
    width: int,
    offset: int,
    dim: int,
    keys_N: np.ndarray,
    rows_N: np.ndarray,
    places_F: np.ndarray,
    stream: np.uint64,
    kind: int,
    a: float,
    b: float,
    state_value: np.float32,
) -> None:
    """For each position i: row rows_N[i] gets the initial value of keys_N[i], followed by state_value.

    values is the flat row store, a row is `width` long and its value starts at `offset`. (a, b) is (value, -) for
    CONSTANT, (low, high) for UNIFORM, (mean, standard deviation) for the normals.
    """
    for i in places_F:
        start = rows_N[i] * width + offset
        base = mix(stream + mix(keys_N[i] + _GOLDEN))
        for d in range(dim):
            if kind == CONSTANT:
                x = a
            elif kind == UNIFORM:
                x = a + (b - a) * _uniform(base, d)
            elif kind == NORMAL:
                x = a + b * normal_quantile(_uniform(base, d))
            else:
                x = a + b * normal_quantile(_CUT + (1.0 - 2.0 * _CUT) * _uniform(base, d))
            values[start + d] = np.float32(x)
        for d in range(offset + dim, width):
            values[rows_N[i] * width + d] = state_value
