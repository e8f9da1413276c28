"""What stands where the user's model stood."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchfleet.collective.data_parallel import Chained
from torchfleet.collective.outputs import tensors
from torchfleet.collective.strategy import Part

LossFn = Callable[[Any, Any], torch.Tensor]


class CollectiveModel(torch.nn.Module):
    """The model, run by all ranks together. `module` is the user's own; names of parameters and states are its names.

    `train_batch` and `eval_batch` work under every strategy; under `pipeline` they are the way to run the model.
    """

    def __init__(
        self, chained: Chained, parts: Sequence[Part], parallel: DistributedDataParallel | None, pipeline: Any = None
    ) -> None:
        super().__init__()
        self.module = chained.module
        # Not registered: parameters would be listed twice, and once more with prefixes.
        self.__dict__["_parallel"] = parallel
        self.__dict__["_called"] = parallel or chained
        self._parts, self._pipeline = tuple(parts), pipeline
        self.num_samples = 0
        self.on_loss: Callable[[torch.Tensor], object] | None = (
            None  # who wants to know the loss, if the model returns it
        )
        self.train(self.module.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._pipeline is not None:
            raise RuntimeError(
                "under pipeline=True the stages run together: use model.train_batch(inputs, target, loss_fn) to train "
                "and model.eval_batch(inputs) to predict"
            )
        if not torch.is_grad_enabled():
            return self._called(*args, **kwargs)
        self._begin()
        self._count(args, kwargs)
        outputs = self._called(*args, **kwargs)
        if self.on_loss is not None:
            for one in tensors(outputs):
                if one.dim() == 0 and one.requires_grad:
                    self.on_loss(one.detach())
                    break
        return outputs

    def train_batch(self, inputs: Any, target: Any, loss_fn: LossFn) -> torch.Tensor | None:
        """Forward and backward of one batch; the loss, which in a pipeline only the last stage has (None elsewhere).

        `inputs` is what the model is called with: a tensor, or a tuple of them. `loss_fn(output, target)` returns a
        mean over samples.
        """
        if self._pipeline is not None:
            self._begin()
            self._count((inputs,), {})
            for part in self._parts:
                part.begin_backward()
            loss = self._pipeline.train_batch(inputs, target, loss_fn)
            for part in self._parts:
                part.end_backward()
            if self.on_loss is not None and loss is not None:
                self.on_loss(loss.detach())
            return loss  # type: ignore[no-any-return]
        loss = loss_fn(self(*_arguments(inputs)), target)
        if self.on_loss is not None:
            self.on_loss(loss.detach())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def eval_batch(self, inputs: Any) -> Any:
        """The outputs for one batch without gradients; in a pipeline on the last stage, None elsewhere."""
        if self._pipeline is not None:
            return self._pipeline.eval_batch(inputs)
        return self(*_arguments(inputs))

    def _begin(self) -> None:
        answers = [part.exchanges() for part in self._parts]
        exchanging = all(answers)
        if self._parallel is not None:
            self._parallel.require_backward_grad_sync = exchanging
        for part in self._parts:
            part.begin_forward(exchanging)

    def _count(self, args: Any, kwargs: Any) -> None:
        first = next((one for one in tensors([args, kwargs]) if one.dim()), None)
        self.num_samples += 0 if first is None else first.shape[0]

    # Names are the user's

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def train(self, mode: bool = True) -> CollectiveModel:
        super().train(mode)
        self._called.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _arguments(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
