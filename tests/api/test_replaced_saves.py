"""A save that replaces the model of an earlier job."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.messages import names

import torchfleet as fleet

pytestmark = pytest.mark.slow


def trained_and_saved(folder: Path, dirname: str | None = None) -> None:
    model = torch.nn.Sequential(fleet.nn.SparseEmbedding(2, "t"), torch.nn.Linear(2, 1))
    try:
        model, optimizer = fleet.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), dirname=dirname)
        for _ in range(2):  # the second save of a job replaces its own
            model(torch.arange(4)).sum().backward()
            optimizer.step()
            fleet.save_persistables(str(folder))
        fleet.stop_worker()
    finally:
        fleet.reset()


def test_the_last_line_of_a_job_says_what_its_saves_have_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, last = tmp_path / "model", list[str]()
    for dirname in (None, None, str(folder)):
        trained_and_saved(folder, dirname)
        last.append(capsys.readouterr().out.splitlines()[-1])
    assert [names(line, folder, "save 2") for line in last] == [False, True, False]
