"""Checkpoints of Hugging Face in models that are cut over ranks, from disk to disk, against one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import names
from support.planned_models import STEPS, alone, loss_of, made, same
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError, FleetError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]


def prepare_ranks() -> None:
    loss_of(made("gpt2"), "gpt2", 0)  # imports much of transformers
    from torchfleet import transformers  # noqa: F401


def tune(folder: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Two steps from a checkpoint to another, which rank 0 holds against one process."""
    import transformers

    from torchfleet.transformers import load_pretrained, save_pretrained

    source, target = f"{folder}/first", f"{folder}/tuned"
    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    if fleet.is_first_worker():
        made("gpt2").save_pretrained(source)
    fleet.barrier_worker()
    with torch.device("meta"):
        bare = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(source))
    model: Any = fleet.distributed_model(bare.train())
    load_pretrained(model, source)
    optimizer: Any = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    with pytest.raises(FleetError, match="distributed_optimizer"):
        load_pretrained(model, source)
    for step in range(STEPS):
        loss_of(model, "gpt2", step + 10 * fleet.data_shard()[0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, target)
    if fleet.is_first_worker():
        tuned = transformers.AutoModelForCausalLM.from_pretrained(target).state_dict()
        expected = alone("gpt2", replicas=fleet.data_shard()[1])
        states = {name: value for name, value in expected.items() if name.startswith("state.")}
        same({f"state.{name}": value for name, value in tuned.items()}, states, "tuned")
    fleet.stop_worker()
    return {}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_checkpoint_is_tuned_from_disk_to_disk(ranks: Ranks, tmp_path: Path, size: int) -> None:
    fields: dict[str, Any] = {"tensor_parallel": True, "tensor_parallel_configs": {"tensor_parallel_degree": 2}}
    if size == 4:
        fields |= {"sharding": True, "sharding_configs": {"stage": 3}}
    ranks.run(tune, size, folder=str(tmp_path), fields=fields)
    assert {path.name for path in (tmp_path / "tuned").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def wrong(folder: str) -> dict[str, Any]:
    """The errors of damaged checkpoints, one rank."""
    import transformers

    from torchfleet.transformers import load_pretrained

    for case in ("none", "other", "outside", "cut"):
        Path(folder, case).mkdir()
    sizes = {"vocab_size": 9, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4}
    other = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    other.save_pretrained(f"{folder}/other")
    index = {"weight_map": {"transformer.wte.weight": "../other/model.safetensors"}}
    Path(folder, "outside", "model.safetensors.index.json").write_text(json.dumps(index))
    whole = Path(folder, "other", "model.safetensors").read_bytes()
    Path(folder, "cut", "model.safetensors").write_bytes(whole[: len(whole) // 2])
    fleet.init(is_collective=True)
    model = fleet.distributed_model(made("gpt2"))
    found: dict[str, Any] = {}
    for case in ("none", "other", "outside", "cut"):
        try:
            load_pretrained(model, f"{folder}/{case}")
        except CheckpointError as error:
            found[case] = str(error)
    try:
        load_pretrained(made("gpt2"), folder)
    except FleetError as error:
        found["plain"] = str(error)
    fleet.stop_worker()
    return found


def test_damaged_checkpoints_are_named(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(wrong, 1, folder=str(tmp_path))
    assert set(found) == {"none", "other", "outside", "cut", "plain"}
    assert "(37, 16)" in found["other"]
    assert "(9, 16)" in found["other"]
    assert "../other" in found["outside"]
    assert "GPT2LMHeadModel" in found["plain"]


def save_without_room(target: str) -> dict[str, Any]:
    """The error of a save whose configuration rank 0 cannot write."""
    from torchfleet.transformers import save_pretrained

    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(sync_timeout=60.0))
    model: Any = fleet.distributed_model(made("gpt2"))

    def full(folder: str) -> None:
        raise OSError(28, "No space left on device", folder)

    if fleet.is_first_worker():
        model.module.config.save_pretrained = full
    with pytest.raises(CheckpointError) as error:
        save_pretrained(model, target)
    fleet.stop_worker()
    return {"error": str(error.value)}


def test_an_error_of_the_first_rank_in_a_save_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(save_without_room, 2, target=str(tmp_path / "tuned")):
        assert names(found["error"], "rank 0", "No space left on device")
