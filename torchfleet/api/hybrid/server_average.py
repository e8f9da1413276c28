"""The mean of the network's gradients through the servers, in place of DistributedDataParallel."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torchfleet.api.hybrid.server_rounds import ServerRounds, Told
from torchfleet.base.errors import FleetError, ModelError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.data_parallel import WrappedModel
from torchfleet.collective.gradient_average import GradientAverage
from torchfleet.ps.worker.batch.sample_count import SampleCount

_BUCKET = 1 << 20  # bytes, unless the strategy says otherwise: a network beside tables has a few megabytes
_MOST_BUCKETS = 32  # a server keeps two rounds of each


class ServerAverage(GradientAverage):
    """As GradientAverage. The mean is by samples, over the workers that take part in the round."""

    def __init__(
        self,
        settings: DistributedStrategy,
        rounds: ServerRounds,
        samples: SampleCount | None,
        begin: Callable[[], None],
    ) -> None:
        """`samples`: the weights of the workers' gradients; None: equal weights. `begin`: called before the forward
        pass of a round that this worker does not take part in yet."""
        self.rounds, self._samples, self._begin_round = rounds, samples, begin
        given = None if settings.is_default("fuse_grad_size_in_MB") else settings.fuse_grad_size_in_MB << 20
        self._bucket_bytes = 0 if not settings.fuse_all_reduce_ops else given or _BUCKET
        self.is_needed, self._ends_itself = True, True
        self._is_ending = self._is_open = False
        self._buckets, self._missing, self._under_way = [], [], []
        self._own = Told()
        self.is_last = False  # the batch of this round is this worker's last one
        self.row_share: Callable[[], float] = lambda: 1.0  # the factor for gradients of rows
        self._groups: list[dict[str, Any]] = []
        self._since = time.perf_counter()  # the end of the last round
        self.seconds = 0.0  # spent on computing, over all rounds
        self.seconds_behind = 0.0  # waited because the slowest worker of a round was slower than this one

    def watch_network(self, wrapped: WrappedModel) -> None:
        """Average the gradients of the model's trained parameters from now on."""
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        num_bytes = sum(parameter.nbytes for parameter in trained)
        self._bucket_bytes = max(self._bucket_bytes, num_bytes // _MOST_BUCKETS)
        self.watch(trained)

    def use_rates(self, groups: list[dict[str, Any]]) -> None:
        """Tell the learning rates of these groups to the other workers in every round."""
        self._groups = groups

    def enter_if_out(self) -> None:
        """Before a forward pass: take part in the rounds, if this worker does not yet."""
        if not self.rounds.is_in:
            self._begin_round()
            self._since = time.perf_counter()
        if self.rounds.newcomers:
            raise FleetError(
                "hybrid mode with exchange='servers': another worker joins, and gets the network after a step, but "
                "this loop makes a second backward pass before its step. Use "
                "DistributedStrategy(gradient_merge=True) to gather the gradients of several batches."
            )

    def give_nothing(self) -> None:
        """Take part in a round without a batch, and leave. The others do not wait for this worker from then on."""
        if not self.rounds.is_in:
            self._begin_round()
        own = Told(0.0, 0.0, True, [float(group["lr"]) for group in self._groups])
        for bucket in self._buckets:
            self.rounds.give(np.zeros(sum(parameter.numel() for parameter in bucket), np.float32), own)
        if self._buckets:
            self.rounds.finish()

    def close(self) -> None:
        """Stop averaging. The hooks on the parameters stay, and do nothing."""
        self.is_needed = self._is_open = False
        if self._samples is not None:
            self._samples.close()

    @torch.no_grad()
    def _exchange(self, bucket: list[torch.nn.Parameter]) -> None:
        if not self._under_way:
            self._own = self._told()
        flat = torch.cat([_gradient(parameter).reshape(-1) for parameter in bucket]).float().cpu()
        self.rounds.give(flat.numpy(), self._own)
        self._under_way.append((None, flat, []))  # keeps the values until they are sent

    def _told(self) -> Told:
        """What this worker reports with the first bucket."""
        now = time.perf_counter()
        samples = None if self._samples is None else self._samples.take(lambda: False)
        return Told(samples, max(0.0, now - self._since), self.is_last, [float(group["lr"]) for group in self._groups])

    @torch.no_grad()
    def finish(self) -> None:
        """Complete the mean of all gradients. Does nothing if no pass is open."""
        if not self._is_open:
            return
        for bucket in self._buckets[len(self._under_way) :]:
            self._exchange(bucket)
        begun = time.perf_counter()
        self.seconds += begun - self._since
        means = self.rounds.finish()
        if means is None:  # the network gets no update, and is replaced before the next forward pass
            means = [np.zeros(sum(p.numel() for p in bucket), np.float32) for bucket in self._buckets]
        slowest = max((own.seconds for own in self.rounds.told.values()), default=0.0)
        waited = time.perf_counter() - begun
        self.seconds_behind += min(waited, max(0.0, slowest - self._own.seconds))
        for mean, watched in zip(means, self._buckets, strict=True):
            parts = torch.from_numpy(mean.copy()).split([p.numel() for p in watched])  # type: ignore[no-untyped-call]
            for part, parameter in zip(parts, watched, strict=True):
                _write(parameter, part)
        self._since = time.perf_counter()
        self.begin(self._ends_itself)


class ExchangedModel(torch.nn.Module):
    """The model as CollectiveModel calls it in training, in place of DistributedDataParallel."""

    def __init__(self, wrapped: WrappedModel, average: ServerAverage) -> None:
        super().__init__()
        self.__dict__.update(wrapped=wrapped, average=average)  # not registered: parameters keep their names
        self.require_backward_grad_sync = True  # set by CollectiveModel before every call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        average: ServerAverage = self.__dict__["average"]
        if torch.is_grad_enabled():
            if self.require_backward_grad_sync:
                average.enter_if_out()
            average.begin(self.require_backward_grad_sync)
        return self.__dict__["wrapped"](*args, **kwargs)


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient; zeros if this worker's batch did not reach the parameter."""
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    if gradient.is_sparse:
        raise ModelError(
            "a sparse gradient (an embedding with sparse=True) cannot be exchanged through the servers: make the "
            "embedding with sparse=False, or use fleet.nn.SparseEmbedding"
        )
    return gradient


def _write(parameter: torch.nn.Parameter, mean: torch.Tensor) -> None:
    """Set the gradient. A parameter that no worker's batch reached keeps None as gradient."""
    mean = mean.view_as(parameter)
    if parameter.grad is not None:
        parameter.grad.copy_(mean)
    elif bool(mean.any()):
        parameter.grad = mean.to(parameter.device, parameter.dtype, copy=True)
