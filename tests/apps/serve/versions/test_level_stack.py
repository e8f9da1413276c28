"""Stacks of levels against a dict of rows: whatever is added, removed and merged."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.searches import examples

from torchfleet.apps.serve.versions import level_stack
from torchfleet.apps.serve.versions.level_file import OPEN, Level, MappedLevel, read_rows, rows_of
from torchfleet.apps.serve.versions.level_stack import LevelStack

DIMS = {"wide": 3, "narrow": 1}
KEYS = st.integers(0, 40).map(lambda key: key - 20)  # signed, as ids are


def made_level(stack: LevelStack, rows: dict[str, dict[int, float]], gone: dict[str, set[int]] | None = None) -> Level:
    """A level in which every number of a row is the given one."""
    with stack.writer() as writer:
        for name, dim in DIMS.items():
            own, lost = rows.get(name, {}), (gone or {}).get(name, set())
            with writer.table(name, dim, len(own) + len(lost)) as table:
                table.add(as_keys(own), np.repeat(np.array(list(own.values()), np.float32)[:, None], dim, 1))
                table.add_gone(as_keys(lost))
        return writer.finish()


def as_keys(keys: object) -> np.ndarray:
    return np.array(list(keys), np.int64).view(np.uint64)  # type: ignore[call-overload]


def read(folder: Path, levels: list[Level], name: str, keys: list[int]) -> list[float]:
    mapped = [MappedLevel(folder, level) for level in levels]
    maps = [each.tables[name] for each in mapped if name in each.tables]
    found = rows_of(maps, DIMS[name], np.array(keys, np.int64))
    assert (found == found[:, :1]).all()
    return [float(value) for value in found[:, 0]]


class Stacks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self._temporary.name)
        self.stack = LevelStack(self.folder)
        self.rows: dict[str, dict[int, float]] = {name: {} for name in DIMS}
        self._number = 0

    @rule(name=st.sampled_from(sorted(DIMS)), keys=st.sets(KEYS, max_size=12), gone=st.sets(KEYS, max_size=6))
    def add(self, name: str, keys: set[int], gone: set[int]) -> None:
        """Keys that are in both keep their row, as in a save."""
        self._number += 1
        for key in gone:
            self.rows[name].pop(key, None)
        self.rows[name].update(dict.fromkeys(keys, float(self._number)))
        self.stack.add(made_level(self.stack, {name: dict.fromkeys(keys, float(self._number))}, {name: gone}))

    @rule(keys=st.sets(KEYS, max_size=20))
    def reset(self, keys: set[int]) -> None:
        self._number += 1
        self.rows = {name: dict.fromkeys(keys, float(self._number)) for name in DIMS}
        self.stack.reset([made_level(self.stack, self.rows)])

    @rule()
    def finish_merge(self) -> None:
        if self.stack._merging is not None:
            self.stack._merging.result()
        self.stack.settle()

    @invariant()
    def reads_as_the_dict(self) -> None:
        keys = list(range(-25, 25))
        for name, rows in self.rows.items():
            assert read(self.folder, self.stack.levels, name, keys) == [rows.get(key, 0.0) for key in keys]
        assert len(self.stack.levels) <= 10

    def teardown(self) -> None:
        self.stack.close()
        self._temporary.cleanup()


@pytest.fixture
def small_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(level_stack, "SMALL", 15)  # so that few rows are merged in all ways


@pytest.mark.slow
@pytest.mark.usefixtures("small_stacks")
def test_a_stack_reads_as_a_dict_whatever_is_merged() -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        Stacks, settings=settings(max_examples=examples(60), stateful_step_count=20, deadline=None)
    )


def test_many_rows_are_found_and_others_read_as_zeros(tmp_path: Path) -> None:
    stack, rng = LevelStack(tmp_path), np.random.default_rng(0)
    keys = rng.choice(1 << 62, 30_000, replace=False)
    values = rng.random((len(keys), 3), np.float32)
    with stack.writer() as writer:
        with writer.table("wide", 3, len(keys)) as table:
            for start in range(0, len(keys), 7000):
                table.add(keys[start : start + 7000].view(np.uint64), values[start : start + 7000])
        level = writer.finish()
    mapped = MappedLevel(tmp_path, level)
    asked = np.concatenate([keys[::3], keys[::3] + (1 << 62)])
    asked.flags.writeable = False
    found = rows_of([mapped.tables["wide"]], 3, asked)
    np.testing.assert_array_equal(found[: len(keys[::3])], values[::3])
    assert not found[len(keys[::3]) :].any()
    stack.close()


@pytest.mark.parametrize("keeps_gone", [False, True])
def test_removed_keys_are_kept_over_rows_that_are_elsewhere(tmp_path: Path, keeps_gone: bool) -> None:
    stack = LevelStack(tmp_path, keeps_gone=keeps_gone)
    stack.add(made_level(stack, {"wide": {7: 2.0}}, {"wide": {8}}))
    for key in range(20, 40):
        stack.add(made_level(stack, {"wide": {key: 1.0}}))
    assert len(stack.levels) < 10  # they were merged
    maps = [MappedLevel(tmp_path, level).tables["wide"] for level in stack.levels]
    rows, found = read_rows(maps, 3, np.array([7, 8, 9, 30]))
    assert rows[:, 0].tolist() == [2.0, 0.0, 0.0, 1.0]
    assert (found != OPEN).tolist() == [True, keeps_gone, False, True]
    stack.close()


def test_a_removed_file_stays_readable_where_it_is_mapped(tmp_path: Path) -> None:
    stack = LevelStack(tmp_path)
    level = made_level(stack, {"wide": {7: 2.0}})
    mapped = MappedLevel(tmp_path, level)
    os.unlink(tmp_path / level.file)
    assert rows_of([mapped.tables["wide"]], 3, np.array([7, 8])).tolist() == [[2.0] * 3, [0.0] * 3]
    stack.close()


def test_a_level_that_cannot_be_written_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = LevelStack(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        made_level(stack, {"wide": {7: 2.0}})
    assert not list(tmp_path.iterdir())
    stack.close()
