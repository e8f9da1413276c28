"""CUDA graphs by build_strategy: recorded, and trained as without; values against plain torch on the same GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.collective_oracles import batches, mlp, train
from support.gpu_cases import DEVICE, on_one_gpu
from support.ranks import Ranks

import torchfleet as fleet

pytestmark = pytest.mark.gpu


def train_recorded(amp: bool) -> dict[str, Any]:
    import torch._inductor.config
    from torch._inductor.cudagraph_trees import get_manager

    torch._inductor.config.compile_threads = 1  # no processes that outlive the test
    with on_one_gpu():
        data = [(x.to(DEVICE), y.to(DEVICE)) for x, y in batches(8, 0, 1, rows=32)]
        fields: dict[str, Any] = {"amp": True, "amp_configs": {"dtype": "bfloat16"}} if amp else {}
        flags = {"allow_cuda_graph_capture": True, "fuse_all_optimizer_ops": True}
        fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(build_strategy=flags, **fields))
        model = fleet.distributed_model(mlp(deep=True))
        optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        losses = train(model, optimizer, data)
        manager = get_manager(0, create_if_none_exists=False)
        num_graphs = 0 if manager is None else manager.new_graph_id().id
        found = {name: value.detach().cpu() for name, value in model.module.named_parameters()}
        fleet.stop_worker()
        plain = mlp(deep=True).to(DEVICE)
        expected = train(plain, torch.optim.Adam(plain.parameters(), lr=0.01), data)
        whole = {name: value.detach().cpu() for name, value in plain.named_parameters()}
        return {"losses": losses, "plain": expected, "graphs": num_graphs, "found": found, "expected": whole}


@pytest.mark.parametrize("amp", [False, True], ids=["float32", "bfloat16"])
def test_steps_are_recorded_and_train_as_plain_torch(ranks: Ranks, amp: bool) -> None:
    result = ranks.run(train_recorded, 1, amp=amp)[0]
    assert result["losses"] == pytest.approx(result["plain"], rel=0.05 if amp else 1e-4)
    assert result["graphs"] >= 2, "one of the forward pass, one of backward"
    first = {name: value.detach() for name, value in mlp(deep=True).named_parameters()}
    off, way = (
        torch.stack([(result["expected"][name] - other[name]).norm() for name in first]).norm()
        for other in (result["found"], first)
    )
    assert float(off / way) < (0.1 if amp else 1e-3)
