"""amp in float8 on a GPU that multiplies in it, beside bfloat16: the same losses up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import precision_cases
from support.extras import needing
from support.ranks import Ranks

import torchfleet as fleet

pytestmark = [pytest.mark.gpu, needing("torchao")]

WIDTH = 256


@pytest.fixture(autouse=True)
def _has_float8() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU of compute capability 8.9 or higher")


def losses(dtype: str, rows: int, num: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Of a small network that learns one batch, and the kinds of its linear layers."""
    device = precision_cases.take_device("cuda")
    configs = {"dtype": dtype, **fields.pop("amp_configs", {})}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(amp=True, amp_configs=configs, **fields))
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(4)
    ]
    model = fleet.distributed_model(torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 10)))
    optimizer = fleet.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    torch.manual_seed(1)
    x, y = torch.randn(rows, WIDTH, device=device), torch.randint(0, 10, (rows,), device=device)
    found = []
    for _ in range(num):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, torch.nn.Linear)]
    fleet.stop_worker()
    return {"losses": torch.stack(found), "kinds": ",".join(kinds)}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"amp_configs": {"use_pure_bf16": True}},
        {"build_strategy": {"fuse_elewise_add_act_ops": True}},
        {"recompute": True, "recompute_configs": {"checkpoints": ["1", "2"]}},
        {"sharding": True, "sharding_configs": {"stage": 3, "offload": True}},
    ],
    ids=["plain", "pure", "compiled", "recompute", "stage 3"],
)
@pytest.mark.parametrize("rows", [128, 77])
def test_the_loss_falls_as_in_bfloat16(ranks: Ranks, fields: dict[str, Any], rows: int) -> None:
    """77 rows are no multiple of 16: they are padded. One rank that offloads has its parameters by FSDP2."""
    (found,) = ranks.run(losses, 1, dtype="float8", rows=rows, num=20, fields=fields)
    (plain,) = ranks.run(losses, 1, dtype="bfloat16", rows=rows, num=20, fields=fields)
    assert found["kinds"].replace("FSDP", "") == ",".join(["Float8Linear"] * 4 + ["Linear"])
    assert "Float8" not in plain["kinds"]
    torch.testing.assert_close(found["losses"], plain["losses"], rtol=0.1, atol=0.05)
    assert float(found["losses"][-1]) < 0.5 * float(found["losses"][0])
    assert not torch.equal(found["losses"], plain["losses"]), "nothing was rounded to float8"
