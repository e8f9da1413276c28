"""The blocks of a model: the outermost modules under fleet.device_guard("gpu"), which heter workers compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchfleet.base.device_guard import CPU, GPU, device_of_guard
from torchfleet.base.errors import ModelError
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding
from torchfleet.ps.worker.heter.messages import BlockSpec, TensorSpec
from torchfleet.ps.worker.heter.tensors import spec_of

MOVE_OUT = "Embeddings are looked up by the CPU workers: move them out of the guard."


@dataclass(frozen=True)
class Block:
    """A module that is computed elsewhere, and its name in the model."""

    name: str
    module: torch.nn.Module

    def parameters(self) -> list[torch.nn.Parameter]:
        return list(self.module.parameters())

    def buffers(self) -> list[torch.Tensor]:
        return list(self.module.buffers())

    @property
    def value_names(self) -> list[str]:
        """The names of its parameters, then of its buffers. Each tensor has one name."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return [name for name, _ in named]

    def spec(self) -> BlockSpec:
        """Describe the block, so that both sides can compare. Raises ModelError for a dtype that cannot be sent."""
        names, values = self.value_names, [*self.parameters(), *self.buffers()]
        specs: list[TensorSpec] = [
            spec_of(value, f"'{self.name}.{name}'") for name, value in zip(names, values, strict=True)
        ]
        return BlockSpec(self.name, names, specs)


def blocks_of(model: torch.nn.Module) -> list[Block]:
    """The blocks of the model, in its order. Raises ModelError for a block that heter workers cannot compute."""
    if _is_block(model):
        raise ModelError(
            "the whole model is under device_guard('gpu'), and its CPU workers have nothing to compute: mark a part of "
            "it, the network behind the embeddings"
        )
    found, known = [], set[int]()
    for name, module in _outermost(model, ""):
        if id(module) not in known:  # a module with two names is one block
            known.add(id(module))
            _check(name, module)
            found.append(Block(name, module))
    return found


def _outermost(module: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Module]]:
    for own, child in module.named_children():
        path = f"{name}.{own}" if name else own
        if _is_block(child):
            yield path, child
        else:
            yield from _outermost(child, path)


def _is_block(module: torch.nn.Module) -> bool:
    """Whether the module is marked. A Sequential that was made in the guard, and assigned outside of it, has only
    marked members."""
    device = device_of_guard(module)
    if device is not None or not isinstance(module, torch.nn.Sequential):
        return device == GPU
    return len(module) > 0 and all(_is_block(member) for member in module)


def _check(name: str, block: torch.nn.Module) -> None:
    for inner, module in block.named_modules():
        path = f"{name}.{inner}" if inner else name
        if isinstance(module, SparseEmbedding):
            raise ModelError(f"'{path}' is a sparse embedding under device_guard('gpu'). {MOVE_OUT}")
        if device_of_guard(module) == CPU:
            raise ModelError(
                f"'{path}' is under device_guard('cpu') inside of '{name}', which is under device_guard('gpu'): a "
                "block is computed as a whole. Move it out."
            )
