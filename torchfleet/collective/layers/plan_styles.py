"""What the words of a tensor-parallel plan do to a module: torch's ParallelStyles, on DTensor.

    column    outputs are cut: each rank computes its own           y_r = x·W_rᵀ
    row       inputs are cut, and the ranks' products are summed     y = Σ_r x_r·W_rᵀ
    qkv       as column, for query, key and value side by side in one layer (GPT-2's c_attn): each rank gets its heads
    vocab     an embedding is cut by rows; a linear layer by outputs, and the loss is computed from the ranks' logits
    gather    the first input of the module is whole for all layers in it; one sum in backward for all of them
    sequence  a norm or a dropout that works on the rank's part of the sequence
    blocks    modules in a row: in front of the first the sequence is cut, behind the last it is gathered
    heads     a torch.nn.MultiheadAttention: each rank computes its heads
    divide    attributes of the module are divided by the number of ranks: "divide:n_heads,inner_dim"

Source of the cuts: Shoeybi et al. 2019, Megatron-LM; Korthikanti et al. 2022 for the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle

from torchfleet.base.errors import DataError, ModelError
from torchfleet.collective.layers.cutting import cut_parameters
from torchfleet.collective.layers.parallel_random import CutRandom, ParallelDropout
from torchfleet.collective.layers.shards import own_blocks
from torchfleet.collective.layers.tensor_parallel import VocabParallelEmbedding

_SEQUENCE = Shard(1)  # hidden states are (samples, sequence, features)


def weight_dims(module: torch.nn.Module) -> tuple[int, int] | None:
    """The dimensions of `weight` that are inputs (rows of an embedding) and outputs; None: not a layer that is cut."""
    if isinstance(module, torch.nn.Linear):
        return 1, 0
    if isinstance(module, torch.nn.Embedding):
        return 0, 1
    if type(module).__name__ == "Conv1D" and getattr(module, "weight", torch.empty(0)).dim() == 2:
        return 0, 1  # transformers' linear layer with a transposed weight
    return None


class _Layer(ParallelStyle):
    """A layer whose parameters become DTensors; other modules see plain tensors."""

    def __init__(self, sequence: bool, random: CutRandom) -> None:
        super().__init__()
        self._out: Placement = _SEQUENCE if sequence else Replicate()
        self._random = random

    def placements(self, module: torch.nn.Module) -> Mapping[str, Placement]:
        raise NotImplementedError

    def enter(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        raise NotImplementedError

    def leave(self, module: torch.nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        raise NotImplementedError

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        cut_parameters(module, device_mesh, self.placements(module))
        leave: Any = self.leave  # torch's annotation leaves out that it returns something
        return distribute_module(module, device_mesh, lambda *_: None, self.enter, leave)


class Column(_Layer):
    """Returns this rank's outputs as a plain tensor; random numbers differ among ranks until the next row layer."""

    def placements(self, module: torch.nn.Module) -> Mapping[str, Placement]:
        dims = weight_dims(module)
        assert dims is not None
        return {"weight": Shard(dims[1]), "bias": Shard(0)}

    def enter(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return (_as(inputs[0], mesh, Replicate()), *inputs[1:])

    def leave(self, module: torch.nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        if module.training:
            self._random.enter()
        return output.redistribute(placements=[Shard(output.dim() - 1)]).to_local()


class QKV(Column):
    """The outputs are this rank's columns of each of the three matrices that stand side by side in the weight."""

    def leave(self, module: torch.nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return own_blocks(super().leave(module, output, mesh), 3, mesh.get_group())


class Row(_Layer):
    def placements(self, module: torch.nn.Module) -> Mapping[str, Placement]:
        dims = weight_dims(module)
        assert dims is not None
        return {"weight": Shard(dims[0]), "bias": Replicate()}

    def enter(self, module: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        self._random.leave()
        return (_as(inputs[0], mesh, Shard(inputs[0].dim() - 1)), *inputs[1:])

    def leave(self, module: torch.nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.redistribute(placements=[self._out]).to_local()


class VocabLinear(Column):
    """The logits stay a DTensor, cut by vocabulary, for a loss that torch's loss_parallel computes from the parts."""

    def leave(self, module: torch.nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.redistribute(placements=[Shard(output.dim() - 1)])


class VocabEmbedding(ParallelStyle):
    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        assert type(module) is torch.nn.Embedding
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            raise ModelError(
                "tensor_parallel: 'vocab' of an embedding with max_norm, sparse or scale_grad_by_freq: leave them out"
            )
        module.__class__ = VocabParallelEmbedding
        assert isinstance(module, VocabParallelEmbedding)
        module.cut(device_mesh)
        return module


class Gather(ParallelStyle):
    """The first input becomes a DTensor: whole, with a gradient that is summed once for all layers that use it."""

    def __init__(self, sequence: bool) -> None:
        super().__init__()
        self._into: Placement = _SEQUENCE if sequence else Replicate()

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def enter(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            return _with_first(
                args, kwargs, lambda x: _as(x, device_mesh, self._into).redistribute(placements=[Replicate()])
            )

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class Sequence(ParallelStyle):
    """A norm has whole parameters, whose gradients are summed over ranks. A dropout draws another mask on each rank.

    torch's SequenceParallel would train a norm that is frozen, and drop the same places of all parts on CPUs.
    """

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if type(module) is torch.nn.Dropout:
            module.__class__ = ParallelDropout
            return module
        names = [name for name, _ in module.named_parameters(recurse=False)]
        cut_parameters(module, device_mesh, dict.fromkeys(names, Replicate()))

        def enter(_: torch.nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (_as(inputs[0], mesh, _SEQUENCE), *inputs[1:])

        def leave(_: torch.nn.Module, output: DTensor, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[_SEQUENCE]).to_local()

        return distribute_module(module, device_mesh, lambda *_: None, enter, leave)


class FirstBlock(ParallelStyle):
    """Cuts the sequence in front of the module."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def cut(x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] % device_mesh.size():
                raise DataError(
                    f"sequence parallelism over {device_mesh.size()} ranks: expected a sequence length that they "
                    f"divide, found {x.shape[1]}. Pad the batch to a multiple of {device_mesh.size()}."
                )
            return _as(x, device_mesh, Replicate()).redistribute(placements=[_SEQUENCE]).to_local()

        def enter(_: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            return _with_first(args, kwargs, cut)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        return module


class LastBlock(ParallelStyle):
    """Gathers the sequence behind the module: its output, or the first of its outputs."""

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        def leave(_: torch.nn.Module, __: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (gather(output[0]), *output[1:])
            return gather(output)

        def gather(x: torch.Tensor) -> torch.Tensor:
            whole = _as(x, device_mesh, _SEQUENCE).redistribute(placements=[Replicate()]).to_local()
            return whole.clone()  # not a view: behind a unit of FSDP2 the next module might change it in place

        module.register_forward_hook(leave)
        return module


class Divide(ParallelStyle):
    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self._names = names

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        for name in self._names:
            setattr(module, name, getattr(module, name) // device_mesh.size())
        return module


def _as(x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """A DTensor with this placement: `x` redistributed, or with the plain tensor `x` as this rank's local tensor."""
    if isinstance(x, DTensor):
        return x.redistribute(placements=[placement])
    return DTensor.from_local(x, mesh, [placement], run_check=False)


def _with_first(args: tuple[Any, ...], kwargs: dict[str, Any], change: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with the first tensor changed: hidden states come first, by place or by name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    name = next(name for name, value in kwargs.items() if isinstance(value, torch.Tensor))
    return args, {**kwargs, name: change(kwargs[name])}
