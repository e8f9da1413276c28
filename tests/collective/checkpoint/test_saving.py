"""Saving and loading by ranks: other numbers of them, other strategies, saves that are killed or fail."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.extras import imported
from support.messages import lines_naming, names
from support.ranks import Ranks
from support.sharded_models import CLOSE, OPTIMIZERS, Net, Tied, batches, chain, of_case, sharded, share, start, whole

from torchfleet.base.errors import CheckpointError
from torchfleet.base.role.role_makers import PaddleCloudRoleMaker
from torchfleet.base.storage import Storage
from torchfleet.base.strategy.distributed_strategy import DistributedStrategy
from torchfleet.collective.checkpoint import save_writing, tensor_files
from torchfleet.collective.checkpoint.loading import load, load_parameters
from torchfleet.collective.checkpoint.pieces import model_pieces, piece_of
from torchfleet.collective.checkpoint.saving import save
from torchfleet.collective.checkpoint.tensor_files import box
from torchfleet.collective.strategy import Strategy
from torchfleet.collective.world import World
from torchfleet.observe.commands import command

pytestmark = pytest.mark.xdist_group("collective_saving")  # what ranks make for all tests is made once

STRATEGIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stage 1": sharded(1),
    "stage 2": sharded(2),
    "stage 3": sharded(3),
    "pairs": sharded(3, sharding_degree=2, hybrid_dp=True),
    "half": {"amp": True, "amp_configs": {"use_pure_bf16": True}, **sharded(1)},
}
SAVED = ("plain", "stage 1", "stage 2", "stage 3")


class Training:
    """Four steps on batches of twelve, which one to four ranks can share."""

    def __init__(self, strategy: str, optimizer: str = "adam") -> None:
        self.job = start(**STRATEGIES[strategy])
        torch.manual_seed(7 * self.job.world.rank)
        self.model = self.job.distribute_model(Net())
        inner = OPTIMIZERS[optimizer](self.model.parameters())
        self.optimizer = self.job.distribute_optimizer(inner)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def steps(self, first: int, last: int) -> None:
        rank, size = self.job.world.rank, self.job.world.size
        for x, y in list(batches(4, 12))[first:last]:
            outputs = self.model(share(x, rank, size)).float()
            torch.nn.functional.mse_loss(outputs, share(y, rank, size)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()

    def result(self) -> dict[str, torch.Tensor]:
        return {**whole(self.model), "lr": torch.tensor(self.optimizer.param_groups[0]["lr"])}


def interrupt(folder: str, strategies: list[str]) -> dict[str, Any]:
    """Save after two steps, and go on."""
    made = {}
    for name in strategies:
        training = Training(name)
        training.steps(0, 2)
        number = training.job.save(f"{folder}/{name}", {"step": 2, "schedule": training.schedule.state_dict()})
        training.steps(2, 4)
        made.update({f"{name} {key}": value for key, value in training.result().items()})
        assert number == 1
    return made


def resume(folder: str, pairs: list[list[str]]) -> dict[str, Any]:
    """Load what one strategy has saved under another, and go on."""
    made = {}
    for source, target in pairs:
        training = Training(target)
        extra = training.job.load(f"{folder}/{source}")
        assert extra["step"] == 2
        training.schedule.load_state_dict(extra["schedule"])
        made[f"{source} to {target} num_states"] = len(training.optimizer.state)
        training.steps(2, 4)
        made.update({f"{source} to {target} {key}": value for key, value in training.result().items()})
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("saves"))


@pytest.fixture(scope="module")
def saved(ranks: Ranks, folder: str) -> list[dict[str, Any]]:
    """By two ranks, under every strategy; what they got by going on."""
    return ranks.run(interrupt, 2, folder=folder, strategies=[*SAVED, "half"])


def uninterrupted() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for x, y in batches(4, 12):
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return {**whole(model), "lr": torch.tensor(optimizer.param_groups[0]["lr"])}


def test_the_same_job_goes_on_to_the_bit(ranks: Ranks, saved: list[dict[str, Any]], folder: str) -> None:
    names = [*SAVED, "half"]
    for found, expected in zip(
        ranks.run(resume, 2, folder=folder, pairs=[[name, name] for name in names]), saved, strict=True
    ):
        for name in names:
            for key, value in of_case(expected, name).items():
                assert torch.equal(found[f"{name} to {name} {key}"], value), (name, key)


@pytest.mark.parametrize(
    ("size", "pairs"),
    [
        (1, [[name, "plain"] for name in SAVED]),
        (3, [["stage 3", "stage 1"], ["stage 1", "stage 3"], ["plain", "stage 2"]]),
        (4, [["stage 3", "pairs"], ["stage 2", "plain"], ["plain", "stage 1"]]),
    ],
)
def test_other_numbers_of_ranks_and_other_strategies_go_on(
    ranks: Ranks, saved: list[dict[str, Any]], folder: str, size: int, pairs: list[list[str]]
) -> None:
    """To the bit they cannot: gradients of more or fewer ranks are summed in another order."""
    expected = uninterrupted()
    everybody = ranks.run(resume, size, folder=folder, pairs=pairs)
    for source, target in pairs:
        num_states = sum(found[f"{source} to {target} num_states"] for found in everybody)
        assert num_states == (20 if target == "stage 1" else 20 * size)  # of 20 parameters, each on one rank or all
    for found in everybody:
        for source, target in pairs:
            for key, value in expected.items():
                torch.testing.assert_close(found[f"{source} to {target} {key}"], value, **CLOSE)


# Under a pipeline, and what strategies keep for themselves


class Counting(Strategy):
    """A strategy with a number that all ranks have, and others of each rank's own."""

    field = "counting"

    def __init__(self, world: World) -> None:
        super().__init__(DistributedStrategy(), world)
        self.kept: dict[str, torch.Tensor] = {}

    def state(self) -> dict[str, torch.Tensor]:
        return {"steps": torch.tensor(41)}

    def rank_state(self) -> dict[str, torch.Tensor]:
        rank = self.world.rank
        own = {"residual.weight": torch.full((2, 3), float(rank)), "num": torch.tensor(10 * rank)}
        return own if rank < 2 else {}

    def load_state(self, state: Any) -> None:
        self.kept.update(state)

    def load_rank_state(self, state: Any) -> None:
        self.kept.update(state)


class Stages(torch.nn.Module):
    """The modules of Tied by their names, as far as they are on one rank; what is tied in one process is not here."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        model = Tied()
        if rank == 0:
            self.embedding = model.embedding
        if rank in (1, 2):
            self.layers = model.layers
        if rank == size - 1:
            self.outputs = torch.nn.Sequential(torch.nn.Linear(5, 11))
            self.outputs[0].load_state_dict(model.outputs[0].state_dict())


class Classes(torch.nn.Module):
    """Eleven classes, cut over the ranks as torch.chunk cuts."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        every = torch.arange(33.0).view(11, 3)
        self.weight = torch.nn.Parameter(every.tensor_split(size)[rank].clone())
        self.weight.fleet_piece = (0, rank, size)
        self.weight.fleet_local = True
        self.bias = torch.nn.Parameter(torch.arange(3.0))


def world_of(**fields: Any) -> World:
    return World(PaddleCloudRoleMaker(is_collective=True).read(), DistributedStrategy(**fields))


def fill(model: torch.nn.Module, value: float) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def adam_after_a_step(model: torch.nn.Module) -> torch.optim.Adam:
    """Two groups, the first without parameters, as in stages of a pipeline."""
    optimizer = torch.optim.Adam([{"params": [], "lr": 0.3}, {"params": list(model.parameters())}])
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 1
    optimizer.step()
    return optimizer


def save_others(folder: str) -> dict[str, Any]:
    world = world_of()
    stages = Stages(world.rank, world.size)
    save(f"{folder}/stages", stages, adam_after_a_step(stages), [Counting(world)], world)
    classes = Classes(world.rank, world.size)
    save(f"{folder}/classes", classes, adam_after_a_step(classes), [], world)
    return {"bytes": sum(parameter.numel() for parameter in classes.parameters())}


def load_others(folder: str) -> dict[str, Any]:
    world = world_of()
    made = load_stages(f"{folder}/stages", world, f"{folder}/tied" if world.size == 1 else "")
    if world.size > 1:
        made.update({f"{name} from tied": value for name, value in load_stages(f"{folder}/tied", world).items()})
    check_classes(f"{folder}/classes", world)
    return {f"{world.rank} {name}": value for name, value in made.items()}


def load_stages(folder: str, world: World, to: str = "") -> dict[str, Any]:
    stages = Stages(world.rank, world.size) if world.size > 1 else Tied()
    optimizer, counting = torch.optim.Adam([{"params": []}, {"params": list(stages.parameters())}]), Counting(world)
    load(folder, stages, optimizer, [counting], world)
    if to:
        save(to, stages, optimizer, [], world)
    made = {**stages.state_dict(), **counting.kept, "lr": torch.tensor(optimizer.param_groups[0]["lr"])}
    for name, parameter in stages.named_parameters():
        made[f"{name} exp_avg"] = optimizer.state[parameter]["exp_avg"]
    return made


def check_classes(folder: str, world: World) -> None:
    """Each rank gets the classes that are its own now."""
    expected, classes = Classes(world.rank, world.size), fill(Classes(world.rank, world.size), -1.0)
    adam, optimizer = (
        adam_after_a_step(expected),
        torch.optim.Adam([{"params": []}, {"params": list(classes.parameters())}]),
    )
    load(folder, classes, optimizer, [], world)
    for parameter, other in zip(classes.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, other)
        assert torch.equal(optimizer.state[parameter]["exp_avg_sq"], adam.state[other]["exp_avg_sq"])
        assert optimizer.state[parameter]["step"].equal(torch.tensor(1.0))


@pytest.fixture(scope="module")
def others(ranks: Ranks, folder: str) -> list[list[dict[str, Any]]]:
    """Saved by two ranks, loaded by one, two and three."""
    ranks.run(save_others, 2, folder=folder)
    return [ranks.run(load_others, size, folder=folder) for size in (1, 2, 3)]


def test_stages_of_a_pipeline_are_put_together_and_taken_apart(others: list[list[dict[str, Any]]]) -> None:
    """Each rank has some of the parameters; layers that are classes of their own are checked where they are loaded."""
    torch.manual_seed(3)
    expected = Tied()
    adam = adam_after_a_step(expected)
    for everybody in others:
        found = {name.split(" ", 1)[1]: value for result in everybody for name, value in result.items()}
        for name, value in expected.named_parameters():
            assert torch.equal(found[name], value), name
            assert torch.equal(found[f"{name} exp_avg"], adam.state[value]["exp_avg"])
        assert torch.equal(found["outputs.0.weight"], expected.embedding.weight)
        assert found["lr"] == 0.3
    for everybody in others[1:]:  # loaded from a save of one process, in which they were tied
        for name in ("outputs.0.weight", "outputs.0.weight exp_avg"):
            assert torch.equal(
                everybody[-1][f"{len(everybody) - 1} {name} from tied"],
                everybody[0][f"0 {name.replace('outputs.0', 'embedding')}"],
            )


def test_what_each_rank_keeps_is_its_own_or_the_mean(others: list[list[dict[str, Any]]]) -> None:
    for everybody in others:
        for rank, found in enumerate(everybody):
            assert found[f"{rank} steps"] == 41
            own = float(rank) if len(everybody) == 2 else 0.5
            assert torch.equal(found[f"{rank} residual.weight"], torch.full((2, 3), own))
            assert found[f"{rank} num"].equal(torch.tensor(int(10 * own)))


def save_pipeline(folder: str) -> dict[str, Any]:
    """A real one: two steps, a save, and two more."""
    made = {}
    for name in ("once", "again"):
        job = start(pipeline=True, pipeline_configs={"accumulate_steps": 2})
        torch.manual_seed(0)
        model = job.distribute_model(chain())
        optimizer = job.distribute_optimizer(OPTIMIZERS["momentum"](model.parameters()))
        if name == "again":
            job.load(f"{folder}/pipeline")
        for step, (x, y) in enumerate(batches(4, 12)):
            if step == 2 and name == "once":
                job.save(f"{folder}/pipeline", None)
            if step >= 2 or name == "once":
                model.train_batch(x, y, torch.nn.functional.mse_loss)
                optimizer.step()
                optimizer.zero_grad()
        made.update({f"{name} {key}": value for key, value in whole(model).items()})
    return made


def test_a_pipeline_goes_on_and_is_a_plain_model_elsewhere(ranks: Ranks, folder: str) -> None:
    everybody = ranks.run(save_pipeline, 2, folder=folder)
    names = set()
    for found in everybody:
        once, again = of_case(found, "once"), of_case(found, "again")
        assert all(torch.equal(once[name], again[name]) for name in once)
        names |= set(once)
    model = chain()
    assert names == set(dict(model.named_parameters()))
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    load(f"{folder}/pipeline", model, optimizer, [], None)
    for x, y in list(batches(4, 12))[2:]:
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in whole(model).items():
        found = next(result[f"once {name}"] for result in everybody if f"once {name}" in result)
        torch.testing.assert_close(found, value, **CLOSE)


# Saves that do not come to an end


def kill_saves(folder: str) -> dict[str, Any]:
    """A process that saves is killed while it writes a tensor, before the manifest and after it."""
    world = world_of()
    save(folder, fill(Net(), 1.0), None, [], world)
    made: dict[str, Any] = {}
    places = [
        (tensor_files, "_made", 3),
        (save_writing, "_commit", 1),
        (save_writing, "remove_others", 1),
    ]
    for value, (owner, name, after) in enumerate(places, 2):
        child = os.fork()
        if not child:
            kill_in(owner, name, after)
            save(folder, fill(Net(), float(value)), None, [], world)
            os._exit(1)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        model = Net()
        load(folder, model, None, [], world)
        made[f"{name} value"] = model.head.bias[0].item()
        made[f"{name} files"] = " ".join(sorted(os.listdir(folder)))
    made["number"] = save(folder, fill(Net(), 9.0), None, [], world)
    made["files"] = " ".join(sorted(os.listdir(folder)))
    return made


def kill_in(owner: Any, name: str, after: int) -> None:
    real, calls = getattr(owner, name), 0

    def killed(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(owner, name, killed)


def test_a_killed_save_leaves_a_model_that_can_be_loaded(ranks: Ranks, tmp_path: Path) -> None:
    (found,) = ranks.run(kill_saves, 1, folder=str(tmp_path))
    assert found["_made value"] == found["_commit value"] == 1.0
    assert found["_made files"] == "manifest.json save-000001 save-000002"
    assert found["remove_others value"] == 4.0  # the manifest names it, so it is the model
    assert found["number"] == 5
    assert found["files"] == "manifest.json save-000005"  # what was left is removed


def fail_on_one_rank(folder: str) -> dict[str, Any]:
    world = world_of()
    save(folder, fill(Net(), 1.0), None, [], world, {"good": True})
    made = {}
    if world.rank == 1:

        def full(*_: Any) -> None:
            raise CheckpointError("the disk is full")

        save_writing.write_made_file = full
    for extra in ({}, {"bad": object()} if world.rank == 0 else {}):
        with pytest.raises(CheckpointError) as error:
            save(folder, fill(Net(), 2.0), None, [], world, extra)
        made[f"save {len(made)}"] = str(error.value)
    if world.rank == 1:
        Storage.place = lambda self, name: f"/nowhere/{name}"
    with pytest.raises(CheckpointError) as error:
        load(folder, Net(), None, [], world)
    made["load"] = str(error.value)
    if world.rank == 1:
        Storage.place = lambda self, name: f"{self.path}/{name}"
    model = Net()
    assert load(folder, model, None, [], world) == {"good": True}
    return {**made, "value": model.head.bias[0].item()}


def test_an_error_on_one_rank_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(fail_on_one_rank, 2, folder=str(tmp_path)):
        assert found["save 0"] == "rank 1: the disk is full"
        assert names(found["save 1"], "rank 0", "fleet.save(extra=...)")
        assert "rank 1" in found["load"]
        assert "/nowhere/save-000001/rank-0000" in found["load"]
        assert found["value"] == 1.0


class Unloaded(Strategy):
    """Its state cannot be used on rank 1."""

    field = "unloaded"

    def state(self) -> dict[str, torch.Tensor]:
        return {"number": torch.ones(())}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        if self.world.rank == 1:
            raise ValueError(f"found {state['number'].item()}")


def load_what_one_rank_refuses(folder: str) -> dict[str, Any]:
    world = world_of()
    strategy = Unloaded(DistributedStrategy(), world)
    save(folder, Net(), None, [strategy], world)
    with pytest.raises(CheckpointError) as error:
        load(folder, Net(), None, [strategy], world)
    return {"error": str(error.value)}


def test_an_error_of_one_rank_at_the_end_of_a_load_is_raised_on_all(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(load_what_one_rank_refuses, 2, folder=str(tmp_path)):
        assert names(found["error"], "rank 1", "ValueError", "1.0")


def pieces_of_meshes() -> dict[str, Any]:
    """Every way in which two strategies cut a tensor: the piece lies where torch says when it gathers all of it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    world = world_of()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sharding", "model"))
    num = 0
    for shape in ((8, 6), (7, 5), (5, 3), (1, 2)):
        every = torch.arange(float(np.prod(shape))).view(shape)
        for cut in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(0), Replicate()], [Replicate(), Replicate()]):
            piece = piece_of(distribute_tensor(every, mesh, cut))
            assert torch.equal(every[box(piece.offset, piece.tensor.shape)], piece.tensor)
            num += piece.tensor.numel()
    for dim in (0, 1):  # cut by two ranks first, and then by two more within
        layer = torch.nn.Linear(12, 8, bias=False)
        every = torch.arange(96.0).view(8, 12)
        layer.weight = torch.nn.Parameter(distribute_tensor(every, mesh["model"], [Shard(dim)]))
        fully_shard(layer, mesh=mesh["sharding"])
        piece = piece_of(layer.weight)
        assert tuple(piece.tensor.shape) == ((2, 12), (4, 6))[dim]
        assert torch.equal(every[box(piece.offset, piece.tensor.shape)], piece.tensor)
    homes = model_pieces(layer, world)
    assert homes["weight"].offset == piece.offset
    return {"num": num}


def test_pieces_lie_where_torch_puts_them(ranks: Ranks) -> None:
    assert sum(result["num"] for result in ranks.run(pieces_of_meshes, 4)) == (48 + 35 + 15 + 2) * (1 + 1 + 2 + 4)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one process is what is wanted
def test_torch_reads_the_files_by_its_own_reader(saved: list[dict[str, Any]], folder: str) -> None:
    """Pieces of two ranks, of seven rows: four and three."""
    checkpoint = importlib.import_module("torch.distributed.checkpoint")
    if not hasattr(checkpoint, "HuggingFaceStorageReader"):
        pytest.skip("needs another torch")
    model = Net()
    load_parameters(f"{folder}/stage 3", model)
    found = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    reader = checkpoint.HuggingFaceStorageReader(f"{folder}/stage 3/save-000001")
    checkpoint.load(found, storage_reader=reader, no_dist=True)
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("strategy", ["plain", "stage 3"])
def test_an_exported_model_is_one_file_for_safetensors(
    saved: list[dict[str, Any]], folder: str, strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_file = imported("safetensors.torch").load_file

    model = Net()
    load_parameters(f"{folder}/{strategy}", model)
    out = tmp_path / "model.safetensors"
    assert command.main(["export", f"{folder}/{strategy}", "--out", str(out)]) == 0
    assert lines_naming(capsys.readouterr().out, len(model.state_dict()), out)
    found = load_file(out)
    assert set(found) == set(model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def test_inspect_tells_of_a_saved_model(
    saved: list[dict[str, Any]], folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{folder}/stage 3"
    assert command.main(["inspect", place, "--check"]) == 0
    shown = capsys.readouterr().out
    assert lines_naming(shown, "save-000001", "collective", 2)
    assert lines_naming(shown, "Adam", 20, "lr=0.0025")
    assert "blocks.0.inner.0.weight" in shown
    assert re.search(r"\b\d+ pieces", shown)
    assert command.main(["inspect", place, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["extra"]["step"] == 2
    assert told["strategy"]["sharding"] is True
    head = next(tensor for tensor in told["tensors"] if tensor["name"] == "head.weight")
    assert (head["shape"], head["pieces"], head["bytes"]) == ([3, 7], 2, 84)
