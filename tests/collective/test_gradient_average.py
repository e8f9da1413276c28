"""Gradients of cut models are averaged while backward still runs, in order, and once for all micro-batches."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from support.ranks import Ranks
from support.sharded_models import start
from torch import nn

import torchfleet as fleet

WIDTH = 600  # of a layer whose weights are more than a bucket of a megabyte


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = fleet.nn.ColumnParallelLinear(WIDTH, WIDTH, gather_output=False)
        self.down = fleet.nn.RowParallelLinear(WIDTH, WIDTH, input_is_parallel=True)
        self.idle = nn.Parameter(torch.ones(3))  # has no gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())  # type: ignore[no-any-return]


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer(), Layer(), Layer())


def inputs(replica: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(replica))


def watched(cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What happens in the backward passes of one batch: exchanges of buckets, and gradients of the first layer."""
    found: dict[str, Any] = {}
    reduce: Any = dist.all_reduce
    for name, fields in cases.items():
        job = start(fuse_grad_size_in_MB=1, **fields)
        model = job.distribute_model(made())
        first = next(parameter for key, parameter in model.named_parameters() if key.endswith("up.weight"))
        events: list[str] = []

        def noted(tensor: torch.Tensor, *args: Any, events: list[str] = events, **kwargs: Any) -> Any:
            if kwargs.get("async_op"):
                events.append("exchange")
            return reduce(tensor, *args, **kwargs)

        dist.all_reduce = noted
        first.register_post_accumulate_grad_hook(lambda _, events=events: events.append("first"))
        model.train_batch(inputs(job.data_shard[0]), torch.zeros(4, WIDTH), nn.functional.mse_loss)
        dist.all_reduce = reduce
        found[f"{name} events"] = events
        gradient = first.grad
        found[f"{name} gradient"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        found[f"{name} is first"] = job.world.axis("pipe").rank == 0
        found[f"{name} idle"] = sum(p.grad is None for n, p in model.named_parameters() if "idle" in n)
    return found


def test_exchanges_begin_before_backward_is_over(ranks: Ranks) -> None:
    cases = {
        "layers": {"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}},
        "stages": {
            "pipeline": True,
            "pipeline_configs": {"accumulate_steps": 2},
            "hybrid_configs": {"pp_degree": 2},
        },
    }
    model = made()
    loss = sum(nn.functional.mse_loss(model(inputs(replica)), torch.zeros(4, WIDTH)) for replica in range(2)) / 2
    loss.backward()
    expected = model[0].up.weight.grad
    for found in ranks.run(watched, 4, cases=cases):
        for name, num_passes in (("layers", 1), ("stages", 2)):
            events = found[f"{name} events"]
            assert events.count("first") == num_passes
            last = len(events) - 1 - events[::-1].index("first")
            assert "exchange" in events[:last], f"{name}: nothing was under way when backward came to the first layer"
            if name == "stages":  # micro-batches before the last exchange nothing
                assert "exchange" not in events[: events.index("first")]
            assert found[f"{name} idle"] > 0
            if found[f"{name} is first"]:
                torch.testing.assert_close(found[f"{name} gradient"], expected, rtol=1e-4, atol=1e-7)
