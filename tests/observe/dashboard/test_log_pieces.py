"""Logs in bounded pieces, and what is no log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchfleet.base.monitor.json_lines import json_line
from torchfleet.observe.dashboard.log_pieces import PIECE, find_lines, is_log_name, read_before, read_piece

LINES = "".join(f"line {number} of the log\n" for number in range(20_000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "workerlog.0").write_text(LINES)
    (tmp_path / "secret").write_text("secret")
    return tmp_path / "run"


def test_pieces_put_together_are_the_log(folder: Path) -> None:
    piece = read_piece(folder, "workerlog.0")
    assert piece["end"] == piece["size"] == len(LINES)
    text, start = piece["text"], piece["start"]
    while start:
        earlier = read_piece(folder, "workerlog.0", int(piece["file"]), end=start)
        assert len(earlier["text"]) <= PIECE
        text, start = earlier["text"] + text, earlier["start"]
    assert text == LINES


def test_what_was_added_follows_and_a_full_log_that_was_put_aside_is_still_read(folder: Path) -> None:
    log = folder / "workerlog.0"
    piece = read_piece(folder, "workerlog.0")
    with open(log, "a") as file:
        file.write("one more\n")
    added = read_piece(folder, "workerlog.0", int(piece["file"]), start=piece["end"])
    assert added["text"] == "one more\n"
    log.rename(folder / "workerlog.0.1")
    log.write_text("a new one\n")
    assert read_piece(folder, "workerlog.0", int(piece["file"]), start=piece["end"])["text"] == "one more\n"
    present = read_piece(folder, "workerlog.0")
    assert (present["text"], present["has_earlier_file"]) == ("a new one\n", True)
    assert read_before(folder, "workerlog.0")["text"].endswith("one more\n")
    assert read_piece(folder, "workerlog.0", 12345, start=3)["text"] == "a new one\n"  # a file that is gone


def test_lines_are_found_and_come_without_what_commands_a_terminal(folder: Path) -> None:
    with open(folder / "workerlog.0", "a") as file:
        file.write("\x1b[31mLINE 7 in red\x1b[0m\x1b]0;title\x07\nprogress 1\rprogress 2\n")
        file.write(json_line("line 7 of --log_format json", "worker", 0) + "\n")
    found = find_lines(folder, "workerlog.0", "line 7 ")
    assert found["lines"] == ["line 7 of the log", "LINE 7 in red", "line 7 of --log_format json"]
    assert find_lines(folder, "workerlog.0", "progress")["lines"] == ["progress 2"]
    many = find_lines(folder, "workerlog.0", "of the log")
    assert (len(many["lines"]), many["num"]) == (200, 20_000)


@pytest.mark.parametrize(
    "name", ["../secret", "..", ".", "", "a/b", "/etc/passwd", ".status.worker.0", "a\0b", "x" * 200]
)
def test_names_that_lead_elsewhere_are_no_logs(folder: Path, name: str) -> None:
    assert not is_log_name(name)
    assert read_piece(folder, name) is None
    assert find_lines(folder, name, "secret") is None


def test_links_and_pipes_are_no_logs(folder: Path) -> None:
    (folder / "workerlog.1").symlink_to(folder.parent / "secret")
    os.mkfifo(folder / "workerlog.2")
    (folder / "workerlog.3").mkdir()
    for name in ("workerlog.1", "workerlog.2", "workerlog.3", "workerlog.4"):
        assert read_piece(folder, name) is None
        assert read_before(folder, name) is None
