"""Parts in folders: taken in order, once, when they are finished; what is odd about them is said once, on stderr."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import msgspec
import pytest
from support.messages import lines_naming, naming

from torchfleet.apps.online import FolderSource, Part
from torchfleet.apps.online.folders import _RECENT
from torchfleet.apps.online.parts import day_and_hour, time_of
from torchfleet.base.errors import DataError


class Disk:
    """A folder on this machine, or in memory behind a URL."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fs, self._root = fsspec.core.url_to_fs(path)

    def write(self, name: str, text: str = "1 0\n") -> None:
        place = f"{self._root}/{name}"
        self._fs.makedirs(place.rsplit("/", 1)[0], exist_ok=True)
        self._fs.pipe_file(place, text.encode())

    def finish(self, name: str, num_files: int = 2) -> None:
        for i in range(num_files):
            self.write(f"{name}/part-{i}")
        self.write(f"{name}/_SUCCESS", "")

    def remove(self, name: str) -> None:
        self._fs.rm(f"{self._root}/{name}", recursive=True)


_numbers = itertools.count()


@pytest.fixture(params=["local", "memory"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    made = Disk(str(tmp_path / "clicks") if request.param == "local" else f"memory://clicks-{next(_numbers)}")
    yield made
    if request.param == "memory":
        fsspec.filesystem("memory").store.clear()


def names(source: FolderSource, position: Any = None, most: int = 100) -> list[str]:
    """All parts that are there, one after the other, with positions as a save keeps them."""
    found = []
    while len(found) < most and (part := source.next(position)) is not None:
        found.append(part.name)
        position = msgspec.json.decode(msgspec.json.encode(part.position))
    return found


def test_parts_come_in_the_order_of_days_and_hours(disk: Disk) -> None:
    given = ["20261116/00", "20261115/23", "20261231/01", "20270101/00", "20261115/07"]
    for name in given:
        disk.finish(name)
    assert names(FolderSource(disk.path)) == sorted(given)


def test_a_part_has_its_hour_its_time_and_its_files(disk: Disk) -> None:
    disk.finish("20261115/07", 3)
    part = FolderSource(disk.path).next(None)
    assert part is not None
    assert (part.name, part.day, part.hour, part.time) == ("20261115/07", "20261115", 7, 1794726000.0)
    assert part.files == [f"{disk.path}/20261115/07/part-{i}" for i in range(3)]
    for place in part.files:
        with fsspec.open(place, "rb") as file:
            assert file.read() == b"1 0\n"


def test_every_file_is_one_workers(disk: Disk) -> None:
    disk.finish("20261115/07", 5)
    source = FolderSource(disk.path)
    part = source.next(None)
    assert part is not None
    shares = [source.files_of(part, worker, 3) for worker in range(3)]
    assert sorted(place for share in shares for place in share) == part.files
    assert sorted(map(len, shares)) == [1, 2, 2]
    source.done(part)
    assert source.next(None) == part


def test_nothing_there_is_no_part_and_no_error(disk: Disk) -> None:
    source = FolderSource(disk.path)
    assert source.next(None) is None
    assert not source.is_over(None)
    disk.finish("20261115/07")
    assert names(source) == ["20261115/07"]


def test_a_part_is_taken_when_its_done_file_is_there(disk: Disk) -> None:
    disk.write("20261115/07/part-0")
    source = FolderSource(disk.path)
    assert source.next(None) is None
    disk.write("20261115/07/_SUCCESS", "")
    assert names(source) == ["20261115/07"]


def test_a_position_is_where_to_go_on(disk: Disk) -> None:
    for hour in range(5):
        disk.finish(f"20261115/{hour:02}")
    assert names(FolderSource(disk.path), "20261115/02") == ["20261115/03", "20261115/04"]
    assert names(FolderSource(disk.path), {"recent": ["20261115/00", "20261115/03"]}) == ["20261115/04"]
    with pytest.raises(DataError, match=naming("FolderSource", "'yesterday'")):
        FolderSource(disk.path).next("yesterday")


def test_other_things_in_the_folder_are_no_parts(disk: Disk) -> None:
    disk.finish("20261115/07")
    for name in ("20261315/07", "20261115/24", "20261115/7", "logs/07", "2026111/07", "20261115x/07", "20261115/07b"):
        disk.finish(name)
    disk.write("20261116", "a file")
    disk.write("20261115/08", "a file")
    with pytest.raises(DataError, match=naming("08", "_SUCCESS")):
        names(FolderSource(disk.path))
    disk.remove("20261115/08")
    assert names(FolderSource(disk.path)) == ["20261115/07"]


def test_a_late_part_is_reported_once_and_never_taken(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    for hour in (5, 7):
        disk.finish(f"20261115/{hour:02}")
    source = FolderSource(disk.path)
    first = source.next(None)
    assert first is not None
    second = source.next(first.position)
    assert second is not None
    assert second.name == "20261115/07"
    assert source.next(second.position) is None
    assert capfd.readouterr().err == ""
    disk.finish("20261115/06")
    disk.finish("20261115/04")  # before the first one that was ever taken: not late, but left out on purpose
    for _ in range(3):
        assert source.next(second.position) is None
    text = capfd.readouterr().err
    assert re.fullmatch(naming(f"{disk.path}/20261115/06", "20261115/07") + r".*\n", text)
    assert text.count("\n") == 1
    disk.finish("20261115/08")
    assert names(source, second.position) == ["20261115/08"]
    assert capfd.readouterr().err == ""
    assert names(FolderSource(disk.path), second.position) == ["20261115/08"]  # after a restart it is said again
    assert capfd.readouterr().err.count("left out") == 1


def test_an_unfinished_part_is_waited_for(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    disk.finish("20261115/05")
    disk.write("20261115/06/part-0")
    source = FolderSource(disk.path)
    assert names(source) == ["20261115/05"]
    assert capfd.readouterr().err == ""  # that the last one is still being written is as it should be
    disk.finish("20261115/07")
    for _ in range(3):
        assert names(source) == ["20261115/05"]
    assert len(lines_naming(capfd.readouterr().err, "20261115/06", "20261115/07")) == 1
    disk.finish("20261115/06")
    assert names(source) == ["20261115/05", "20261115/06", "20261115/07"]


def test_an_unfinished_part_can_be_passed_over(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    disk.finish("20261115/05")
    disk.write("20261115/06/part-0")
    disk.write("20261115/07/part-0")
    source = FolderSource(disk.path, wait_for_unfinished=False)
    assert names(source) == ["20261115/05"]
    disk.finish("20261115/08")
    assert names(source) == ["20261115/05", "20261115/08"]
    text = capfd.readouterr().err
    assert len(text.splitlines()) == 2
    assert lines_naming(text, "20261115/06", "20261115/08")
    assert lines_naming(text, "20261115/07", "20261115/08")


def test_an_empty_part_is_passed_over_with_a_line(disk: Disk, capfd: pytest.CaptureFixture[str]) -> None:
    disk.finish("20261115/05")
    disk.finish("20261115/06", 0)
    disk.write("20261115/06/_metadata")
    disk.write("20261115/06/.part-0.crc")
    source = FolderSource(disk.path)
    for _ in range(2):
        assert names(source) == ["20261115/05"]
    text = capfd.readouterr().err
    assert re.search(naming(f"{disk.path}/20261115/06"), text)
    assert text.count("\n") == 1
    disk.finish("20261115/07")
    assert names(source) == ["20261115/05", "20261115/07"]
    part = source.next({"recent": ["20261115/05"]})
    assert part is not None
    assert part.position == {"recent": ["20261115/05", "20261115/06", "20261115/07"]}
    source.next(part.position)
    assert "20261115/06" not in capfd.readouterr().err  # it was seen to, and is not late


def test_until_ends_the_source(disk: Disk) -> None:
    for hour in range(4):
        disk.finish(f"20261115/{hour:02}")
    source = FolderSource(disk.path, start="20261115/01", until="20261115/02")
    assert names(source) == ["20261115/01", "20261115/02"]
    assert not source.is_over("20261115/01")
    assert source.is_over("20261115/02")
    assert source.is_over({"recent": ["20261115/01", "20261115/02"]})


def test_until_ends_the_source_also_when_that_part_never_comes(disk: Disk) -> None:
    disk.finish("20261115/00")
    source = FolderSource(disk.path, until="20261115/02")
    assert names(source) == ["20261115/00"]
    assert not source.is_over("20261115/00")
    disk.write("20261115/04/part-0")
    assert source.next("20261115/00") is None
    assert not source.is_over("20261115/00")
    disk.finish("20261115/03")
    assert source.next("20261115/00") is None
    assert source.is_over("20261115/00")


def test_until_ends_the_source_also_when_that_part_is_empty(disk: Disk) -> None:
    disk.finish("20261115/00")
    disk.finish("20261115/01", 0)
    source = FolderSource(disk.path, until="20261115/01")
    assert names(source) == ["20261115/00"]
    assert source.is_over("20261115/00")


def test_a_day_as_until_is_the_whole_day(disk: Disk) -> None:
    for name in ("20261115/22", "20261115/23", "20261116/00"):
        disk.finish(name)
    source = FolderSource(disk.path, start="20261115", until="20261115")
    assert not source.is_over("20261115/22")
    assert names(source) == ["20261115/22", "20261115/23"]
    assert source.is_over("20261115/23")


@pytest.mark.parametrize(
    ("pattern", "place"),
    [
        ("{day}{hour}", "2026111507"),
        ("logs/dt={day}/h={hour}", "logs/dt=20261115/h=07"),
        ("{hour}/{day}", "07/20261115"),
        ("{day}/{day}-{hour}", "20261115/20261115-07"),
        ("{day}/{hour}-*", "20261115/07-final"),
        ("*/{day}/{hour}", "eu/20261115/07"),
    ],
)
def test_patterns(disk: Disk, pattern: str, place: str) -> None:
    later = place.replace("07", "09")
    for folder in (later, place, place.replace("20261115", "20261114"), "other/20261115-07", "20261115/20261114-07"):
        disk.finish(folder)
    source = FolderSource(disk.path, pattern)
    assert names(source) == ["20261114/07", "20261115/07", "20261115/09"]
    part = source.next("20261114/07")
    assert part is not None
    assert part.files == [f"{disk.path}/{place}/part-{i}" for i in range(2)]


def test_parts_of_whole_days(disk: Disk) -> None:
    for name in ("20261115", "20261117", "20261116"):
        disk.finish(name)
    source = FolderSource(disk.path, "{day}", until="20261116")
    assert names(source) == ["20261115", "20261116"]
    assert source.is_over("20261116")
    assert not source.is_over("20261115")


def test_single_files_that_appear_by_rename(disk: Disk) -> None:
    for name in ("part-20261115-08.txt", "part-20261115-07.txt", "part-20261115-09.txt.tmp"):
        disk.write(name)
    source = FolderSource(disk.path, "part-{day}-{hour}.txt", done=None)
    assert names(source) == ["20261115/07", "20261115/08"]
    part = source.next(None)
    assert part is not None
    assert part.files == [f"{disk.path}/part-20261115-07.txt"]


def test_several_files_with_a_done_file_beside_them(disk: Disk) -> None:
    for i in range(3):
        disk.write(f"part-20261115-07-{i}")
    source = FolderSource(disk.path, "part-{day}-{hour}*", done="part-{day}-{hour}.done")
    assert source.next(None) is None
    disk.write("part-20261115-07.done", "")
    part = source.next(None)
    assert part is not None
    assert part.files == [f"{disk.path}/part-20261115-07-{i}" for i in range(3)]


def test_a_folder_without_a_done_file_is_refused(disk: Disk) -> None:
    disk.finish("20261115/07")
    with pytest.raises(DataError, match=naming("FolderSource(done=...)")):
        FolderSource(disk.path, done=None).next(None)


def test_only_files_that_fit_are_data(disk: Disk) -> None:
    disk.finish("20261115/07")
    disk.write("20261115/07/readme.md")
    disk.write("20261115/07/more/part-9")
    part = FolderSource(disk.path, files="part-*").next(None)
    assert part is not None
    assert part.files == [f"{disk.path}/20261115/07/part-{i}" for i in range(2)]


def test_links_are_followed(tmp_path: Path) -> None:
    Disk(str(tmp_path / "elsewhere")).finish("07")
    (tmp_path / "clicks" / "20261115").mkdir(parents=True)
    (tmp_path / "clicks" / "20261115" / "07").symlink_to(tmp_path / "elsewhere" / "07")
    assert names(FolderSource(str(tmp_path / "clicks"))) == ["20261115/07"]


def test_a_position_does_not_grow(tmp_path: Path) -> None:
    disk = Disk(str(tmp_path))
    wanted = [f"202611{day:02}/{hour:02}" for day in range(1, 5) for hour in range(24)]
    for name in wanted:
        disk.finish(name, 1)
    source, position, sizes = FolderSource(disk.path), None, []
    for name in wanted:
        part = source.next(position)
        assert part is not None
        assert part.name == name
        position = part.position
        sizes.append(len(position["recent"]))
    assert max(sizes) == _RECENT
    assert len(source._reported) == 0


def test_later_days_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catching up with a year of parts must not list the year for every part."""
    disk = Disk(str(tmp_path))
    for day in range(1, 29):
        disk.finish(f"202611{day:02}/00", 1)
    source = FolderSource(disk.path)
    listed: list[str] = []
    look = source._tree._list
    monkeypatch.setattr(source._tree, "_list", lambda path: listed.append(path) or look(path))
    part = source.next("20261101/00")
    assert part is not None
    assert part.name == "20261102/00"
    assert listed == ["", "20261101", "20261102", "20261102/00"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pattern": "part-*"}, "{day}"),
        ({"start": "tomorrow"}, "FolderSource(start=...)"),
        ({"until": 20261115}, "FolderSource(until=...)"),
        ({"path": "nowhere://bucket"}, "nowhere://bucket"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=naming(text)):
        FolderSource(**{"path": "clicks", **options})


def test_hours_and_seconds() -> None:
    assert time_of("19700101", 1) == 3600.0
    assert time_of("20261115", 7) % 3600 == 0
    assert day_and_hour(time_of("20261115", 7) + 3599) == ("20261115", 7)
    for day, hour in (("20261315", 0), ("20261115", 24), ("tomorrow", 0)):
        with pytest.raises(ValueError):
            time_of(day, hour)


def test_a_part_survives_the_way_to_the_other_workers() -> None:
    part = Part("20261115/07", 1.5, "20261115", 7, {"recent": ["a"]}, ["x"], [[0, 1, 2]])
    assert msgspec.convert(msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.to_builtins(part))), Part) == part
