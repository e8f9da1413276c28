"""How many samples a step's gradients come from: the weight of a worker's gradients in a step of all workers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchfleet.base.job_hook import JobHook
from torchfleet.ps.worker.batch.batch_tensors import tensors_of, told_samples


@dataclass
class Count:
    """Samples since a step, and whether all calls had a known number."""

    num: int = 0
    is_known: bool = True


class SampleCount:
    """Counts the samples of those model calls since the last step that a backward pass went through.

    Calls without a backward pass (validation) do not count; several batches before one step do.
    """

    def __init__(self, model: torch.nn.Module, worker: int, num_optimizers: int = 1) -> None:
        """Counts separately for each optimizer, because each makes its own steps."""
        self._worker = worker
        self._is_told = False
        self._counts = [Count() for _ in range(num_optimizers)]
        self._found = ""
        note_call = torch.compiler.disable(self._note_call)  # type: ignore[no-untyped-call]
        self._hook = model.register_forward_hook(JobHook(note_call), with_kwargs=True)

    def close(self) -> None:
        """Stop counting."""
        self._hook.remove()

    def reset(self, share: int = 0) -> None:
        """Reset an optimizer's count: its gradients were dropped or handed over."""
        self._counts[share] = Count()

    def take(self, is_nothing: Callable[[], bool], share: int = 0) -> float | None:
        """The number of samples since an optimizer's last step; None if it is not known, which is reported once on
        stderr. The count starts again at 0.

        `is_nothing`: whether the step has no gradient, so that no sample was expected.
        """
        count, found = self._counts[share], self._found
        self.reset(share)
        if count.is_known and (count.num or is_nothing()):
            return float(count.num)
        if not self._is_told:
            self._is_told = True
            found = found or "the model was not called as model(batch)"
            print(
                f"worker {self._worker}: the number of samples of a step is not known ({found}), so all workers count "
                "alike in it. If their batches differ in size, call the model with a batch that has `num_samples`, or "
                "with tensors whose first dimension is the batch; else set "
                "DistributedStrategy(sync_mean='workers').",
                file=sys.stderr,
                flush=True,
            )
        return None

    def _note_call(self, model: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        outputs = [tensor for tensor in tensors_of(output).values() if tensor.requires_grad]
        num, is_counted = self._samples([args, kwargs], outputs), False

        def count(gradient: torch.Tensor) -> None:
            nonlocal is_counted
            if not is_counted:  # once per call, at the first of its outputs
                is_counted = True
                for counted in self._counts:
                    counted.is_known = counted.is_known and num is not None
                    counted.num += num or 0

        for tensor in outputs:
            tensor.register_hook(count)  # type: ignore[no-untyped-call]

    def _samples(self, inputs: Any, outputs: list[torch.Tensor]) -> int | None:
        """The number that a batch states; otherwise a length that an input and an output share; otherwise the length
        that all inputs share; otherwise None.
        """
        told = told_samples(inputs)
        if told is not None:
            return told
        lengths = {len(tensor): place for place, tensor in tensors_of(inputs, "input").items() if tensor.dim()}
        for tensor in outputs:
            if tensor.dim() and len(tensor) in lengths:
                return len(tensor)
        if len(lengths) == 1:
            return next(iter(lengths))
        self._found = f"its inputs have lengths {', '.join(map(str, sorted(lengths))) or 'that are not known'}"
        return None
