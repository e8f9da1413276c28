"""Calls of a model in which torch transforms or records its operations: lookups on servers are none of torch's."""

from __future__ import annotations

from typing import Any

import torch


def transforming(ids: Any = None) -> str:
    """What of torch's runs the model now, to transform or record it; "" if nothing does."""
    if isinstance(ids, torch.fx.Proxy):
        return "torch.fx"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace"
    if torch.compiler.is_exporting():
        return "torch.export"
    is_within = torch._C._functorch.peek_interpreter_stack() is not None
    return "torch.func (vmap, grad and others)" if is_within else ""


def not_plain(path: str, what: str) -> str:
    """`path`: of the embedding; "": of any."""
    owner = f"'{path}' asks" if path else "an embedding of this model asks"
    return (
        f"{what} needs operations of torch alone, and {owner} servers for its rows. Use fleet.to_plain(model), a copy "
        "in plain torch with the rows in its parameters."
    )
