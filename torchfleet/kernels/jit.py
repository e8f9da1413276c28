"""How every kernel is compiled."""

from __future__ import annotations

import numba as nb

# Without the interpreter's lock; kept on disk between processes; and with IEEE's division: Python's would raise in the
# middle of an update, and checking for it takes as long as the arithmetic itself.
kernel = nb.njit(nogil=True, cache=True, error_model="numpy")
inlined = nb.njit(inline="always", error_model="numpy")
