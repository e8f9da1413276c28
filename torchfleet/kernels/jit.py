"""How every kernel is compiled."""

from __future__ import annotations

import numba as nb

# Without the interpreter's lock; kept on disk between processes; and with IEEE's division: Python's would raise in the
# middle of an update, and checking for it takes as long as the arithmetic itself. Without numba's reference counts
# (_nrt): a kernel allocates nothing, and the atomic counts at every call of an inlined function took two thirds of the
# text parser's time.
kernel = nb.njit(nogil=True, cache=True, error_model="numpy", _nrt=False)
inlined = nb.njit(forceinline=True, error_model="numpy", _nrt=False)
