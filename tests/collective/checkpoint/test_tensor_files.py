"""Files of saved collective models: kinds of tensors, optimizers, damage, mistakes, and what other programs read."""

from __future__ import annotations

import os
import tracemalloc
import types
import zlib
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from support.extras import imported
from support.messages import names, naming
from support.sharded_models import Net, Tied

from torchfleet.base.errors import CheckpointError
from torchfleet.base.storage import Storage
from torchfleet.collective.checkpoint.collective_manifest import read
from torchfleet.collective.checkpoint.loading import load, load_parameters
from torchfleet.collective.checkpoint.planning import PieceSpec, assign_writers
from torchfleet.collective.checkpoint.saving import save
from torchfleet.collective.checkpoint.single_file import export
from torchfleet.collective.checkpoint.tensor_files import Buffers
from torchfleet.observe.commands import command
from torchfleet.ps.checkpoint.part_writer import write_made_file

ALONE: Any = types.SimpleNamespace(rank=0, size=1)


class Odd(torch.nn.Module):
    """Tensors of many kinds and shapes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(seed)
        self.brain = torch.nn.Parameter(torch.randn(3, 5, generator=made).bfloat16())
        self.scale = torch.nn.Parameter(torch.randn((), generator=made))
        self.none = torch.nn.Parameter(torch.empty(0, 4))
        self.wide = torch.nn.Parameter(torch.randn(6, 4, generator=made, dtype=torch.float64).t())
        kinds = (torch.float16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
        kinds += (torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)
        for kind in kinds:
            self.register_buffer(str(kind).split(".")[1], (torch.randn(7, generator=made) * 3).abs().to(kind))
        self.register_buffer("cache", torch.randn(3), persistent=False)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("where", ["here", "memory://collective"])
def test_tensors_of_every_kind_come_back_to_the_bit(where: str, tmp_path: Path) -> None:
    place = str(tmp_path) if where == "here" else where
    model, loaded = Odd(), Odd(seed=1)
    cache = loaded.cache.clone()
    assert save(place, model, None, [], ALONE, {"epoch": 3}) in (1, 2)
    assert load_parameters(place, loaded) == {"epoch": 3}
    expected = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert value.dtype == expected[name].dtype
        assert torch.equal(bits(value), bits(expected[name])), name
    assert torch.equal(loaded.cache, cache)


@pytest.mark.parametrize("name", ["Adam", "SGD", "NAdam", "Adagrad", "ASGD", "RMSprop", "Rprop", "Adafactor"])
def test_the_state_of_every_optimizer_comes_back(name: str, tmp_path: Path) -> None:
    """Counts, factors of another shape than the parameter, and options that a schedule has changed."""
    made = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Linear(4, 3)
        settings = {"momentum": 0.9} if name == "SGD" else {}
        optimizer = getattr(torch.optim, name)(
            [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1, **settings
        )
        made.append((model, optimizer))
    (model, optimizer), (other, empty) = made
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.25
    save(str(tmp_path), model, optimizer, [], ALONE)
    groups = [*empty.param_groups]
    load(str(tmp_path), other, empty, [], None)
    assert all(present is group for present, group in zip(empty.param_groups, groups, strict=True))
    model.zero_grad()
    for trained, step in ((model, optimizer), (other, empty)):
        trained(torch.ones(2, 4)).square().sum().backward()
        step.step()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        for key, value in optimizer.state[mine].items():
            same = empty.state[its][key]
            assert torch.equal(value, same) if isinstance(value, torch.Tensor) else value == same, key
    assert empty.param_groups[1]["lr"] == 0.25


def test_another_optimizer_starts_anew_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(str(tmp_path), model, optimizer, [], ALONE)
    other = torch.nn.Linear(2, 2)
    adam = torch.optim.Adam(other.parameters(), lr=0.5)
    load(str(tmp_path), other, adam, [], None)
    assert torch.equal(other.weight, model.weight)
    assert not adam.state
    assert adam.param_groups[0]["lr"] == 0.5
    assert names(capfd.readouterr().err, "SGD", "Adam")


def saved_net(tmp_path: Path) -> tuple[str, Path]:
    save(str(tmp_path), Net(), None, [], ALONE)
    return str(tmp_path), tmp_path / "save-000001" / "rank-00000-of-00001.safetensors"


def change(file: Path, place: int) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, tuple[Any, str]] = {
    "a file is cut off": (lambda file: os.truncate(file, file.stat().st_size - 5), "rank-00000-of-00001.safetensors"),
    "a bit has changed": (lambda file: change(file, -3), "rank-00000-of-00001.safetensors"),
    "a file is gone": (lambda file: file.unlink(), "rank-00000-of-00001.safetensors"),
    "the manifest has changed": (
        lambda file: change(file.parents[1] / "manifest.json", 99),
        "manifest.json",
    ),
    "the manifest is cut off": (lambda file: os.truncate(file.parents[1] / "manifest.json", 99), "manifest.json"),
    "the manifest is gone": (lambda file: (file.parents[1] / "manifest.json").unlink(), "manifest.json"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(what: str, tmp_path: Path) -> None:
    folder, file = saved_net(tmp_path)
    damage, message = DAMAGE[what]
    damage(file)
    with pytest.raises(CheckpointError, match=naming(*message.split())):
        load_parameters(folder, Net())


def with_another_name(model: Any) -> Any:
    model.tail = model.head
    del model.head
    return model


def with_more(model: Net) -> Net:
    model.more = torch.nn.Linear(1, 1)
    return model


MISTAKES: dict[str, tuple[Any, str]] = {
    "another shape": (lambda: Net(8), "(8,) (7,)"),
    "a layer too few": (lambda: Net().blocks[0], "'blocks.0.norm.weight'"),
    "a layer too many": (lambda: with_more(Net()), "'more.weight'"),
    "another name": (lambda: with_another_name(Net()), "'head.weight'"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_model_that_does_not_fit_is_named_and_left_alone(what: str, tmp_path: Path) -> None:
    folder, _ = saved_net(tmp_path)
    make, message = MISTAKES[what]
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=naming(*message.split())):
        load_parameters(folder, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_optimizers_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    save(str(tmp_path), model, torch.optim.SGD(model.parameters(), lr=0.1), [], ALONE)
    two = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    with pytest.raises(CheckpointError, match=naming(2, 1)):
        load(str(tmp_path), model, two, [], None)
    save(str(tmp_path), model, two, [], ALONE)
    swapped = torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}], lr=0.1)
    swapped.state[model.bias]["momentum_buffer"] = kept = torch.ones(2)
    with pytest.raises(CheckpointError, match=naming("'bias'", 0, 1)):
        load(str(tmp_path), model, swapped, [], None)
    assert swapped.state[model.bias]["momentum_buffer"] is kept
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.1)
    with pytest.raises(CheckpointError, match=naming("(3,)", 0)):
        save(str(tmp_path), model, stranger, [], ALONE)
    with pytest.raises(CheckpointError, match=naming("(3,)", 0)):
        load(
            str(tmp_path),
            model,
            torch.optim.SGD([{"params": stranger.param_groups[0]["params"]}, {"params": []}]),
            [],
            None,
        )
    two.param_groups[1]["lr"] = float("inf")
    with pytest.raises(CheckpointError, match=naming("'lr'", "inf")):
        save(str(tmp_path), model, two, [], ALONE)


def test_pieces_that_do_not_fit_together_are_no_save() -> None:
    def spec(name: str, whole: tuple[int, ...], offset: int, length: int, dtype: str = "F32") -> PieceSpec:
        return PieceSpec("model", name, dtype, whole, (offset,), (length,))

    plan = assign_writers(
        [[spec("a", (9,), 0, 5), spec("b", (4,), 0, 4)], [spec("a", (9,), 5, 4), spec("b", (4,), 0, 4)]]
    )
    assert [sorted(piece.name for piece in specs) for specs in plan] == [["a"], ["a", "b"]]  # who has less writes b
    with pytest.raises(CheckpointError, match=naming("'a'", 9, 5)):
        assign_writers([[spec("a", (9,), 0, 5)], []])
    with pytest.raises(CheckpointError, match=naming("'a'", "F32", "(9,)", "(8,)", "rank 1")):
        assign_writers([[spec("a", (9,), 0, 9)], [spec("a", (8,), 0, 8)]])
    with pytest.raises(CheckpointError, match=naming("'optimizer.a'")):
        assign_writers([[spec("optimizer.a", (1,), 0, 1), PieceSpec("optimizer", "a", "F32", (1,), (0,), (1,))]])


def test_kinds_of_tensors_and_tied_ones_are_exported(tmp_path: Path) -> None:
    safetensors = imported("safetensors.torch")
    odd, tied = Odd(), Tied()
    save(str(tmp_path / "odd"), odd, None, [], ALONE)
    save(str(tmp_path / "tied"), tied, None, [], ALONE)
    assert export(str(tmp_path / "odd"), str(tmp_path / "odd.safetensors")) == len(odd.state_dict())
    for name, value in safetensors.load_file(tmp_path / "odd.safetensors").items():
        assert value.dtype == odd.state_dict()[name].dtype
        assert torch.equal(bits(value), bits(odd.state_dict()[name])), name
    assert export(str(tmp_path / "tied"), str(tmp_path / "tied.safetensors")) == len(tied.state_dict()) - 1
    other = Tied()
    safetensors.load_model(other, tmp_path / "tied.safetensors")
    assert torch.equal(other.outputs[0].weight, tied.embedding.weight)


@pytest.mark.parametrize("place", ["memory://exported.safetensors", "memory://x/y.safetensors", "file://{folder}/z"])
def test_a_collective_model_is_exported_to_any_path_that_fsspec_opens(place: str, tmp_path: Path) -> None:
    load = imported("safetensors.torch").load
    folder, _ = saved_net(tmp_path)
    path = place.format(folder=tmp_path)
    assert command.main(["export", folder, "--out", path]) == 0
    with fsspec.open(path, "rb") as file:
        found = load(file.read())
    expected = Net()
    assert load_parameters(folder, expected) == {}
    assert found.keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def test_an_export_holds_two_tensors_and_no_more(tmp_path: Path) -> None:
    """A third one while its place is taken; 24 are 24 MB. Memory of numpy's arrays, which Python counts."""
    model = torch.nn.ParameterDict({f"t{i}": torch.full((1 << 18,), float(i)) for i in range(24)})
    save(str(tmp_path / "m"), model, None, [], ALONE)
    tracemalloc.start()
    try:
        export(str(tmp_path / "m"), str(tmp_path / "out.safetensors"))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 5 << 20
    found = imported("safetensors.torch").load_file(tmp_path / "out.safetensors")
    assert {name: float(value[-1]) for name, value in found.items()} == {f"t{i}": float(i) for i in range(24)}


@pytest.mark.parametrize("failing", [0, 1, 7])
def test_a_tensor_that_cannot_be_made_leaves_no_file(failing: int, tmp_path: Path) -> None:
    made: list[int] = []

    def maker(number: int) -> np.ndarray:
        if number == failing:
            raise CheckpointError("no bytes for you")
        made.append(number)
        return np.full(100, number, np.uint8)

    shown: list[int] = []
    buffers = Buffers(b"head", [lambda i=i: maker(i) for i in range(8)], shown.append)  # type: ignore[misc]
    with pytest.raises(CheckpointError, match="no bytes"):
        write_made_file(Storage(str(tmp_path)), "file", buffers, 804)
    assert made == list(range(failing))
    assert shown == [100] * failing
    assert buffers.checksums == [zlib.crc32(bytes([i]) * 100) for i in range(failing)]
    assert not list(tmp_path.iterdir())


WRONG: dict[str, tuple[list[str], str]] = {
    "a table of a collective model": (["inspect", "{model}", "--table", "t"], "it is collective"),
    "a collective model as a table": (["export", "{model}", "t", "p"], "which has no tables: fleet export"),
    "no model": (["export", "{model}/save-000001", "--out", "p"], "manifest.json"),
    "no such place": (["export", "{model}", "--out", "/proc/no/model.safetensors"], "cannot write to /proc/no"),
}


@pytest.mark.parametrize("what", WRONG)
def test_mistakes_on_the_command_line_are_named(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = saved_net(tmp_path)
    arguments, message = WRONG[what]
    assert command.main([argument.format(model=folder) for argument in arguments]) == 1
    assert message in capsys.readouterr().err
    assert read(Storage(folder)).number == 1


@pytest.mark.parametrize("more", [["--with_state"], ["--format", "text"]])
def test_options_for_tables_are_refused_of_a_model_without_any(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = saved_net(tmp_path)
    assert command.main(["export", str(folder), "--out", str(tmp_path / "p"), *more]) == 1
    assert names(capsys.readouterr().err, folder)
    assert not (tmp_path / "p").exists()


def test_a_place_and_out_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        command.main(["export", str(tmp_path), "--out", "p", "t", "p"])
