"""The follower of saves against a dict of each version's rows: deltas, removed rows, gaps, damage, a full disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.chains import DENSE, IDS, ITEMS, PLAIN, Chain
from support.messages import names, naming

from torchfleet.apps.serve.versions import follower as follower_module
from torchfleet.apps.serve.versions import rollback, version_store
from torchfleet.apps.serve.versions.follow_process import run, write_settings
from torchfleet.apps.serve.versions.follower import Follower, FollowSettings
from torchfleet.apps.serve.versions.mapped_version import MappedVersion
from torchfleet.apps.serve.versions.rollback import versions
from torchfleet.apps.serve.versions.version_description import read_current
from torchfleet.apps.serve.versions.version_store import VersionStore, Wanted, read_status, write_wanted
from torchfleet.base.errors import CheckpointError
from torchfleet.ps.checkpoint.compaction import compact

SPECS = (ITEMS, PLAIN, IDS, DENSE)
ASKED = np.arange(-5, 100)


class Followed:
    """A chain of saves that a test writes, and the follower of it. `store`: where, if not in `folder`."""

    def __init__(self, folder: Path, store: str = "") -> None:
        self.model, self.work, self._store = folder / "model", folder / "work", store or str(folder / "model")
        self.work.mkdir()
        self.chain = Chain(self._store, SPECS)
        self.told: list[str] = []
        self.follower = self.started()

    def started(self) -> Follower:
        return Follower(self.work, FollowSettings(self._store, keep=4, spacing=0.0), self.told.append)

    def save(self, *rows: tuple[int, int], gone: tuple[int, ...] = (), full: bool = False, servers: int = 2) -> None:
        """The same change of all tables."""
        named = {spec.name: list(rows) for spec in SPECS if spec is not DENSE}
        dropped = {spec.name: list(gone) for spec in SPECS if spec not in (DENSE, IDS)}
        self.chain.save(servers, named, dropped, full=full)

    def version(self) -> MappedVersion:
        found = read_current(self.work)
        assert found is not None
        return MappedVersion(self.work, found)

    def assert_follows(self) -> None:
        """The current version has the rows and the network of the last save, and no other rows."""
        version = self.version()
        for spec in SPECS:
            if spec is DENSE:
                continue
            found = version.rows(spec.name, ASKED)
            for key, row in zip(ASKED.tolist(), found, strict=True):
                content = self.chain.rows[spec.name].get(key)
                expected = np.zeros(spec.dim) if content is None else np.frombuffer(content["rows"], "<f4")[: spec.dim]
                np.testing.assert_array_equal(row, expected)
        block = self.chain.dense[DENSE.name][0]
        np.testing.assert_array_equal(version.parameters()["w"].numpy(), block[:4].reshape(2, 2))
        np.testing.assert_array_equal(version.parameters()["b"].numpy(), block[4:7])


@pytest.fixture
def followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    monkeypatch.setattr(follower_module, "RETRY", 0.0)
    made = Followed(tmp_path)
    yield made
    made.follower.close()


def damage(folder: Path) -> None:
    file = max(folder.glob("plain.rows.*"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def tear(folder: Path) -> None:
    file = max(folder.glob("plain.rows.*"), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-3])


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


def test_full_saves_and_deltas_with_removed_rows_are_taken_over(followed: Followed) -> None:
    followed.save((1, 10), (2, 20), (3, 30), full=True)
    followed.follower.step()
    followed.assert_follows()
    for number in range(30):
        followed.save(
            (number % 7, 100 + number), (50 + number, number), gone=(number // 2 + 50, 98), servers=1 + number % 3
        )
        followed.follower.step()
        followed.assert_follows()
        assert followed.version().number == 2 + number
    followed.save((4, 1), full=True)
    followed.follower.step()
    followed.assert_follows()
    assert read_status(followed.work).num_gaps == 0
    assert not followed.told


def test_saves_in_an_object_store_are_followed(tmp_path: Path) -> None:
    followed = Followed(tmp_path, f"memory://{tmp_path.name}/model")
    followed.save((1, 10), (2, 20), full=True)
    followed.follower.step()
    followed.save((2, 21), gone=(1,))
    for _ in range(2):
        followed.follower.step()
        followed.assert_follows()
    assert followed.version().number == 2
    followed.follower.close()


def test_a_follower_that_starts_late_takes_the_whole_chain_as_one_version(followed: Followed) -> None:
    followed.save((1, 10), (2, 20), full=True)
    followed.save((2, 21), (3, 30), gone=(1,))
    followed.save((1, 11))
    followed.follower.step()
    followed.assert_follows()
    assert followed.version().number == 1
    assert followed.version().created == 3 * 86_400.0  # as Chain dates its saves


def test_a_compacted_chain_goes_on(followed: Followed) -> None:
    followed.save((1, 10), (2, 20), full=True)
    followed.save((3, 30), gone=(2,))
    followed.follower.step()
    followed.chain.manifest = compact(str(followed.model))
    followed.follower.step()
    assert followed.version().number == 1
    followed.save((4, 40))
    followed.follower.step()
    followed.assert_follows()
    assert read_status(followed.work).num_gaps == 0


def test_a_chain_that_does_not_contain_the_last_save_is_read_whole_and_told(followed: Followed) -> None:
    followed.save((1, 10), (2, 20), full=True)
    followed.follower.step()
    followed.save((3, 30), gone=(2,))
    followed.save((5, 50))
    followed.chain.manifest = compact(str(followed.model))
    followed.save((4, 40))
    followed.follower.step()
    followed.assert_follows()
    assert read_status(followed.work).num_gaps == 1
    assert len(followed.told) == 1


@pytest.mark.parametrize("spoil", [damage, tear, remove])
def test_a_damaged_delta_is_a_gap_until_the_next_full_save(followed: Followed, spoil: Callable[[Path], None]) -> None:
    followed.save((1, 10), (2, 20), full=True)
    followed.follower.step()
    expected = followed.version().rows("plain", ASKED)
    followed.save((1, 11), gone=(2,))
    spoil(followed.model / "save-000002")
    followed.save((3, 33))
    for _ in range(3):
        followed.follower.step()
        np.testing.assert_array_equal(followed.version().rows("plain", ASKED), expected)
    assert followed.version().number == 1
    status = read_status(followed.work)
    assert status.num_gaps == 1
    assert status.trouble
    followed.save((1, 12), (9, 9), full=True)
    followed.follower.step()
    followed.assert_follows()
    assert not read_status(followed.work).trouble


def test_half_a_manifest_is_not_taken_over(followed: Followed) -> None:
    followed.save((1, 10), full=True)
    followed.follower.step()
    followed.save((1, 11))
    file = followed.model / "manifest.json"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    followed.follower.step()
    assert followed.version().number == 1
    assert read_status(followed.work).trouble
    file.write_bytes(whole)
    followed.follower.step()
    followed.assert_follows()


def test_on_a_full_disk_the_old_version_stays_and_it_is_told(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed.save((1, 10), full=True)
    followed.follower.step()
    followed.save((1, 11), (2, 22))
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", _full)
        followed.follower.step()
        followed.follower.step()
    status = read_status(followed.work)
    assert (followed.version().number, status.num_disk_full) == (1, 2)
    assert status.trouble
    followed.follower.step()
    followed.assert_follows()
    assert not read_status(followed.work).trouble


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_files_of_old_versions_are_removed(followed: Followed) -> None:
    followed.save((1, 10), full=True)
    for number in range(40):
        followed.save((number, number))
        followed.follower.step()
    assert len(list(followed.work.glob("network-*"))) <= 5
    assert len(list(followed.work.glob("version-*"))) == 4
    assert len(list(followed.work.glob("level-*"))) <= 20
    assert [found.number for found in versions(followed.work)] == [37, 38, 39, 40]


def test_going_back_and_on(followed: Followed) -> None:
    followed.save((1, 10), full=True)
    rows = {}
    for number in range(1, 4):
        followed.save((1, 100 * number))
        followed.follower.step()
        rows[number] = followed.version().rows("plain", ASKED)
    write_wanted(followed.work, Wanted(2))
    followed.follower.step()
    version = followed.version()
    assert (version.number, version.description.restored) == (4, 2)
    np.testing.assert_array_equal(version.rows("plain", ASKED), rows[2])
    followed.save((1, 500), (2, 50))
    for _ in range(3):
        followed.follower.step()
    assert followed.version().number == 4
    write_wanted(followed.work, Wanted(0))
    followed.follower.step()
    assert followed.version().number == 5
    followed.assert_follows()


def test_a_request_for_a_version_that_was_just_dropped_changes_nothing(
    followed: Followed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer drops the version after the user's process has found it, and before the request is written."""
    followed.save((1, 10), full=True)
    followed.follower.step()

    def drop(folder: Path) -> bool:
        for number in range(4):
            followed.save((1, 100 + number))
            followed.follower.step()
        return True

    def write(folder: Path, wanted: Wanted) -> None:
        write_wanted(folder, wanted)
        followed.follower.step()

    monkeypatch.setattr(rollback, "has_writer", drop)
    monkeypatch.setattr(rollback, "write_wanted", write)
    with pytest.raises(CheckpointError, match=naming(1, [2, 3, 4, 5])):
        rollback.ask(followed.work, 1)
    assert len(followed.told) == 1
    assert names(followed.told[0], 1, [2, 3, 4, 5])
    assert read_status(followed.work).pinned == 0
    followed.save((1, 500))
    followed.follower.step()
    followed.assert_follows()
    assert followed.version().number == 6


def test_going_back_is_tried_again_after_a_full_disk(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    followed.save((1, 10), full=True)
    followed.follower.step()
    expected = followed.version().rows("plain", ASKED)
    followed.save((1, 11))
    followed.follower.step()
    write_wanted(followed.work, Wanted(1))
    with monkeypatch.context() as patch:
        patch.setattr(version_store, "write_whole", _full)
        followed.follower.step()
    assert followed.version().number == 2
    followed.follower.step()
    assert followed.version().description.restored == 1
    np.testing.assert_array_equal(followed.version().rows("plain", ASKED), expected)
    assert read_status(followed.work).pinned == 1


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_at_most_keep_versions_are_kept(tmp_path: Path, keep: int) -> None:
    store = VersionStore(tmp_path, keep, spacing=0.0)
    network = store.write_network(store.next_file(), [], np.empty(0, np.float32))
    for number in range(1, 7):
        store.publish([], {}, network, float(number), "a test")
        assert store.numbers == list(range(max(1, number - keep + 1), number + 1))


def test_a_new_writer_goes_on_where_the_last_one_was_killed(followed: Followed) -> None:
    followed.save((1, 10), (2, 20), full=True)
    followed.follower.step()
    followed.save((3, 30), gone=(2,))
    (followed.work / "level-000000077").write_bytes(b"half a level")
    again = followed.started()
    assert followed.version().number == 1
    again.step()
    followed.assert_follows()
    assert followed.version().number == 2
    assert not (followed.work / "level-000000077").exists()
    again.close()


def test_a_new_writer_stays_at_the_version_that_a_user_went_back_to(followed: Followed) -> None:
    followed.save((1, 10), full=True)
    followed.follower.step()
    expected = followed.version().rows("plain", ASKED)
    followed.save((1, 11))
    followed.follower.step()
    write_wanted(followed.work, Wanted(1))
    followed.follower.step()
    again = followed.started()
    again.step()
    np.testing.assert_array_equal(followed.version().rows("plain", ASKED), expected)
    assert read_status(followed.work).pinned == 1
    again.close()


def test_a_second_writer_makes_no_second_version_of_a_model_that_is_not_followed(tmp_path: Path) -> None:
    """Two readers may each start a writer: the first has ended when the second gets the lock."""
    followed = Followed(tmp_path)
    followed.follower.close()
    followed.save((1, 1), full=True)
    write_settings(followed.work, FollowSettings(str(followed.model), follow=False))
    numbers = []
    for _ in range(2):
        assert run(followed.work) == 0
        current = read_current(followed.work)
        assert current is not None
        numbers.append(current.number)
    assert numbers == [1, 1]
