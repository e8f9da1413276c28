"""A model that servers saved, as plain files: a plain torch model made from them alone predicts as it did."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extras import Late
from support.jobs import Net, fleet_optimizer, make_batch, one_worker
from support.messages import naming

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.ps.checkpoint import model_export
from torchfleet.ps.checkpoint.export import export_table
from torchfleet.ps.checkpoint.model_export import export_model
from torchfleet.ps.checkpoint.part_reader import read_dense
from torchfleet.ps.checkpoint.part_writer import write_file
from torchfleet.ps.worker.embedding.embedding import SparseEmbedding

pq, safetensors = Late("pyarrow.parquet"), Late("safetensors.torch")


class Typed(Net):
    """With buffers of other types."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("scales", torch.tensor([1.5, -2.0, 3e30]).to(torch.bfloat16))
        self.register_buffer("mask", torch.tensor([[True], [False]]))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward({**batch, "x": self.norm(batch["x"])})


@pytest.mark.slow
def test_a_plain_model_is_made_from_the_files_alone(tmp_path: Path) -> None:
    with one_worker(Typed(), fleet_optimizer("adam", lr=0.1), num_servers=2) as part:
        for seed in range(3):
            part.step(make_batch(seed))
        part.worker.save(str(tmp_path / "model"), "full")
        part.model.eval()
        expected = part.model(make_batch(5)).detach()
    shown: list[str] = []
    export_model(str(tmp_path / "model"), str(tmp_path / "plain"), show=shown.append)
    found = json.loads((tmp_path / "plain" / "model.json").read_text())
    state = safetensors.load_file(tmp_path / "plain" / "parameters.safetensors")
    assert set(found["parameters"]) == set(state)
    for table in found["tables"]:
        rows = pq.read_table(tmp_path / "plain" / table["file"])
        weight = torch.zeros(table["num_embeddings"], table["dim"])
        weight[torch.tensor(rows["key"].to_pylist())] = torch.tensor(rows["values"].to_pylist())
        state[f"{table['name']}.weight"] = weight
    plain = Typed()
    torch.nn.init.zeros_(plain.scales)
    plain.load_state_dict(state)
    plain.eval()
    torch.testing.assert_close(plain(make_batch(5)), expected, rtol=0, atol=1e-6)
    assert torch.equal(plain.scales, Typed().scales)
    assert plain.mask.dtype == torch.bool
    assert shown == [*(table["file"] for table in found["tables"]), "parameters.safetensors"]


def test_state_of_optimizers_is_released_before_the_parameters_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_worker(torch.nn.Linear(3, 2), fleet_optimizer("adam", lr=0.1)) as part:
        part.worker.save(str(tmp_path / "model"), "full")
    shapes: list[tuple[int, ...]] = []
    blocks: list[weakref.ref[Any]] = []
    alive: list[object] = []

    def read(*arguments: Any) -> Any:
        block = read_dense(*arguments)
        shapes.append(block.shape)
        blocks.append(weakref.ref(block))
        return block

    def write(target: Storage, name: str, buffers: Sequence[Any]) -> None:
        alive.extend(block for each in blocks if (block := each()) is not None)
        write_file(target, name, buffers)

    monkeypatch.setattr(model_export, "read_dense", read)
    monkeypatch.setattr(model_export, "write_file", write)
    export_model(str(tmp_path / "model"), str(tmp_path / "plain"))
    assert [num_rows for num_rows, _ in shapes] == [3]  # values, and two numbers of state for each
    assert not alive
    assert set(safetensors.load_file(tmp_path / "plain" / "parameters.safetensors")) == {"weight", "bias"}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    with one_worker(Net(), fleet_optimizer("sgd", lr=0.1)) as part:
        part.worker.save(str(tmp_path / "model"), "inference")
    with pytest.raises(CheckpointError, match=naming(tmp_path / "model")):
        export_model(str(tmp_path / "model"), str(tmp_path / "model"))


@pytest.mark.slow
@pytest.mark.parametrize("with_statistics", [False, True])
def test_rows_as_safetensors_are_those_of_parquet(tmp_path: Path, with_statistics: bool) -> None:
    model = torch.nn.Sequential(SparseEmbedding(3, name="rows", shrink=fleet.Shrink(delete_after_unseen_days=5)))
    with one_worker(model, fleet_optimizer("adagrad", lr=0.1), num_servers=2) as part:
        for ids in (torch.arange(-50, 50), torch.arange(7) << 50):
            part.model(ids).square().sum().backward()
            part.optimizer.step()
            part.worker.save(str(tmp_path / "model"), "full" if ids[0] else "delta")
    made = {form: str(tmp_path / form) for form in ("parquet", "safetensors")}
    for form, path in made.items():
        num = export_table(str(tmp_path / "model"), "rows", path, form, with_statistics=with_statistics)
        assert num == 106
    expected, found = pq.read_table(made["parquet"]), safetensors.load_file(made["safetensors"])
    assert found["keys"].tolist() == expected["key"].to_pylist()
    assert found["values"].dtype == torch.float32
    assert found["values"].tolist() == expected["values"].to_pylist()
    statistics = set(expected.column_names) - {"key", "values"}
    assert statistics == set(found) - {"keys", "values"}
    assert bool(statistics) == with_statistics
    for name in statistics:
        assert found[name].tolist() == expected[name].to_pylist()


def test_a_model_of_a_table_named_parameters_has_two_files_of_safetensors(tmp_path: Path) -> None:
    model = torch.nn.Sequential(SparseEmbedding(2, name="parameters"), torch.nn.Linear(2, 1))
    with one_worker(model, fleet_optimizer("sgd", lr=0.1)) as part:
        part.worker.save(str(tmp_path / "model"), "inference")
    export_model(str(tmp_path / "model"), str(tmp_path / "plain"), "safetensors")
    assert set(safetensors.load_file(tmp_path / "plain" / "parameters.rows.safetensors")) == {"keys", "values"}
    assert "1.weight" in safetensors.load_file(tmp_path / "plain" / "parameters.safetensors")
