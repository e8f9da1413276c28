"""Checkpoints of Hugging Face in models that are cut over ranks, from disk to disk, against one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.planned_models import STEPS, alone, loss_of, made, same
from support.ranks import Ranks

import torchfleet as fleet
from torchfleet.base.errors import CheckpointError, FleetError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


def prepare_ranks() -> None:
    loss_of(made("gpt2"), "gpt2", 0)  # imports much of transformers
    from torchfleet import transformers  # noqa: F401


def tune(source: str, target: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Two steps from a checkpoint to another; returns the pieces that differ from the checkpoint's, and errors."""
    from torchfleet.transformers import load_pretrained, save_pretrained

    fleet.init(is_collective=True, strategy=fleet.DistributedStrategy(**fields))
    with torch.device("meta"):
        bare = transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(source))
    model = fleet.distributed_model(bare.train())
    load_pretrained(model, source)
    optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    try:
        load_pretrained(model, source)
    except FleetError as error:
        late = str(error)
    for step in range(STEPS):
        loss_of(model, "gpt2", step + 10 * fleet.data_shard()[0]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    save_pretrained(model, target)
    fleet.stop_worker()
    return {"late": late}


def test_a_checkpoint_is_tuned_from_disk_to_disk(ranks: Ranks, tmp_path: Path) -> None:
    made("gpt2").save_pretrained(tmp_path / "first")
    fields = {
        "tensor_parallel": True,
        "tensor_parallel_configs": {"tensor_parallel_degree": 2},
        "sharding": True,
        "sharding_configs": {"stage": 3},
    }
    places = {"source": str(tmp_path / "first"), "target": str(tmp_path / "tuned")}
    for found in ranks.run(tune, 4, **places, fields=fields):
        assert "distributed_optimizer" in found["late"]
    assert {path.name for path in (tmp_path / "tuned").iterdir()} == {"config.json", "model.safetensors"}
    assert json.loads((tmp_path / "tuned" / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    tuned = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned")
    expected = {name: value for name, value in alone("gpt2", replicas=2).items() if name.startswith("state.")}
    same({f"state.{name}": value for name, value in tuned.state_dict().items()}, expected, "tuned")


def wrong(folder: str) -> dict[str, Any]:
    """The errors of damaged checkpoints, one rank."""
    from torchfleet.transformers import load_pretrained

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
    for case in ("none", "other", "outside", "cut"):
        (tmp_path / case).mkdir()
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=16, n_layer=2, n_head=4, bos_token_id=0)
    ).save_pretrained(tmp_path / "other")
    index = {"weight_map": {"transformer.wte.weight": "../other/model.safetensors"}}
    (tmp_path / "outside" / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = (tmp_path / "other" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (found,) = ranks.run(wrong, 1, folder=str(tmp_path))
    assert set(found) == {"none", "other", "outside", "cut", "plain"}
    assert "(37, 16)" in found["other"]
    assert "(9, 16)" in found["other"]
    assert "../other" in found["outside"]
    assert "GPT2LMHeadModel" in found["plain"]
