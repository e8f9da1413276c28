"""Blocks on the side of a CPU worker: the forward of a block is a call of a heter worker, and so is its backward.

The parameters stay where they are, in the model of the worker, and are trained in the worker's mode. A call sends the
parameters that have changed since the last call, and returns gradients. So a step is made once, by the worker, whatever
happens to heter workers: a call that was lost with one of them is repeated at another.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from torchfleet.base.errors import FleetError, ModelError, WireError
from torchfleet.base.job_hook import pickled_as
from torchfleet.ps.net.wire import Array, Command, pack, unpack
from torchfleet.ps.worker.heter.blocks import Block
from torchfleet.ps.worker.heter.heter_links import GONE, HeterLinks, Link
from torchfleet.ps.worker.heter.messages import MAX_BODY, MAX_KEPT, Backward, Forward, Forwarded, Gradients
from torchfleet.ps.worker.heter.tensors import from_arrays, spec_of, to_array

MAX_LOST = 64  # heter workers that may be lost during one call
_CPU = torch.device("cpu")
Result = TypeVar("Result")
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)


@dataclass(eq=False)
class Pass:
    """One forward pass, with all that another heter worker needs to compute it again."""

    block: int
    number: int
    keywords: list[str]
    num_inputs: int
    wanted: list[int]
    training: list[bool]
    seed: int
    autocast: str
    buffers: list[torch.Tensor]  # as they were before the call
    link: Link | None = None  # where its graph is
    kind: str = "tensor"
    keys: list[str] = field(default_factory=list)
    device: torch.device = _CPU

    def body(self, inputs: Sequence[torch.Tensor], changed: list[int], kept: list[int], name: str) -> Forward:
        specs = [spec_of(tensor, f"an input of '{name}'") for tensor in inputs]
        return Forward(
            self.block, self.number, specs, self.keywords, changed, self.wanted, self.training, self.seed,
            self.autocast, kept,
        )  # fmt: skip


class RemoteBlocks:
    """The blocks of a worker's model, computed by heter workers. Threads take turns."""

    def __init__(self, blocks: Sequence[Block], links: HeterLinks, worker: int, timeout: float) -> None:
        """`timeout`: seconds that one pass may take on a heter worker that shows signs of life."""
        self._blocks, self._links, self._worker, self._timeout = list(blocks), links, worker, timeout
        self._specs = [block.spec() for block in blocks]
        self._lock = threading.RLock()
        self._passes: weakref.WeakValueDictionary[int, _Graph] = weakref.WeakValueDictionary()
        self._next = 1
        self.num_repeated = 0  # forward passes that were computed again for their backward pass
        for number, block in enumerate(self._blocks):
            block.module.forward = RemoteForward(self, number, block.module.forward)

    def close(self, is_told: bool) -> None:
        """Give the blocks their own forward back. `is_told`: tell the heter workers that this worker has left."""
        for block in self._blocks:
            if isinstance(block.module.__dict__.get("forward"), RemoteForward):
                del block.module.forward
        with self._lock:
            (self._links.leave if is_told else self._links.close)()

    def stats(self) -> dict[str, int]:
        """Forward passes, those that were computed again, and moves from one heter worker to another."""
        return {"passes": self._next - 1, "repeated": self.num_repeated, "moves": max(0, self._links.num_moves)}

    def call(self, number: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The outputs of a block."""
        block = self._blocks[number]
        inputs = [*args, *kwargs.values()]
        for place, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                which = f"argument {place}" if place < len(args) else f"'{list(kwargs)[place - len(args)]}'"
                raise ModelError(
                    f"block '{block.name}' under device_guard('gpu') was called with {which} of type "
                    f"{type(value).__name__}, and heter workers take tensors: give it tensors alone, or move the layer "
                    "out of the guard"
                )
        tensors = [*inputs, *block.parameters()]
        is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        made = self._pass(number, tensors, list(kwargs), len(inputs), is_trained)
        if not is_trained:
            return _unflat(made, self.forward(made, tensors)[0])
        return _unflat(made, list(_RemoteCall.apply(self, made, *tensors)))  # type: ignore[no-untyped-call]

    def _pass(
        self, number: int, tensors: Sequence[torch.Tensor], keywords: list[str], num_inputs: int, is_trained: bool
    ) -> Pass:
        block = self._blocks[number]
        with self._lock:
            own, self._next = self._next, self._next + 1
        wanted = [i for i, tensor in enumerate(tensors) if tensor.requires_grad] if is_trained else []
        training = [module.training for module in block.module.modules()]
        buffers = [buffer.detach().clone() for buffer in block.buffers()]
        made = Pass(number, own, keywords, num_inputs, wanted, training, self._seed(own), _autocast(), buffers)
        made.device = tensors[0].device if num_inputs else _CPU
        return made

    def _seed(self, number: int) -> int:
        """Random numbers of a block depend on torch's seed, the worker and the pass, not on a heter worker."""
        text = f"{torch.initial_seed()} {self._worker} {number}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    def keep(self, made: Pass, graph: _Graph) -> None:
        """Keep the graph of a pass at its heter worker as long as `graph` lives."""
        with self._lock:
            self._passes[made.number] = graph

    def forward(self, made: Pass, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[bool]]:
        """The outputs, and which of them have gradients. Copies the buffers that have changed into the block."""
        with self._lock:
            may_move = not self._kept(made)
            reply, outputs, buffers = self._somewhere(lambda link: self._forward(link, made, tensors), may_move)
        own = self._blocks[made.block].buffers()
        with torch.no_grad():
            for place, buffer in zip(reply.buffers, buffers, strict=True):
                own[place].copy_(buffer)
        made.kind, made.keys = reply.kind, reply.keys
        return [output.to(made.device) for output in outputs], reply.differentiable

    def _forward(
        self, link: Link, made: Pass, tensors: Sequence[torch.Tensor]
    ) -> tuple[Forwarded, list[torch.Tensor], list[torch.Tensor]]:
        block, inputs = self._blocks[made.block], tensors[: made.num_inputs]
        changed, values = _changed(link, made, tensors[made.num_inputs :])
        body = made.body(inputs, changed, self._kept(made), block.name)
        arrays = [pack(body), *map(to_array, inputs), *map(to_array, values)]
        answer = link.ask(Command.FORWARD, arrays, self._timeout)
        link.sent[made.block] = _updated(link.sent.get(made.block, []), changed, values)
        made.link = link
        reply, specs = _body(answer, Forwarded), self._specs[made.block].values[len(block.parameters()) :]
        num = len(reply.outputs)
        num_named = {"tensor": 1, "dict": len(reply.keys)}.get(reply.kind, num)
        if num_named != num or len(reply.differentiable) != num or any(i >= len(specs) for i in reply.buffers):
            raise WireError(f"the answer of heter worker {link.index} does not fit block '{block.name}'")
        outputs = from_arrays(reply.outputs, answer[1 : 1 + num], _CPU)
        return reply, outputs, from_arrays([specs[i] for i in reply.buffers], answer[1 + num :], _CPU)

    def backward(
        self, made: Pass, tensors: Sequence[torch.Tensor], given: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        """The gradients of `made.wanted`, by place among `tensors`. `given`: gradients of outputs."""
        with self._lock:
            return self._somewhere(lambda link: self._backward_at(link, made, tensors, given), may_move=False)

    def _somewhere(self, compute: Callable[[Link], Result], may_move: bool) -> Result:
        """Compute at a heter worker, and again at another one if that is lost meanwhile."""
        for _ in range(MAX_LOST):
            link = self._links.current(may_move)
            try:
                return compute(link)
            except GONE as error:
                self._links.lose(link, error)
                last = error
        raise FleetError(f"{MAX_LOST} heter workers were lost in one call of a block, the last one by: {last}")

    def _backward_at(
        self, link: Link, made: Pass, tensors: Sequence[torch.Tensor], given: dict[int, torch.Tensor]
    ) -> dict[int, torch.Tensor]:
        if made.link is not link:  # its heter worker is gone: compute the forward pass again
            self.num_repeated += 1
            self._forward(link, made, tensors)
        return self._backward(link, made, given)

    def _backward(self, link: Link, made: Pass, given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        what = f"a gradient of an output of '{self._blocks[made.block].name}'"
        body = Backward(made.number, list(given), [spec_of(grad, what) for grad in given.values()])
        answer = link.ask(Command.BACKWARD, [pack(body), *map(to_array, given.values())], self._timeout)
        reply = _body(answer, Gradients)
        grads = from_arrays(reply.grads, answer[1:], _CPU)
        if len(reply.found) != len(grads) or any(place >= len(made.wanted) for place in reply.found):
            raise WireError(f"the answer of heter worker {link.index} has other gradients than were asked for")
        return {made.wanted[place]: grad for place, grad in zip(reply.found, grads, strict=True)}

    def _kept(self, made: Pass) -> list[int]:
        """The passes whose graphs this worker may still need. Raises ModelError if there are too many."""
        found = [number for number, graph in sorted(self._passes.items()) if graph.is_alive and number != made.number]
        if len(found) >= MAX_KEPT:
            raise ModelError(
                f"{MAX_KEPT} forward passes of blocks wait for their backward pass, which is the maximum: call "
                "backward() sooner, or use torch.no_grad() for forward passes that need no backward pass"
            )
        return found


class RemoteForward:
    """The forward of a block while its worker trains. Copies and exports of the block use the block's own forward."""

    def __init__(self, blocks: RemoteBlocks, number: int, own: Callable[..., Any]) -> None:
        self._number, self._own = number, own
        functools.update_wrapper(self, own)  # callers look at the signature
        self._call = torch.compiler.disable(blocks.call)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _is_exporting() or torch._C._get_tracing_state():  # a saved network has all of its layers
            return self._own(*args, **kwargs)
        return self._call(self._number, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._own, memo)  # bound to the copy of the block

    def __reduce__(self) -> Any:
        return pickled_as(self._own)


class _Graph:
    """Lives as long as torch may call the backward of a pass."""

    def __init__(self, context: Any) -> None:
        self._context = weakref.ref(context)

    @property
    def is_alive(self) -> bool:
        """Whether the tensors of the pass are still saved: torch frees them in a backward pass without retain_graph."""
        context = self._context()
        if context is None:
            return False
        try:
            return context.saved_tensors is not None
        except RuntimeError:
            return False


class _RemoteCall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, blocks: RemoteBlocks, made: Pass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs, differentiable = blocks.forward(made, tensors)
        ctx.save_for_backward(*tensors)
        ctx.blocks, ctx.made, ctx.graph = blocks, made, _Graph(ctx)
        blocks.keep(made, ctx.graph)
        fixed = [output for output, is_free in zip(outputs, differentiable, strict=True) if not is_free]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise ModelError(
                "create_graph=True: heter workers compute first derivatives of their blocks. Move the layer out of "
                "device_guard('gpu')."
            )
        tensors = ctx.saved_tensors
        given = {place: grad for place, grad in enumerate(grads) if grad is not None}
        found = ctx.blocks.backward(ctx.made, tensors, given) if given else {}
        own = [found[i].to(tensor.device) if i in found else None for i, tensor in enumerate(tensors)]
        return (None, None, *own)


def _body(answer: Sequence[Array], kind: type[Result]) -> Result:
    if not answer:
        raise WireError("the answer of a heter worker has no body")
    return unpack(answer[0], kind, MAX_BODY)


def _changed(link: Link, made: Pass, parameters: Sequence[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """The values that the heter worker does not have, as copies: the worker may change its own while they travel."""
    values, sent = [*parameters, *made.buffers], link.sent.get(made.block)
    places = [i for i, value in enumerate(values) if sent is None or not _is_same(sent[i], value)]
    return places, [values[i].detach().cpu().clone() for i in places]


def _is_same(sent: torch.Tensor, value: torch.Tensor) -> bool:
    return torch.equal(sent, value.detach().cpu())


def _updated(
    sent: Sequence[torch.Tensor], changed: Sequence[int], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    found = dict(enumerate(sent)) | dict(zip(changed, values, strict=True))
    return [found[i] for i in range(len(found))]


def _unflat(made: Pass, outputs: list[torch.Tensor]) -> Any:
    if made.kind == "dict":
        return dict(zip(made.keys, outputs, strict=True))
    if made.kind == "tensor":
        return outputs[0]
    return tuple(outputs) if made.kind == "tuple" else outputs


def _autocast() -> str:
    """The dtype of autocast where the block was called; "" if it is off."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""
