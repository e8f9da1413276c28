"""Models made without memory: every rank makes its own part, with the values that torch's layers draw, however cut."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from support.messages import naming
from support.ranks import Ranks
from support.sharded_models import of_case, sharded, start
from torch import nn

import torchfleet as fleet
from examples.bert.model import Bert, Size
from torchfleet.base.errors import ModelError
from torchfleet.collective.first_values import Filling, set_aside
from torchfleet.collective.tensors.local_tensors import local

WORDS, DIM = 13, 6
CPU = torch.device("cpu")


def made() -> nn.Module:
    """Layers that can be cut in every way; running statistics are buffers."""
    return nn.Sequential(
        fleet.nn.VocabParallelEmbedding(WORDS, DIM),
        nn.Flatten(),
        fleet.nn.ColumnParallelLinear(3 * DIM, 8, gather_output=False),
        fleet.nn.RowParallelLinear(8, 7, input_is_parallel=True),
        nn.BatchNorm1d(7),
        nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5)),
    )


def seeded(name: str, layer: Any, *sizes: int) -> dict[str, torch.Tensor]:
    """What torch's own layer draws with the seed that the page promises for a module of this name."""
    torch.manual_seed(int.from_bytes(hashlib.blake2b(f"3 {name}".encode(), digest_size=8).digest(), "little") >> 1)
    return {f"{name}.{key}": value for key, value in layer(*sizes).state_dict().items()}


def expected() -> dict[str, torch.Tensor]:
    layers = {
        "0": (nn.Embedding, WORDS, DIM),
        "2": (nn.Linear, 3 * DIM, 8),
        "3": (nn.Linear, 8, 7),
        "4": (nn.BatchNorm1d, 7),
        "5.0": (nn.Linear, 7, 5),
        "5.1": (nn.LayerNorm, 5),
    }
    return {key: value for name, layer in layers.items() for key, value in seeded(name, *layer).items()}


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


CASES: dict[str, dict[str, Any]] = {
    "replicas": {},
    "stage 3": sharded(3),
    "layers": {"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}},
    "layers, stage 3": {"tensor_parallel": True, "hybrid_configs": {"mp_degree": 2}, **sharded(3)},
    "stages": {"pipeline": True, "hybrid_configs": {"pp_degree": 2}},
    "stages, layers": {"pipeline": True, "tensor_parallel": True, "hybrid_configs": {"pp_degree": 2, "mp_degree": 2}},
}


def first_values(folder: str) -> dict[str, Any]:
    """The whole of what this rank has a part of; the number of its own values; a step; and a save, filled in."""
    found: dict[str, Any] = {}
    for name, fields in CASES.items():
        job = start(**fields)
        torch.manual_seed(3 + job.world.rank)  # the first rank's counts
        with torch.device("meta"):
            bare = made()
        model = job.distribute_model(bare)
        found.update({f"{name} {key}": value for key, value in whole(model).items()})
        found[f"{name} num"] = sum(local(parameter).numel() for parameter in model.parameters())
        optimizer = job.distribute_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ids = torch.randint(WORDS, (8, 3), generator=torch.Generator().manual_seed(job.data_shard[0]))
        model.train_batch(ids, torch.zeros(8, 5), nn.functional.mse_loss)
        optimizer.step()
        if name == "replicas":
            job.save(folder, None)
            found.update({f"saved {key}": value for key, value in whole(model).items()})
        else:
            job.load(folder)
            found.update({f"{name} loaded {key}": value for key, value in whole(model).items()})
    return found


def test_first_values_do_not_depend_on_how_the_model_is_cut(ranks: Ranks, tmp_path: Path) -> None:
    """Bit-equal to torch's own layers. A save is filled in part by part."""
    every = ranks.run(first_values, 4, folder=str(tmp_path / "saved"))
    total = sum(parameter.numel() for parameter in made().parameters())
    for found in every:
        saved = of_case(found, "saved")
        for name in CASES:
            own = of_case(found, name)
            for key, value in expected().items():
                if key in own:
                    assert torch.equal(own[key], value), (name, key)
                if f"loaded {key}" in own and not key.startswith("4."):  # statistics are each rank's
                    assert torch.equal(own[f"loaded {key}"], saved[key]), (name, key)
        assert found["replicas num"] == total
        assert found["stage 3 num"] < 0.4 * total
        assert found["stages, layers num"] < 0.55 * total
    for name in CASES:
        assert {key for found in every for key in of_case(found, name)} >= set(expected()), name


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def peak() -> dict[str, Any]:
    """Of stage 3 on this rank: the rise of memory while the model is made, and the bytes of its own part."""
    found: dict[str, Any] = {}
    for width in (8, 1024):  # the small one imports what is needed
        job = start(**sharded(3))
        with torch.device("meta"):
            bare = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(64)))
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the largest so far is forgotten
        model = job.distribute_model(bare)
        found = {"rise": resident("VmHWM") - before, "part": sum(local(p).nbytes for p in model.parameters())}
    return found


def test_a_rank_never_holds_more_than_its_part(ranks: Ranks) -> None:
    for found in ranks.run(peak, 2):
        assert found["part"] == 128 << 20
        assert found["rise"] <= 1.5 * found["part"]  # 1.1 to 1.2 is usual; 2 if the model were whole for a moment


class Bare(nn.Module):
    """Nothing gives its parameter, or its table, values."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        if table:
            self.register_buffer("table", torch.arange(3))
        else:
            self.scale = nn.Parameter(torch.ones(3))


@pytest.mark.parametrize(("table", "key"), [(False, "inner.scale"), (True, "inner.table")])
def test_what_nothing_gives_values_to_is_named(table: bool, key: str) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"inner": Bare(table)})
    with pytest.raises(ModelError, match=naming(f"'{key}'", "Bare")):
        Filling(CPU, CPU, 0, {}).fill(model)


def test_models_may_give_values_to_all_their_modules_and_ties_stay() -> None:
    """_init_weights of the innermost module around; nn.MultiheadAttention has _reset_parameters."""
    with torch.device("meta"):
        bare = nn.ModuleDict({"bert": Bert(Size(1, 64, 2), 500, 32), "attention": nn.MultiheadAttention(8, 2)})
    Filling(CPU, CPU, 3, {}).fill(bare)
    bert: Any = bare["bert"]
    assert bert.head.decoder.weight is bert.embeddings.word.weight
    torch.manual_seed(
        int.from_bytes(hashlib.blake2b(b"3 bert.encoder.layer.0.inner", digest_size=8).digest(), "little") >> 1
    )
    drawn = nn.Linear(64, 256)
    nn.init.normal_(drawn.weight, std=0.02)
    assert torch.equal(bert.encoder.layer[0].inner.weight, drawn.weight)
    assert not bert.encoder.layer[0].inner.bias.any()
    assert not bare["attention"].out_proj.bias.any()
    assert bare["attention"].in_proj_weight.std() > 0.1


def test_a_model_with_values_keeps_them_and_its_parameters() -> None:
    model = made().double()
    values, parameters = whole(model), list(model.parameters())
    given = set_aside(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    Filling(CPU, CPU, 0, given).fill(model)
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, values[name]) for name, value in whole(model).items())
