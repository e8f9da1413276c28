"""Extending the package: what is added is one file and one line of a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.ranks import Ranks

# A collective strategy

STRATEGY = '''
"""A strategy that keeps a record of its hooks and changes nothing."""

from torchfleet.collective.strategy import Strategy

CALLS = []


class Recorder(Strategy):
    field = "recorder"
    wants_loss = True

    def convert(self, model):
        CALLS.append("convert")
        return model

    def wrap_forward(self, forward):
        CALLS.append("wrap_forward")

        def recorded(*args):
            CALLS.append("forward")
            return forward(*args)

        return recorded

    def joined(self, job):
        CALLS.append(f"joined sharded={job.is_sharded} runner={job.runner}")

    def optimizer(self, inner, names):
        CALLS.append(f"optimizer of {', '.join(names.values())}")
        return inner

    def begin_forward(self, exchanging):
        CALLS.append(f"begin_forward exchanging={exchanging}")

    def note_loss(self, loss):
        CALLS.append("note_loss")

    def is_due(self):
        CALLS.append("is_due")
        return True

    def before_step(self):
        CALLS.append("before_step")
        return True

    def after_step(self):
        CALLS.append("after_step")
'''


def train_with_a_new_strategy(folder: str) -> dict[str, Any]:
    """On every rank; the changes to the table and to DistributedStrategy end with the process."""
    import sys

    import torch

    import torchfleet as fleet
    from torchfleet.collective import build

    class Regression(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().mean()

    sys.path.append(folder)
    build.ORDER = {"recorder": build.Listed("recorder.Recorder"), **build.ORDER}
    fleet.DistributedStrategy.recorder = True  # type: ignore[attr-defined]
    merge = {"gradient_merge": True, "gradient_merge_configs": {"k_steps": 2}}
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**merge))
    model = fleet.distributed_model(Regression(3, 1))
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    before = model.weight.detach().clone()
    for _ in range(2):
        model(torch.ones(4, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    moved = not torch.equal(before, model.weight)
    fleet.stop_worker()
    return {"calls": sys.modules["recorder"].CALLS, "moved": moved}


def test_a_new_strategy_is_one_file_and_one_line(ranks: Ranks, tmp_path: Path) -> None:
    """Beside gradient_merge over two batches: it steps, and exchanges gradients, at the second."""
    (tmp_path / "recorder.py").write_text(STRATEGY)
    (found,) = ranks.run(train_with_a_new_strategy, 1, folder=str(tmp_path))
    assert found["calls"] == [
        *("convert", "wrap_forward", "joined sharded=False runner=None", "optimizer of weight, bias"),
        *("begin_forward exchanging=False", "forward", "note_loss", "is_due"),
        *("begin_forward exchanging=True", "forward", "note_loss", "is_due", "before_step", "after_step"),
    ]
    assert found["moved"]
