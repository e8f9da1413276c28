"""Tests trace each kind of network once in a process: torch.export takes a quarter of a second."""

from __future__ import annotations

from typing import Any

import torch

from torchfleet.api.serving.description import ModelDescriber
from torchfleet.api.serving.model_inputs import ModelInputs
from torchfleet.api.serving.network_graph import NetworkGraph

_traced: dict[object, tuple[NetworkGraph | None, str]] = {}


def trace_once(monkeypatch: Any) -> None:
    """Let describers take the graph of an equal network that another one has traced."""
    trace = ModelDescriber._trace

    def found(self: ModelDescriber, inputs: ModelInputs) -> None:
        key = self._call, _key(self._model, inputs)
        if key not in _traced:
            trace(self, inputs)
            _traced[key] = self._network, self._reason
        self._is_traced = True
        self._network, self._reason = _traced[key]

    monkeypatch.setattr(ModelDescriber, "_trace", found)


def _key(model: torch.nn.Module, inputs: ModelInputs) -> object:
    """What the graph depends on: classes, settings, names and shapes of tensors, and values that saves do not have."""
    unsaved = [vars(module)["_buffers"][name] for module in model.modules() for name in _unsaved(module)]
    constants = [None if buffer is None else buffer.tolist() for buffer in unsaved]
    settings = [(name, type(module), _settings(module)) for name, module in model.named_modules()]
    shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.named_parameters()]
    return repr((inputs.features, settings, shapes, constants, model.training))


def _unsaved(module: torch.nn.Module) -> list[str]:
    return sorted(vars(module)["_non_persistent_buffers_set"])


def _settings(module: torch.nn.Module) -> list[tuple[str, object]]:
    plain = (bool, int, float, str, tuple, list, type(None))
    return sorted((name, repr(value)) for name, value in vars(module).items() if isinstance(value, plain))
