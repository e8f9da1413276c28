"""Reads requests that differ from an earlier one only in their numbers, as one client's requests do, with a kernel."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from torchfleet.apps.serve.samples import Packing, Samples
from torchfleet.ps.kernels.json_numbers import read_arrays
from torchfleet.ps.kernels.numerals import powers_of_ten

MAX_TEMPLATES = 32  # beyond this, the least recently used template is dropped
MAX_BODY = 1 << 20  # bytes of a request that is learned
LEARN_PAUSE = 0.01  # seconds between two requests that are learned: templates that are never used must not take time
_PAD = b"\n" + bytes(8)  # kernels may load eight bytes behind the end
_TENS, _FIVES = powers_of_ten()
_BITS = np.zeros(1, np.uint64)
_NUMBERS = _TENS, _FIVES, _BITS, _BITS.view(np.float64)


class Template:
    """A request with places for the numbers of its arrays. `head`: its text up to the first array."""

    def __init__(self, literals: Sequence[bytes], arrays: Sequence[tuple[bool, int, int]], num: int, rest: Any) -> None:
        """`arrays`: (whether of floats, columns from .. to), one behind each literal but the last. `rest`: what else is
        known of the request.
        """
        self.head, self.num, self.rest = literals[0], num, rest
        self.key = tuple(literals), num
        ends = np.cumsum([len(literal) for literal in literals])
        self._known = (
            np.frombuffer(b"".join([*literals, _PAD]), np.uint8),
            ends,
            np.array([is_float for is_float, _, _ in arrays]),
            np.array([[start, end] for _, start, end in arrays]),
        )

    def read(self, text: npt.NDArray[np.uint8], widths: tuple[int, int]) -> dict[str, npt.NDArray[Any]] | None:
        """The blocks of integers and floats, of these widths; None if the text does not match the template."""
        ints, floats = np.empty((self.num, widths[0]), np.int64), np.empty((self.num, widths[1]), np.float32)
        if not read_arrays(text, *self._known, ints, floats, *_NUMBERS):
            return None
        return {"int64": ints, "float32": floats}


class RequestTemplates:
    """The templates of one model. Used by one thread."""

    def __init__(self, packing: Packing, pause: float = LEARN_PAUSE) -> None:
        self._packing, self._pause, self._next = packing, pause, 0.0
        self._is_possible = packing.is_possible and {*packing.types} <= {"int64", "float32"}
        self._widths = packing.widths.get("int64", 0), packing.widths.get("float32", 0)
        self._templates: list[Template] = []
        if self._is_possible:
            Template([b"[", b"]"], [(True, 0, 1)], 1, None).read(_padded(b"[[1]]"), (1, 1))  # compiles or loads it

    def read(self, body: bytes) -> tuple[Samples, Any] | None:
        """(samples, the `rest` that `learn` was given) of a request that matches a template; None for others."""
        if len(body) > MAX_BODY:
            return None
        text: npt.NDArray[np.uint8] | None = None
        for place, template in enumerate(self._templates):
            if body.startswith(template.head):
                text = _padded(body) if text is None else text
                blocks = template.read(text, self._widths)
                if blocks is not None:
                    if place:
                        self._templates.insert(0, self._templates.pop(place))
                    return Samples(template.num, {}, packed=blocks), template.rest
        return None

    def learn(self, body: bytes, arrays: Sequence[tuple[str, msgspec.Raw]], num: int, rest: Any) -> None:
        """Make a template of a request. `arrays`: name and data of each feature, in the order and memory of `body`."""
        now = time.monotonic()
        if not self._is_possible or len(body) > MAX_BODY or now < self._next:
            return
        self._next = now + self._pause
        start, at = _address(body), 0
        literals, columns = [], []
        for name, raw in arrays:
            place = _address(raw) - start
            if not at <= place <= len(body) - len(bytes(raw)):
                return  # the decoder has copied it
            feature, first, last = self._packing.places[name]
            literals.append(body[at:place])
            columns.append((feature.dtype == "float32", first, last))
            at = place + len(bytes(raw))
        made = Template([*literals, body[at:]], columns, num, rest)
        known = [template for template in self._templates if template.key != made.key]  # an equal one could not read it
        self._templates = [made, *known][:MAX_TEMPLATES]


def _padded(body: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(body + _PAD, np.uint8)


def _address(data: Any) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)
