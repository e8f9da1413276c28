"""Activation offloading: inputs of recomputed modules leave the GPU between forward and backward.

Forward: the input of a block is copied to the host on a side stream while the block computes. The GPU's copy is dropped
when two further blocks have begun; the compute stream first waits for the copy, in case it is late. Backward: when the
input of block i is needed, the input of block i-1 starts to be copied back, during the recomputation of block i.
So at any depth at most two of the kept inputs are on the GPU: the one in use and the one being copied.

Memory on the GPU belongs to the compute stream throughout, and every buffer that the side stream touches is held until
the compute stream has waited for it. That is why Tensor.record_stream is not used: it would hold a buffer until the GPU
reaches that point, and with the CPU far ahead of the GPU all buffers of a pass would pile up.

Source: Rajbhandari et al. 2021, ZeRO-Infinity (activation checkpoints in CPU memory). On the CPU offloading saves
nothing; the copies are still made, so that a script behaves the same there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch.autograd.graph import saved_tensors_hooks

from torchfleet.base.errors import ModelError

NUM_LEAVING = 2  # blocks whose inputs are still on the device while they are copied out
PIECE_BYTES = 1 << 24  # of pinned memory: pieces of one size are reused for batches of all sizes


class _Kept:
    """One input of a block. The graph owns it, and frees it."""

    def __init__(self, tensor: torch.Tensor, block: _Block) -> None:
        self.block = block
        self.form = torch.empty_like(tensor, device="meta")
        if self.form.stride() != tensor.stride():  # a slice of a larger one, or expanded
            tensor = tensor.contiguous()
        self.on_device: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self.host: list[torch.Tensor] = []
        self.event: torch.cuda.Event | None = None  # when the copy in flight has completed

    def check_unchanged(self) -> None:
        if self.on_device is not None and self.on_device._version != self.version:
            raise ModelError(
                f"recompute with enable_offload: an input of shape {tuple(self.on_device.shape)} of a module in "
                "'checkpoints' was changed in place while it was copied to host memory. Take inplace=True out of the "
                "module's first layer, or leave the module out of 'checkpoints'."
            )


class _Block:
    """One call of a recomputed module: its inputs, and the previous call, whose inputs are needed next."""

    def __init__(self, before: _Block | None) -> None:
        self._inputs: list[weakref.ref[_Kept]] = []
        self._before = weakref.ref(before) if before is not None else None

    def add(self, kept: _Kept) -> None:
        self._inputs.append(weakref.ref(kept))

    @property
    def inputs(self) -> list[_Kept]:
        """The inputs that are still needed."""
        return [kept for kept in (ref() for ref in self._inputs) if kept is not None]

    @property
    def before(self) -> _Block | None:
        return self._before() if self._before is not None else None


class Offload:
    """The kept inputs of all recomputed modules of a model.

    Inputs that need no gradient (masks and the like, which blocks share) stay on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.empty(0, device=device).device  # with its index
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._leaving: deque[weakref.ref[_Block]] = deque()
        self._coming: list[_Kept] = []  # kept alive: the side stream still writes to their memory
        self._last: weakref.ref[_Block] | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Hooks to enter around one call of a module: the tensors it saves are its inputs."""
        before = self._last() if self._last is not None else None
        if before is None:  # a new graph; an aborted backward pass may have left inputs on the device
            for coming in self._coming:
                self._release(coming)
            self._coming = []
        block = _Block(before)
        self._last = weakref.ref(block)
        self._leaving.append(self._last)
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, block), self._unpack)

    def _pack(self, tensor: torch.Tensor, block: _Block) -> _Kept | torch.Tensor:
        """Forward: offload `tensor`, an input of a block that is about to run."""
        if not tensor.requires_grad or tensor.device != self._device or not tensor.numel():
            return tensor
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise ModelError(
                f"recompute with enable_offload copies plain tensors; an input of a module in 'checkpoints' is a "
                f"{type(tensor).__name__}. Set recompute_configs['enable_offload']=False."
            )
        kept = _Kept(tensor, block)
        block.add(kept)
        self._copy_out(kept)
        while len(self._leaving) > NUM_LEAVING:
            left = self._leaving.popleft()()
            for leaving in left.inputs if left is not None else ():
                self._release(leaving)
        return kept

    def _unpack(self, kept: _Kept | torch.Tensor) -> torch.Tensor:
        """Backward: return an input. It may be requested again, if the graph is retained."""
        if isinstance(kept, torch.Tensor):
            return kept
        if kept.on_device is None:
            self._bring(kept)
        tensor = kept.on_device
        assert tensor is not None
        self._release(kept)
        self._coming = [coming for coming in self._coming if coming is not kept]
        if kept.block.before is not None:
            self._prefetch(kept.block.before, kept.block)
        return tensor

    def _prefetch(self, block: _Block, current: _Block) -> None:
        """Start copying a block's inputs back. Drops prefetched inputs of other blocks, which can be copied again."""
        for coming in self._coming:
            if coming.block not in (block, current):
                self._release(coming)
        self._coming = [coming for coming in self._coming if coming.on_device is not None]
        for needed in block.inputs:
            if needed.on_device is None:
                self._bring(needed)

    def _bring(self, kept: _Kept) -> None:
        kept.on_device = torch.empty_like(kept.form, device=self._device)
        kept.event = self._copy(_pieces(kept.on_device), kept.host)
        kept.version = kept.on_device._version
        self._coming.append(kept)

    def _release(self, kept: _Kept) -> None:
        """Make the compute stream wait for the copy, so that the memory can be reused afterwards."""
        kept.check_unchanged()
        if kept.event is not None:
            torch.cuda.current_stream(self._device).wait_event(kept.event)
        kept.on_device = kept.event = None

    def _copy_out(self, kept: _Kept) -> None:
        assert kept.on_device is not None
        pieces = _pieces(kept.on_device)
        kept.host = [torch.empty_like(piece, device="cpu", pin_memory=self._side is not None) for piece in pieces]
        kept.event = self._copy(kept.host, pieces)

    def _copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> torch.cuda.Event | None:
        """Copy on the side stream, after the work queued on the compute stream, which made the source."""
        if self._side is None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
            return None
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._side.record_event()
        return event


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Its memory, which has no gaps, as flat pieces."""
    flat = tensor.as_strided((tensor.numel(),), (1,))
    pieces: Sequence[torch.Tensor] = torch.split(flat, max(1, PIECE_BYTES // tensor.element_size()))
    return pieces
