"""Large-scale classification: the last layer sharded by classes over the ranks, softmax with a margin on the shards.

    model.loss = fleet.nn.MarginSoftmax(num_classes=1_000_000, dim=512)
    loss = model.loss(features, labels)           # the mean over the batches of all ranks, the same number on each

Rank r holds the weights of its own classes. Features of all ranks are gathered, and with cos θ_j = x·w_j / (‖x‖·‖w_j‖)

    z_j = s · cos θ_j   (j ≠ y),      z_y = s · (cos(m1·θ_y + m2) − m3),      loss = −log(exp(z_y) / Σ_j exp(z_j))

is computed with an all-reduce of the largest z, of Σ exp and of z_y. No rank ever has more than (samples of all ranks)
× (own classes) values, in float32 for every dtype of features. Gradients of features are summed over the ranks and
returned to the rank that the features came from. A process without a process group computes the ordinary loss.

loss_type  "arcface": m2 = 0.5   (Deng et al. 2019, ArcFace);   "cosface": m3 = 0.35   (Wang et al. 2018, CosFace);
           "softmax": z = x·w, no scale and no margin
Composes with data parallelism and what acts on it (amp, recompute, gradient_merge, sharding, lars, lamb): the weights
are each rank's own and take no part in the exchange of gradients (lars and lamb take the norm of a rank's shard). Not
with pipeline, tensor_parallel, dgc or localsgd. Initial values do not depend on the number of ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from torchfleet.base.errors import DataError, ModelError
from torchfleet.collective import world
from torchfleet.collective.layers.class_shards import OwnClasses, class_range, first_values
from torchfleet.collective.layers.row_gathering import gather, scattered_sum, stack

_MARGINS = {"arcface": (1.0, 0.5, 0.0), "cosface": (1.0, 0.0, 0.35), "softmax": (1.0, 0.0, 0.0)}
_NEAR_ONE = 1.0 - 1e-6  # the derivative of acos is infinite at 1


class MarginSoftmax(torch.nn.Module):
    """The last layer and its loss. Create it after fleet.init, which sets the number of ranks.

    forward(features (n, dim), labels (n,)): n may differ among ranks; all ranks call it together. `weight` (own
    classes, dim) is the rank's own parameter, marked `fleet_local` and, for checkpoints, `fleet_piece`. m1, m2 and m3
    default to those of the loss type.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        loss_type: str = "arcface",
        scale: float = 64.0,
        m1: float | None = None,
        m2: float | None = None,
        m3: float | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_classes, self.dim, self.loss_type, self.scale = num_classes, dim, loss_type, float(scale)
        self.margins = _checked(num_classes, dim, loss_type, scale, (m1, m2, m3))
        self.rank, self.size = _ranks()
        self.first, past = class_range(num_classes, self.rank, self.size)
        self.weight = torch.nn.Parameter(first_values(self.first, past, dim, seed).to(device))
        own: Any = self.weight
        own.fleet_local, own.fleet_piece = True, (0, self.rank, self.size)

    def extra_repr(self) -> str:
        own = self.weight.shape[0]
        return f"{self.num_classes} classes ({own} of them here), dim={self.dim}, {self.loss_type}, scale={self.scale}"

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self._check(features, labels)
        with torch.autocast(features.device.type, enabled=False):
            sizes = self._batch_sizes(features, labels)
            labels = gather(labels.long(), sizes)
            whole: torch.Tensor = _GatheredFeatures.apply(features.float(), sizes)  # type: ignore[no-untyped-call]
            products = self._products(whole)
            loss: torch.Tensor = _Loss.apply(products, labels, self)  # type: ignore[no-untyped-call]
            return loss

    @torch.no_grad()
    def predict(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of all classes for each of this rank's features, and its score (a cosine; x·w for "softmax")."""
        self._check(features, None)
        with torch.autocast(features.device.type, enabled=False):
            sizes = self._batch_sizes(features)
            products = self._products(gather(features.float(), sizes))
            if products.shape[1]:
                score, place = products.max(1)
            else:  # more ranks than classes
                score = products.new_full((len(products),), -math.inf)
                place = torch.zeros_like(score, dtype=torch.int64)
            scores, classes = stack(score, self.size), stack(place + self.first, self.size)
            best = scores.max(0).indices.unsqueeze(0)  # of equal scores the first, which has the lowest class
            own = slice(sum(sizes[: self.rank]), sum(sizes[: self.rank + 1]))
            return classes.gather(0, best)[0, own], scores.gather(0, best)[0, own]

    def _products(self, features: torch.Tensor) -> torch.Tensor:
        weight = self.weight.float()
        if self.loss_type == "softmax":
            return features @ weight.t()
        return F.normalize(features) @ F.normalize(weight).t()

    def _batch_sizes(self, features: torch.Tensor, labels: torch.Tensor | None = None) -> list[int]:
        """The batch sizes of all ranks, after a check that the labels are classes. The host waits for a GPU once."""
        if labels is None and self.size == 1:
            return [len(features)]
        # torch.tensor(..., device=...) would wait for the GPU too.
        own = torch.full((1, 3), len(features), dtype=torch.int64, device=features.device)
        if labels is None or not len(labels):
            own[0, 1:] = 0
        else:
            own[0, 1:] = torch.stack(labels.detach().aminmax()).to(own)
        every: list[list[int]] = stack(own, self.size).flatten(0, 1).tolist()
        low, high = min(lowest for _, lowest, _ in every), max(highest for _, _, highest in every)
        if low < 0 or high >= self.num_classes:
            raise DataError(
                f"MarginSoftmax: labels must be from 0 to {self.num_classes - 1}, found {low} to {high}, over all ranks"
            )
        return [size for size, _, _ in every]

    def margin(self, cosine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """z_y / s for the cosine of the sample's own class, and its derivative."""
        m1, m2, m3 = self.margins
        if (m1, m2) == (1.0, 0.0):
            return cosine - m3, torch.ones_like(cosine)
        bounded = cosine.clamp(-_NEAR_ONE, _NEAR_ONE)
        angle = m1 * bounded.acos() + m2
        return angle.cos() - m3, m1 * angle.sin() / (1.0 - bounded.square()).sqrt()

    def _check(self, features: torch.Tensor, labels: torch.Tensor | None) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        if ranks != self.size:
            raise ModelError(
                f"MarginSoftmax was made for {self.size} rank{'s' * (self.size > 1)}, and there are {ranks}: make the "
                "model after fleet.init, and call it after fleet.distributed_model"
            )
        if features.dim() != 2 or features.shape[1] != self.dim:
            raise ModelError(f"MarginSoftmax: features must be (n, {self.dim}), found {tuple(features.shape)}")
        if labels is not None and labels.shape != features.shape[:1]:
            raise ModelError(
                f"MarginSoftmax: one label for each of {len(features)} features, found shape {tuple(labels.shape)}"
            )


class _Loss(torch.autograd.Function):
    """The mean loss from the products (all samples, own classes), which it overwrites; its gradient is exact."""

    @staticmethod
    def forward(ctx: Any, products: torch.Tensor, labels: torch.Tensor, layer: MarginSoftmax) -> torch.Tensor:
        own = OwnClasses(labels, layer.first, products.shape[1])
        scale = 1.0 if layer.loss_type == "softmax" else layer.scale
        value, slope = layer.margin(own.of(products))
        own.put(products, value)
        logits = products.mul_(scale)  # in place, as the products are not used again: saves a second matrix
        largest = logits.max(1).values if logits.shape[1] else logits.new_full((len(logits),), -math.inf)
        _all_reduce(largest, dist.ReduceOp.MAX, layer.size)
        target = own.of(logits)
        shares = logits.sub_(largest.unsqueeze(1)).exp_()
        both = torch.stack([shares.sum(1), target])
        _all_reduce(both, dist.ReduceOp.SUM, layer.size)
        total, target = both
        shares.div_(total.unsqueeze(1))
        own.put(shares, (own.of(shares) - 1.0) * slope)
        ctx.save_for_backward(shares)
        ctx.factor = scale / max(1, len(labels))
        loss: torch.Tensor = (total.log() + (largest - target)).sum() / max(1, len(labels))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (shares,) = ctx.saved_tensors
        return shares * (gradient * ctx.factor), None, None


class _GatheredFeatures(torch.autograd.Function):
    """The features of all ranks; backward sums the gradients over all classes and returns those of this rank's
    features.

    The gradients are multiplied by the number of ranks: DistributedDataParallel divides the backbone's gradients by it,
    but these are already shares of one mean.
    """

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        ctx.sizes = sizes
        return gather(features, sizes)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sizes = ctx.sizes
        if len(sizes) == 1:
            return gradient, None
        return scattered_sum(gradient, sizes) * len(sizes), None


def _checked(
    num_classes: int, dim: int, loss_type: str, scale: float, given: tuple[float | None, ...]
) -> tuple[float, float, float]:
    """The margins; those that are not given are those of the loss type."""
    if num_classes < 1 or dim < 1 or not scale > 0:
        raise ModelError(
            f"MarginSoftmax: num_classes, dim and scale must be positive, found {num_classes}, {dim} and {scale}"
        )
    if loss_type not in _MARGINS:
        raise ModelError(f"MarginSoftmax: loss_type must be one of {', '.join(_MARGINS)}, found {loss_type!r}")
    if loss_type == "softmax" and given != (None, None, None):
        raise ModelError(f"MarginSoftmax: loss_type 'softmax' has no margins, found m1, m2, m3 = {given}")
    pairs = zip(given, _MARGINS[loss_type], strict=True)
    m1, m2, m3 = (usual if margin is None else float(margin) for margin, usual in pairs)
    return m1, m2, m3


def _ranks() -> tuple[int, int]:
    """This rank and the number of ranks, as fleet.init found them; the ranks may not have met yet."""
    info = world.begun.info
    if info is not None:
        return info.worker_index, info.num_workers
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _all_reduce(tensor: torch.Tensor, op: Any, size: int) -> None:
    if size > 1:
        dist.all_reduce(tensor, op)
