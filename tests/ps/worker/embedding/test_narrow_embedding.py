"""SparseEmbedding with narrow rows, and rows in two parts, in whole jobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import jobs

import torchfleet as fleet
from torchfleet import nn
from torchfleet.base.errors import ModelError, StrategyError
from torchfleet.ps.tables.settings.row_format import RowFormat

NUM, DIM = 30, 4
NARROW: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"dtype": "int8"},
    {"dtype": "int8", "step": "learned"},
]


class Rows(torch.nn.Module):
    """A loss that is linear in the rows: gradients are eighths, and their sums exact in any order."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.rows = nn.SparseEmbedding(DIM, name="rows", initializer=nn.Uniform(-1, 1), **settings)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scale = (ids % 5 + 1).unsqueeze(-1) * torch.tensor([0.125, -0.25, 0.5, 1.0])
        return (self.rows(ids) * scale).sum()


def batches(num: int) -> list[torch.Tensor]:
    dice = np.random.default_rng(5)
    return [torch.from_numpy(dice.integers(0, NUM, 16)) for _ in range(num)]


def adagrad(model: torch.nn.Module) -> torch.optim.Optimizer:
    return fleet.optim.RowWiseAdagrad(model.parameters(), lr=0.1)


def train(part: jobs.Part, num_workers: int) -> None:
    for ids in batches(12):
        # the mean over workers of their losses, each on its share: the loss of the whole batch
        loss = part.model(ids[part.index :: num_workers]) * num_workers
        loss.backward()
        part.optimizer.step()
        part.optimizer.zero_grad()


@pytest.mark.parametrize("settings", NARROW, ids=str)
def test_two_workers_in_sync_end_with_the_rows_of_one(settings: dict[str, Any]) -> None:
    found = [
        jobs.run(lambda part: train(part, n), lambda: Rows(**settings), adagrad, num_workers=n, num_servers=2)  # noqa: B023
        for n in (1, 2)
    ]
    assert found[0].rows("rows", NUM).any()
    assert torch.equal(*(run.rows("rows", NUM) for run in found))


@pytest.mark.parametrize("mode", ["half_async", "async"])
def test_narrow_rows_learn_in_every_mode_but_geo(mode: str) -> None:
    done = jobs.run(lambda part: train(part, 1), lambda: Rows(dtype="bfloat16", wire="int8"), adagrad, mode=mode)
    moved = done.rows("rows", NUM)
    first = jobs.run(lambda part: None, lambda: Rows(dtype="bfloat16"), adagrad).rows("rows", NUM)
    assert (moved != first).any()


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"wire": "float16"}])
def test_geo_refuses_types_of_their_own(settings: dict[str, Any]) -> None:
    with pytest.raises(StrategyError, match=r"(?s)rows.*(bfloat16|float16).*geo"):
        jobs.run(lambda part: None, lambda: Rows(**settings), jobs.sgd, mode="geo")


def test_the_state_of_a_model_has_the_values_of_its_narrow_rows() -> None:
    class Sized(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.SparseEmbedding(DIM, name="rows", num_embeddings=NUM, dtype="bfloat16")

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.rows(ids).sum()

    with jobs.one_worker(Sized(), adagrad) as part:
        before = part.model.state_dict()["rows.weight"]
        assert torch.equal(before, before.bfloat16().float())
        part.model(torch.arange(10)).backward()
        part.optimizer.step()
        after = part.model.state_dict()["rows.weight"]
        assert torch.equal(after[10:], before[10:])
        assert torch.equal(after, after.bfloat16().float())
        given = torch.randn(NUM, DIM)
        part.model.load_state_dict({"rows.weight": given})
        part.model(torch.arange(3))
        assert torch.equal(part.model.state_dict()["rows.weight"], given.bfloat16().float())


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "float64"},
        {"dtype": torch.bfloat16},
        {"dtype": "bfloat16", "step": "row"},
        {"dtype": "bfloat16", "step": "learned"},
        {"dtype": "int8", "step": "best"},
        {"dtype": "int8", "step_rate": 0.1},
        {"dtype": "int8", "step": "learned", "step_rate": 3},
        {"dtype": "int8", "step": "learned", "step_rate": "fast"},
        {"wire": "float8"},
        {"dtype": "int8", "weight_bounds": (-1, 1)},
    ],
    ids=str,
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="SparseEmbedding"):
        nn.SparseEmbedding(4, **settings)


def test_embeddings_of_one_table_have_one_type() -> None:
    model = torch.nn.ModuleList([nn.SparseEmbedding(4, name="t"), nn.SparseEmbedding(4, name="t", dtype="int8")])
    with pytest.raises(ModelError, match="row_format"):
        nn.sparse_embeddings(model)


def test_the_layer_says_what_travels() -> None:
    made = nn.SparseEmbedding(4, dtype="int8", step="learned", step_rate=0.01, wire="bfloat16")
    assert made.row_format == RowFormat("int8", "learned", 0.01, "bfloat16")
    assert "int8" in repr(made)
    assert "dtype" not in repr(nn.SparseEmbedding(4))


# Rows in two parts


class TwoParts(torch.nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.rows = nn.TwoPartEmbedding(DIM, 3, name="rows", initializer=nn.Constant(1.0), **settings)

    def forward(self, batch: Any) -> torch.Tensor:
        rows: torch.Tensor = self.rows(batch["ids"] if isinstance(batch, dict) else batch)
        return rows


@pytest.mark.parametrize("start", [1, 2])
def test_the_long_part_comes_with_the_third_appearance(start: int) -> None:
    """Against counting by hand: until then it reads zeros, learns nothing, and has no row."""
    with jobs.one_worker(TwoParts(embedx_start=start)) as part:
        seen: dict[int, int] = {}
        long, short = dict.fromkeys(range(4), 0.0), dict.fromkeys(range(4), 1.0)
        for ids in ([0, 1], [0, 2, 2], [0, 1], [0, 1, 3], [1, 0]):
            for i in set(ids):
                seen[i] = seen.get(i, 0) + 1
                if seen[i] == 3:
                    long[i] = 1.0
            found = part.model(torch.tensor(ids))
            wanted = [[short[i]] * start + [long[i]] * (DIM - start) for i in ids]
            assert found.tolist() == wanted
            found.sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()
            for i in ids:
                short[i] -= 0.5
                long[i] -= 0.5 if seen[i] >= 3 else 0.0
        sources = part.worker.client.stats()[0]["tables"]
        assert sources["rows.embed"]["rows"] == 4
        assert sources["rows.embedx"]["rows"] == 2


def test_with_shows_and_clicks_the_score_decides() -> None:
    entry = fleet.ShowClickEntry("show", "click", 1.0, nonclick_weight=0.5, click_weight=2.0)
    with jobs.one_worker(TwoParts(entry=entry)) as part:
        batch = {
            "ids": torch.tensor([[7], [8]]),
            "show": torch.tensor([1.0, 1.0]),
            "click": torch.tensor([1.0, 0.0]),
        }
        for score_of_7 in (0.0, 2.0, 4.0, 6.0):
            found = part.model(batch)
            assert found[0, 0, 1:].any() == (score_of_7 >= 3)
            assert not found[1, 0, 1:].any()
            found.sum().backward()
            part.optimizer.step()
            part.optimizer.zero_grad()


def test_two_parts_in_bags_and_narrow() -> None:
    with jobs.one_worker(TwoParts(dtype="bfloat16")) as part:
        for _ in range(3):
            found = part.model.rows(torch.tensor([1, 2, 3]), torch.tensor([0, 2]))
            (found * 0).sum().backward()
            part.optimizer.step()
        assert found.tolist() == [[2.0] * DIM, [1.0] * DIM]


@pytest.mark.parametrize(
    "settings",
    [
        {"embedx_threshold": 1.5},
        {"embedx_threshold": "often"},
        {"embedx_threshold": 0},
        {"embedx_threshold": 3, "embedx_start": 0},
        {"embedx_threshold": 3, "embedx_start": 4},
        {"embedx_threshold": 3, "num_embeddings": 10},
        {"embedx_threshold": 3, "entry": fleet.CountFilterEntry(2)},
    ],
    ids=str,
)
def test_two_parts_that_cannot_be_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="embedx"):
        nn.TwoPartEmbedding(4, **settings)
