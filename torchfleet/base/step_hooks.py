"""Torch hooks that detect the phases of a step: the model is called, its outputs get gradients, the optimizer steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from torchfleet.base.job_hook import JobHook
from torchfleet.base.tracing.step_spans import FORWARD, UPDATE, StepSpans

_DEPTH = 4  # of nested containers in a model's output


class StepHooks:
    """Follows a model and its optimizers until removed. Records nothing outside of training."""

    def __init__(self, spans: StepSpans, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._spans, self._model = spans, model
        enter = torch.compiler.disable(self._enter)  # type: ignore[no-untyped-call]
        leave = torch.compiler.disable(self._leave)  # type: ignore[no-untyped-call]
        self._handles: list[RemovableHandle] = [
            # Registered first, so that the waits of other hooks of the model count as part of its call.
            model.register_forward_pre_hook(JobHook(lambda called, _: enter(called)), prepend=True),
            model.register_forward_hook(JobHook(lambda called, _, outputs: leave(called, outputs))),
            *(optimizer.register_step_pre_hook(self._update) for optimizer in optimizers),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _is_followed(self, called: torch.nn.Module) -> bool:
        # A copy of the model has these hooks too.
        return called is self._model and self._spans.is_traced and torch.is_grad_enabled()

    def _enter(self, called: torch.nn.Module) -> None:
        if self._is_followed(called):
            self._spans.enter(FORWARD)

    def _leave(self, called: torch.nn.Module, outputs: Any) -> None:
        if not self._is_followed(called):
            return
        backward = self._spans.enter_loss()
        first = next((tensor for tensor in _tensors(outputs) if tensor.requires_grad), None)
        if first is not None:
            first.register_hook(lambda gradient: backward.note())  # type: ignore[no-untyped-call]

    def _update(self, *_: Any) -> None:
        self._spans.enter(UPDATE)


def _tensors(outputs: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors in a model's output."""
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif depth and isinstance(outputs, (tuple, list)):
        for each in outputs:
            yield from _tensors(each, depth - 1)
    elif depth and isinstance(outputs, Mapping):
        for each in outputs.values():
            yield from _tensors(each, depth - 1)
