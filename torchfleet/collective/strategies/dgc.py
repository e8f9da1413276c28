"""Deep gradient compression: only the largest gradients are exchanged, the others accumulate until they are large.

For every parameter of 16384 values or more, on each rank, with momentum m, weight decay λ and N ranks:

    g = g + λ·p                                 weight decay where the momentum is (its mean over the ranks is λ·p)
    g = g · min(1, clip · N^-1/2 / ‖g‖)         local clipping, if local_grad_clip_norm = clip > 0
    u = m·u + g,   v = v + u                    momentum correction
    sent: the ⌈n·(1 - sparsity)⌉ largest |v|;   u = v = 0 there (momentum factor masking)
    p = p - lr · Σ_ranks sent / N

Nothing is lost: the values sent and those that remain in v add up to all velocities. Smaller parameters are averaged
whole, with ordinary momentum; so are all parameters before `rampup_begin_step` and while the sparsity is 0. From that
step on the sparsity goes through the list in `rampup_step` steps and stays at its last value; u starts as the momentum
so far. The norm for clipping is that of one parameter, so that a bucket of gradients need not wait for the others.
Gradients are exchanged once per step, and a second backward pass is an error: use gradient_merge to accumulate several
batches.

Source: Lin et al. 2018, Deep Gradient Compression. Composes with amp in bfloat16, recompute, gradient_merge,
sync_batch_norm and compilation; the optimizer must be torch.optim.SGD with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from torchfleet.base.errors import FleetError, StrategyError
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.closures import run_closure
from torchfleet.collective.strategies.compression import Residual, flat, num_sent
from torchfleet.collective.strategies.layerwise.layerwise import check_inner, check_momentum
from torchfleet.collective.strategies.mixed_precision.precision import precision
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World

WHOLE_BELOW = 16384  # values; compressing fewer saves nothing
_PLAIN = {"nesterov": False, "dampening": 0, "maximize": False, "differentiable": False}


class DeepGradientCompression(Strategy):
    field = "dgc"
    registers_hook = True
    refuses_clipping = (
        "dgc=True and clip_grad_norm_ cannot be used together: backward has exchanged the largest values already and "
        "set u and v to 0 there, and what clipping takes from these values would be lost. Clip each rank's gradients "
        "before they are compressed: dgc_configs={'local_grad_clip_norm': ...}."
    )

    def __init__(self, settings: DistributedStrategy, world: World) -> None:
        super().__init__(settings, world)
        _check(settings)
        merge = settings.gradient_merge_configs
        # Gradients are sums over this many batches here, and are divided later.
        self._num_merged: int = merge["k_steps"] if settings.gradient_merge and merge["avg"] else 1
        self._num_steps = 0
        self._residuals: dict[str, Residual] = {}
        self._compressed: set[str] = set()  # parameters whose gradients were compressed in this step
        self._under_way: list[Any] = []

    @property
    def sparsity(self) -> float:
        """The sparsity of the next step."""
        begin, num_steps = self.settings.dgc_configs.rampup_begin_step, self.settings.dgc_configs.rampup_step
        return sparsity_at(self._num_steps - begin, num_steps, self.settings.dgc_configs.sparsity)

    def attach(self, parallel: DistributedDataParallel) -> None:
        self._ranks = parallel.process_group
        parallel.register_comm_hook(None, lambda _, bucket: self._exchange(bucket))

    def optimizer(self, inner: torch.optim.Optimizer, names: dict[torch.Tensor, str]) -> torch.optim.Optimizer:
        check_inner(self.field, inner, torch.optim.SGD, _PLAIN)
        check_momentum(self.field, inner)
        self._names = names
        self._stepped = {
            names[parameter]: (parameter, group) for group in inner.param_groups for parameter in group["params"]
        }
        self._optimizer = DgcMomentum(inner, lambda: (self._stepped[name][0] for name in self._compressed))
        return self._optimizer

    def begin_forward(self, exchanging: bool) -> None:
        self._under_way.clear()

    def after_step(self) -> None:
        self._num_steps += 1
        self._compressed.clear()

    # The exchange of a bucket, as soon as its gradients are computed

    def _exchange(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self._check_ready(buffer)
        whole, values, places = [], [], []
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            name = self._names[parameter]
            if self.sparsity == 0 or parameter.numel() < WHOLE_BELOW or name not in self._stepped:
                whole.append(gradient.view(-1))
                continue
            sent, indices = self._compress(name, gradient.view(-1))
            values.append(sent)
            places.append(indices + int(gradient.storage_offset() - buffer.storage_offset()))
        if not values:
            return allreduce_hook(self._ranks, bucket)
        return self._gather(buffer, whole, torch.cat(values), torch.cat(places))

    def _check_ready(self, buffer: torch.Tensor) -> None:
        if not hasattr(self, "_stepped"):
            raise FleetError("dgc=True: call fleet.distributed_optimizer before the first backward pass")
        if buffer.is_sparse:
            raise FleetError("dgc=True needs dense gradients, found a sparse one: use Embedding(sparse=False)")
        if buffer.numel() >= 1 << 31:
            raise FleetError("dgc=True: a parameter of 2^31 values or more has no room in its indices of 32 bits")

    def _compress(self, name: str, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add this rank's gradient to the residual, and take the values to send from it."""
        if name in self._compressed:
            raise FleetError(
                f"dgc=True expects one backward pass for each optimizer.step(), found a second one: of '{name}' values "
                "would be exchanged twice, those of the first pass for nothing. To gather several batches use "
                "gradient_merge=True with gradient_merge_configs={'k_steps': ...}."
            )
        residual, (parameter, group) = self._residual(name), self._stepped[name]
        gradient = gradient.to(residual.unsent.dtype)  # usually the same memory, which is overwritten later anyway
        if self._num_merged > 1:
            gradient.div_(self._num_merged)
        if group["weight_decay"]:
            gradient.add_(flat(parameter.detach()), alpha=group["weight_decay"])
        if self.settings.dgc_configs.local_grad_clip_norm:
            bound = self.settings.dgc_configs.local_grad_clip_norm * self.world.size**-0.5
            gradient.mul_((bound / gradient.norm()).clamp(max=1.0))
        residual.add(gradient, group["momentum"])
        self._compressed.add(name)
        return residual.take(num_sent(gradient.numel(), self.sparsity))

    def _residual(self, name: str) -> Residual:
        """The residual of a parameter; it starts with the optimizer's momentum."""
        if name not in self._residuals:
            parameter, _ = self._stepped[name]
            self._residuals[name] = Residual.of(parameter)
            momentum = self._optimizer.state.pop(parameter, {}).get("momentum_buffer")
            if momentum is not None:
                self._residuals[name].velocity.copy_(momentum)
        return self._residuals[name]

    def _gather(
        self, buffer: torch.Tensor, whole: list[torch.Tensor], values: torch.Tensor, places: torch.Tensor
    ) -> torch.futures.Future[torch.Tensor]:
        """Average over ranks into `buffer`: the views `whole` as they are, elsewhere the values that the ranks sent."""
        size = self.world.size
        word = torch.int64 if values.dtype == torch.float64 else torch.int32
        packed = torch.cat([values.view(word), places.to(word)])
        received = packed.new_empty(size, packed.numel())
        summed = torch.cat(whole).div_(size) if whole else buffer.new_empty(0)
        first = dist.all_reduce(summed, group=self._ranks, async_op=True) if whole else None
        second = dist.all_gather(list(received.unbind()), packed, group=self._ranks, async_op=True)
        assert second is not None
        # On a GPU `unpack` runs on another stream, and the allocator would not know that these tensors are in use.
        self._under_way.append((received, summed))

        def unpack(_: Any) -> torch.Tensor:
            if first is not None:
                first.wait()
            buffer.zero_()
            if whole:
                means = summed.split([gradient.numel() for gradient in whole])  # type: ignore[no-untyped-call]
                torch._foreach_copy_(whole, means)
            for row in received:  # in rank order: sums in different orders would let the ranks drift apart
                theirs, where = row.split(values.numel())
                buffer.index_add_(0, where, theirs.view(values.dtype).to(buffer.dtype), alpha=self._num_merged / size)
            return buffer

        future: torch.futures.Future[torch.Tensor] = second.get_future().then(unpack)
        return future

    # Saving

    def state(self) -> dict[str, torch.Tensor]:
        return {"num_steps": torch.tensor(self._num_steps)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self._num_steps = int(state.get("num_steps", self._num_steps))
        self._residuals.clear()  # the save has those that there were

    def after_load(self) -> None:
        self._compressed.clear()

    def rank_state(self) -> dict[str, torch.Tensor]:
        """u and v of every parameter that was compressed: velocity.<name> and unsent.<name>."""
        return {
            f"{kind}.{name}": getattr(residual, kind)
            for name, residual in self._residuals.items()
            for kind in ("velocity", "unsent")
        }

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        for key, saved in state.items():
            kind, _, name = key.partition(".")
            if name not in self._stepped or kind not in ("velocity", "unsent"):
                raise FleetError(f"dgc: {key} was saved, and the optimizer has no parameter {name}")
            getattr(self._residual(name), kind).copy_(saved)


class DgcMomentum(torch.optim.SGD):
    """Momentum SGD; parameters with compressed gradients, which include the momentum, move by lr · g."""

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        compressed: Callable[[], Iterator[torch.Tensor]],
    ) -> None:
        super().__init__(inner.param_groups, lr=inner.defaults["lr"])
        self.param_groups, self.state, self.defaults = inner.param_groups, inner.state, inner.defaults
        self._compressed = compressed

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = run_closure(closure)
        compressed = set(map(id, self._compressed()))
        hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        for group in self.param_groups:
            chosen = [parameter for parameter in group["params"] if id(parameter) in compressed]
            pairs = [(parameter, parameter.grad) for parameter in chosen if parameter.grad is not None]
            if pairs:
                parameters, gradients = zip(*pairs, strict=True)
                torch._foreach_add_(parameters, gradients, alpha=-float(group["lr"]))
            hidden.extend(pairs)
        for parameter, _ in hidden:
            parameter.grad = None
        super().step()
        for parameter, gradient in hidden:
            parameter.grad = gradient
        return loss


def sparsity_at(step: int, num_steps: int, values: Sequence[float]) -> float:
    """The sparsity at `step`, counted from the start of the ramp: first 0, then `values` in turn over `num_steps`."""
    return 0.0 if step < 0 else float(values[min(step * len(values) // num_steps, len(values) - 1)])


def _check(settings: DistributedStrategy) -> None:
    values = settings.dgc_configs.sparsity
    is_valid = values and all(isinstance(share, (int, float)) and 0 <= share < 1 for share in values)
    if not is_valid or sorted(values) != values:
        raise StrategyError(
            f"dgc_configs['sparsity'] expects shares from 0 to below 1 that do not fall, found {values!r}; "
            "[0.75, 0.9375, 0.984, 0.996, 0.999], say"
        )
    if settings.amp and precision(settings.amp_configs)[0] == torch.float16:
        raise StrategyError(
            "dgc and amp in float16 cannot be used together: a gradient that overflows would stay in what is not sent "
            "yet. Use amp_configs={'dtype': 'bfloat16'}, or leave one of them out."
        )
