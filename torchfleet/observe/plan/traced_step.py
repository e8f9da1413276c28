"""A step of a model on torch's meta device: the most memory that it would take, and its operations.

Every tensor that an operation returns is counted from then on until its storage is freed. On the meta device no storage
has memory, and all have the lives and sizes of real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from torchfleet.collective.tensors.kept_tensors import storage_of
from torchfleet.collective.tensors.outputs import tensors

_BACKWARD = 3.0  # forward and backward are as many products as three forwards
_ORIGINAL = F.scaled_dot_product_attention
_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def traced_step(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> tuple[int, float]:
    """Return (the peak bytes of forward and backward beside parameters, gradients and buffers, their operations).

    The inputs count as held. The loss is the scalar that the model returns, or else the mean square of what it returns.
    The parameters, all on the meta device, have gradients afterwards.
    """
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    own = [*model.parameters(), *model.buffers()]
    placed = [tensor.to("meta") for tensor in inputs]
    live = _LiveTensors([*own, *(tensor.grad for tensor in own if tensor.grad is not None)])
    live.count(placed)
    attention: dict[Any, Callable[..., int]] = {_attention: _operations}
    with live, _fused_attention():
        with FlopCounterMode(display=False, custom_mapping=attention) as counter:
            outputs = model(*placed)
        loss = _loss(outputs)
        del outputs
        if loss is not None:
            loss.backward()  # type: ignore[no-untyped-call]
    return live.most, _BACKWARD * float(counter.get_total_flops())


def _loss(outputs: Any) -> torch.Tensor | None:
    trained = [tensor for tensor in tensors(outputs) if tensor.requires_grad]
    losses = [tensor for tensor in trained if not tensor.dim()]
    parts = losses[:1] or [tensor.square().mean() for tensor in trained]
    return sum(parts[1:], parts[0]) if parts else None


class _LiveTensors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors while it is entered, without those of `known`. `most` is the peak."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = self._now = 0
        self._kept = list(known)  # keeps their addresses from being used again
        self._known = set(map(storage_of, self._kept))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.count(tree_leaves(made))
        return made

    def count(self, made: Iterable[Any]) -> None:
        """Count the tensors whose storage was not counted before, until the storage is freed."""
        for tensor in made:
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in self._known:
                storage = tensor.untyped_storage()
                self._known.add(storage_of(tensor))
                self._now += storage.nbytes()
                self.most = max(self.most, self._now)
                weakref.finalize(storage, self._forget, storage_of(tensor), storage.nbytes())

    def _forget(self, address: int, num_bytes: int) -> None:
        self._known.discard(address)
        self._now -= num_bytes


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Replace attention by the fused operation of CPUs and GPUs, which keeps no matrix of tokens by tokens.

    The meta device has no fused one, and composes attention of operations that keep such matrices.
    """
    F.scaled_dot_product_attention = _fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _ORIGINAL


def _fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """scaled_dot_product_attention of meta tensors; with the fused one if they are (batch, heads, tokens, width)."""
    if query.dim() != 4 or value.shape[-1] != query.shape[-1]:
        return _ORIGINAL(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    made: torch.Tensor = _attention(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return made


def _operations(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
