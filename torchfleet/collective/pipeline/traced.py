"""Stages of a model that is not a Sequential: torch.export traces it, torch.distributed.pipelining splits the graph.

Every rank traces the whole model, on tensors with shapes but no memory, and keeps its own stage. Values that are
computed before a cut and used after it cross the cut; a value for a later stage passes through all stages in between.
The model's inputs are not sent: every rank reads the same batch.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.distributed.pipelining._IR import annotate_split_points
from torch.utils._pytree import tree_leaves, tree_map_only

from torchfleet.base.errors import ModelError
from torchfleet.collective.pipeline.shapes import as_tuple
from torchfleet.collective.pipeline.stage_ties import Tie, by_name
from torchfleet.collective.pipeline.stages import stage_of_modules
from torchfleet.collective.pipeline.trace_repairs import in_its_order, keep_buffers_in_backward, without_assertions
from torchfleet.collective.strategies.recomputation.offload import Offload
from torchfleet.collective.strategies.recomputation.recompute import recompute


class Tracer:
    """A copy of a model without memory, which is traced for batches of different shapes."""

    def __init__(
        self,
        model: torch.nn.Module,
        starts: Sequence[str],
        tied: Sequence[Tie],
        rank_of: Sequence[int],
        device: torch.device,
    ) -> None:
        """`rank_of`: the rank of each stage. `device`: where the stages will compute; the model is not there yet, and
        may have no values yet.
        """
        self._mode, self._device = FakeTensorMode(allow_non_fake_inputs=True), device
        # A layer that is sharded over ranks communicates, which a trace does not record. A replacement with the same
        # shapes is traced, and the layer itself takes its place in the stage.
        self._opaque: dict[str, torch.nn.Module] = {}
        memo: dict[int, Any] = {}
        for name, module in model.named_modules():
            stand_in = module.stand_in() if hasattr(module, "stand_in") else None
            if stand_in is not None:
                self._opaque[name], memo[id(module)] = module, self._without_memory(stand_in)
        self._model = self._without_memory(model, memo)
        self._tensors = [*self._model.parameters(), *self._model.buffers()]
        self._split: dict[str, Any] = dict.fromkeys(starts, SplitPoint.BEGINNING)
        self._rank_of = rank_of
        self._rank_of_module = {name: rank_of[stage] for name, stage in stage_of_modules(model, starts).items()}
        self._ties = by_name(tied)

    def called(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
        """The names of the modules that forward calls for inputs like these, in order."""
        found: list[str] = []
        args, named = tree_map_only(torch.Tensor, self._bare, (args, dict(kwargs)))
        handles = [
            module.register_forward_pre_hook(partial(_note, found, name))
            for name, module in self._model.named_modules()
        ]
        try:
            with self._mode, torch.no_grad():
                self._model(*args, **named)
        except Exception as error:
            raise self._untraceable(error) from error
        finally:
            for handle in handles:
                handle.remove()
        return found

    def trace(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool, indices: Sequence[int]
    ) -> dict[int, TracedStage]:
        """Trace stages for inputs like these. Their parameters have no memory until `adopt` sets them."""
        model = copy.deepcopy(
            self._model, {id(tensor): tensor for tensor in self._tensors}
        )  # the cuts are marked in this copy
        model.train(training)
        args, named = tree_map_only(torch.Tensor, self._bare, (args, dict(kwargs)))
        try:
            annotate_split_points(model, self._split)
            with torch.no_grad():  # recomputed modules are then traced as they are
                pipe = pipeline(model, args, named, split_policy=without_assertions)
        except Exception as error:
            raise self._untraceable(error) from error
        self._check([pipe.get_stage_module(stage) for stage in range(pipe.num_stages)])
        found: dict[int, TracedStage] = {}
        for index in indices:
            rank = self._rank_of[index]
            own = {name: tie[rank][0] for name, tie in self._ties.items() if rank in tie}
            found[index] = TracedStage(pipe.get_stage_module(index), pipe.split_gm.graph, index, own)
            found[index].put_back(self._opaque)
        return found

    def _untraceable(self, error: Exception) -> ModelError:
        return ModelError(
            f"pipeline: torch.export cannot trace this {type(self._model).__name__}, which is needed to cut a model "
            f"that is no torch.nn.Sequential. It says: {_first_line(error)}. Make the model a Sequential of its "
            "stages, or take what depends on values (branches, .item()) out of its forward."
        )

    def _without_memory(self, module: torch.nn.Module, memo: Mapping[int, Any] | None = None) -> torch.nn.Module:
        tensors = [*module.parameters(), *module.buffers()]
        bare = {id(tensor): self._bare(tensor) for tensor in tensors if not hasattr(tensor, "to_local")}
        return copy.deepcopy(module, {**bare, **(memo or {})})

    def _bare(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same shape on the device, without memory."""
        with self._mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
            if isinstance(tensor, torch.nn.Parameter):
                return torch.nn.Parameter(made, tensor.requires_grad)
        return made

    def _check(self, modules: Sequence[torch.nn.Module]) -> None:
        """Check all stages on every rank: if only one rank found an error, the others would wait for it."""
        if len(modules) != len(self._split) + 1:
            raise ModelError(
                f"pipeline: the modules that begin stages ({', '.join(self._split)}) cut this model into "
                f"{len(modules)} stages instead of {len(self._split) + 1}: each must be called once, after the last one"
            )
        for stage, name, _ in strays(modules, self._rank_of, self._rank_of_module, self._ties):
            raise ModelError(
                f"pipeline: stage {stage} uses {name!r}, which belongs to another stage by the order in which the "
                "model has its modules. Assign modules in the order forward calls them, or let stages begin elsewhere."
            )


def strays(
    modules: Sequence[torch.nn.Module],
    rank_of: Sequence[int],
    rank_of_module: Mapping[str, int],
    tied: Mapping[str, Tie],
) -> Iterator[tuple[int, str, int]]:
    """(stage, parameter, rank): parameters that a traced stage uses, and another rank has by the order of modules."""
    for stage, module in enumerate(modules):
        for name, _ in module.named_parameters():
            owner = rank_of_module.get(_original(name).rpartition(".")[0], rank_of[stage])
            if owner != rank_of[stage] and rank_of[stage] not in tied.get(name, ()):
                yield stage, name, owner


class TracedStage:
    """One traced stage, and where its arguments come from."""

    def __init__(self, module: torch.nn.Module, graph: torch.fx.Graph, index: int, tied: Mapping[str, str]) -> None:
        """`tied`: names of parameters that other stages also use → their names in this stage."""
        self.module, self._tied = module, tied
        self._put_back: set[str] = set()
        wiring = _Wiring(graph)
        stage = wiring.stages[index]
        self._arguments = [wiring.source(node) for node in stage.args]
        self._incoming = wiring.crossing(index - 1)
        self._outgoing = wiring.crossing(index)
        self._index = index

    def adopt(self, model: torch.nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
        """Take this stage's tensors by name from the model; `buffers` has those of all stages."""
        own = {**buffers, **dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        own.update({name: own[here] for name, here in self._tied.items()})
        every = [
            *self.module.named_parameters(remove_duplicate=False),
            *self.module.named_buffers(remove_duplicate=False),
        ]
        for place, traced in every:
            name, (parent, _, last) = _original(place), place.rpartition(".")
            if name not in own:
                continue  # a constant of the trace
            if own[name].is_meta:
                raise ModelError(
                    f"pipeline: stage {self._index} uses the buffer {name!r} of another stage, which is on the meta "
                    "device and gets its values there: make it with device='cpu'"
                )
            holder = self.module.get_submodule(parent)
            tensors = holder._parameters if last in holder._parameters else holder._buffers
            tensors[last] = own[name] if name not in buffers else own[name].to(traced.device)  # type: ignore[assignment]

    def put_back(self, layers: Mapping[str, torch.nn.Module]) -> None:
        """Replace stand-ins by the layers themselves, by name. Layers to be recomputed are already set up for it."""
        self._put_back = set(layers)
        modules = dict(self.module.named_modules())
        for name, traced in modules.items():
            if _original(name) in layers:
                parent, _, last = name.rpartition(".")
                modules[parent]._modules[last] = in_its_order(traced, layers[_original(name)])

    def arguments(self, received: Sequence[torch.Tensor], inputs: Sequence[Any]) -> list[Any]:
        """The arguments of the stage, from the values that crossed the cut before it and the model's inputs (flat)."""
        values = dict(zip(self._incoming, received, strict=True))
        return [inputs[place] if stage < 0 else values[stage, place] for stage, place in self._arguments]

    def outgoing(self, received: Sequence[torch.Tensor], inputs: Sequence[Any], outputs: Any) -> tuple[Any, ...]:
        """The values that cross the cut after the stage; after the last stage, the model's outputs, flat."""
        values = dict(zip(self._incoming, received, strict=True))
        values.update({(self._index, place): output for place, output in enumerate(as_tuple(outputs))})
        values.update({(-1, place): value for place, value in enumerate(inputs)})
        return tuple(values[key] for key in self._outgoing)

    def recompute(self, names: Iterable[str], offload: Offload | None) -> None:
        """Apply recompute to the modules of these names, since a trace does not keep it. The stage must be new."""
        chosen = {*names} - self._put_back
        for module in [found for name, found in self.module.named_modules() if _original(name) in chosen]:
            keep_buffers_in_backward(module)
            recompute(module, offload)


def _original(name: str) -> str:
    """The name in the model. A trace has a module of its own, `name@1`, for the second call of a module."""
    return re.sub(r"@\d+", "", name)


Value = tuple[int, int]  # (stage, index of its output); stage -1 stands for the inputs of the model


class _Wiring:
    """The graph whose calls are the stages."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self.stages = [node for node in graph.nodes if node.op == "call_module"]
        self._inputs = [node for node in graph.nodes if node.op == "placeholder"]
        (output,) = (node for node in graph.nodes if node.op == "output")
        self._outputs = [self.source(node) for node in tree_leaves(output.args) if isinstance(node, torch.fx.Node)]

    def source(self, node: Any) -> Value:
        if node in self._inputs:
            return -1, self._inputs.index(node)
        if node.target is operator.getitem:
            return self.stages.index(node.args[0]), node.args[1]
        return self.stages.index(node), 0

    def crossing(self, index: int) -> list[Value]:
        """Values of stages up to `index` that later stages or the output need; for the last, the model's outputs."""
        if index == len(self.stages) - 1:
            return self._outputs
        needed = [self.source(node) for stage in self.stages[index + 1 :] for node in stage.args]
        return sorted({value for value in (*needed, *self._outputs) if 0 <= value[0] <= index})


def _note(found: list[str], name: str, *_: Any) -> None:
    found.append(name)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
