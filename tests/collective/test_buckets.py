"""Buckets: which tensors travel together, and that their mean is that of each tensor by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import each_of
from support.ranks import Ranks

from torchfleet.collective.buckets import average, buckets
from torchfleet.collective.world import Axis


def tensors_of(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=dtype) for size in sizes]


@each_of(
    ("sizes", "max_bytes", "expected"),
    [
        ((1, 2, 3), 12, [[1, 2], [3]]),
        ((9, 1, 1), 12, [[9], [1, 1]]),  # larger than a bucket: by itself
        ((1, 9, 1), 12, [[1], [9], [1]]),
        ((3, 3), 12, [[3], [3]]),
        ((2, 1), 0, [[2], [1]]),  # not fused
        ((), 12, []),
    ],
)
def test_a_bucket_has_neighbours_up_to_its_size(sizes: tuple[int, ...], max_bytes: int, expected: Any) -> None:
    found = [[tensor.numel() for tensor in bucket] for bucket in buckets(tensors_of(*sizes), max_bytes)]
    assert found == expected


def test_a_bucket_has_tensors_of_one_type_in_their_order() -> None:
    single, double = tensors_of(1, 2), tensors_of(3, 4, dtype=torch.float64)
    mixed = [single[0], double[0], single[1], double[1]]
    assert [[tensor.numel() for tensor in bucket] for bucket in buckets(mixed)] == [[1, 2], [3, 4]]


def average_in_buckets(max_bytes: int) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    made = torch.Generator().manual_seed(rank)
    tensors = [
        torch.randn(5, 3, generator=made),
        torch.randn(4, generator=made, dtype=torch.float64),
        torch.randn(3, 5, generator=made).t(),  # not contiguous
    ]
    means = [tensor.clone() for tensor in tensors]
    average(iter(tensors), [Axis(rank, size, dist.group.WORLD)], max_bytes)
    for mean in means:
        mean.div_(size)
        dist.all_reduce(mean)
    return {"equal": all(torch.equal(tensor, mean) for tensor, mean in zip(tensors, means, strict=True))}


@pytest.mark.parametrize("max_bytes", [0, 100, 1 << 20])
def test_the_average_is_that_of_each_tensor_by_itself(ranks: Ranks, max_bytes: int) -> None:
    assert all(found["equal"] for found in ranks.run(average_in_buckets, 2, max_bytes=max_bytes))
