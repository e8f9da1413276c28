"""Lookups in tables on servers under torch.compile: they break the graph, and the code around them is compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def keep_from_compilers(kind: Any) -> None:
    """Exclude the lookups of this class of embeddings from torch.compile, except for those in a table on a device.
    Called when an embedding is bound, because it imports the compiler, as torch's own optimizers do.
    """
    kind.forward = _kept_from_compilers(kind.forward)


def _kept_from_compilers(compiled: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    uncompiled = torch.compiler.disable(compiled)  # type: ignore[no-untyped-call]
    # A call outside of compiled code does not need the wrapper, which takes as long as a small lookup.
    callback_of = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True)

    @functools.wraps(compiled)
    def forward(
        self: Any, ids: Any, offsets: torch.Tensor | None = None, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        is_plain = not torch.compiler.is_compiling() and callback_of() is None
        chosen = compiled if is_plain or self.table_device is not None else uncompiled
        return chosen(self, ids, offsets, per_sample_weights)

    return forward
