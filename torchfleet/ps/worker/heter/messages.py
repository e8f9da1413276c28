"""Bodies of the messages between CPU workers and heter workers. docs/protocol.md describes them.

What arrives is decoded against these types: lists have a maximum length, and numbers a range.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from torchfleet.ps.net.wire import MAX_FRAME

MAX_BLOCKS = 256
MAX_VALUES = 2048  # parameters and buffers of one block
MAX_TENSORS = 1024  # inputs or outputs of one call
MAX_KEPT = 64  # forward passes of one worker that wait for their backward pass
MAX_DIMS = 16
MAX_NAME = 512
MAX_BODY = 1 << 22  # bytes

Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_FRAME)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=MAX_VALUES + MAX_TENSORS)]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Type and shape of a tensor, whose bytes are an array of the message."""

    dtype: Name
    shape: Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMS)]


Tensors = Annotated[list[TensorSpec], msgspec.Meta(max_length=MAX_TENSORS)]


class BlockSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A block: its name, and its parameters and buffers."""

    name: Name
    names: Annotated[list[Name], msgspec.Meta(max_length=MAX_VALUES)]
    values: Annotated[list[TensorSpec], msgspec.Meta(max_length=MAX_VALUES)]


class Join(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A CPU worker asks for a session. `most`: it gets no session if there are more sessions than this."""

    blocks: Annotated[list[BlockSpec], msgspec.Meta(max_length=MAX_BLOCKS)]
    most: Number


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load of a heter worker. `is_joined`: in the reply to Join, whether the worker has a session there."""

    sessions: Number
    is_joined: bool = False


class Forward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A forward pass. The arrays that follow are the inputs, then the changed values."""

    block: Index
    number: Number  # of this forward pass, among those of its worker
    inputs: Tensors
    keywords: Annotated[list[Name], msgspec.Meta(max_length=MAX_TENSORS)]  # names of the last inputs
    changed: Annotated[list[Index], msgspec.Meta(max_length=MAX_VALUES)]  # values that come with this message
    wanted: Annotated[list[Index], msgspec.Meta(max_length=MAX_VALUES + MAX_TENSORS)]  # inputs, then parameters: those
    # for which a backward pass returns gradients; empty: there will be none
    training: Annotated[list[bool], msgspec.Meta(max_length=1 << 16)]  # of every module of the block
    seed: Number  # of random numbers
    autocast: Name  # the dtype, or "" without
    kept: Annotated[list[Number], msgspec.Meta(max_length=MAX_KEPT)]  # forward passes that may get a backward pass


class Forwarded(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a forward pass. The arrays that follow are the outputs, then the buffers that have changed."""

    outputs: Tensors
    kind: Literal["tensor", "tuple", "list", "dict"]
    keys: Annotated[list[Name], msgspec.Meta(max_length=MAX_TENSORS)]  # of a dict
    differentiable: Annotated[list[bool], msgspec.Meta(max_length=MAX_TENSORS)]
    buffers: Annotated[list[Index], msgspec.Meta(max_length=MAX_VALUES)]  # among the block's buffers


class Backward(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A backward pass. The arrays that follow are gradients of the outputs `given`."""

    number: Number  # of the forward pass
    given: Annotated[list[Index], msgspec.Meta(max_length=MAX_TENSORS)]
    grads: Tensors


class Gradients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a backward pass: gradients of the tensors in `Forward.wanted` that the outputs depend on."""

    found: Annotated[list[Index], msgspec.Meta(max_length=MAX_VALUES + MAX_TENSORS)]  # places in `wanted`
    grads: Annotated[list[TensorSpec], msgspec.Meta(max_length=MAX_VALUES + MAX_TENSORS)]
