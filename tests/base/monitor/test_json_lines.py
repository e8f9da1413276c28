"""Output as JSON lines: nothing lost, nothing added, one object a line."""

from __future__ import annotations

import json
from datetime import datetime, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cases import each_of
from support.messages import naming

from torchfleet.base.errors import RoleError
from torchfleet.base.monitor.json_lines import JsonLog, json_line, last_lines, level_of, log_format, readable
from torchfleet.ps.server.server_log import speaker


def logged(pieces: list[bytes]) -> list[dict[str, object]]:
    written: list[bytes] = []
    log = JsonLog(written.append, "worker", 3)
    for piece in pieces:
        log.write(piece)
    log.end()
    return [json.loads(line) for line in b"".join(written).decode().split("\n")[:-1]]


@given(st.binary(max_size=300), st.integers(1, 40))
def test_lines_are_whole_however_output_is_cut_into_pieces(output: bytes, size: int) -> None:
    found = logged([output[i : i + size] for i in range(0, len(output), size)])
    expected = output.decode(errors="replace").split("\n")
    assert [line["text"] for line in found] == (expected if expected[-1] else expected[:-1])


def test_a_line_says_when_who_and_how_bad() -> None:
    (line,) = logged([b"ERROR:root:no rows\xff left"])
    assert line | {"time": ""} == {
        "time": "", "role": "worker", "index": 3, "level": "error", "text": "ERROR:root:no rows\ufffd left",
    }  # fmt: skip
    age = datetime.now(timezone.utc) - datetime.fromisoformat(str(line["time"]))
    assert 0 <= age.total_seconds() < 60


def test_a_line_that_never_ends_comes_in_parts() -> None:
    found = logged([b"x" * 100_000] * 3)
    assert "".join(str(line["text"]) for line in found) == "x" * 300_000
    assert max(len(str(line["text"])) for line in found) <= 1 << 16


@each_of(
    ("text", "level"),
    [
        ("step 100 | loss 0.5", "info"),
        ("DEBUG:root:x", "debug"),
        ("2026-11-16 15:04:05,123 WARNING slow", "warning"),
        ("train.py:3: UserWarning: no GPU", "warning"),
        ("Traceback (most recent call last):", "error"),
        ("torchfleet.base.errors.ServerUnreachable: x", "info"),
        ("RuntimeError: CUDA", "error"),
        ("KeyboardInterrupt", "error"),
        ("errors: 0", "info"),
    ],
)
def test_the_level_is_what_the_line_shows(text: str, level: str) -> None:
    assert level_of(text) == level


def test_a_reader_gets_the_text_of_both_formats() -> None:
    assert readable(json_line("a\x9b31m\tb", "server", 0)) == "a\x9b31m\tb"
    assert "\x9b" not in json_line("a\x9b31m", "server", 0)  # a terminal would obey it
    for line in ("loss 0.5", "{}", '{"time": 3}', '{"time": "x", "level": "info", "text": 4}', '{"time": tor'):
        assert readable(line) == line


def test_a_line_that_only_looks_like_an_object_is_read_as_it_is() -> None:
    for line in ('{"time": ' + "[" * 60_000, '{"time": 3'):
        assert readable(line) == line


def test_last_lines_are_for_people_also_where_the_first_object_is_cut() -> None:
    lines = [json_line(f"line {i}", "worker", 0) for i in range(30)]
    end = "\n".join(lines).encode() + b"\n"
    assert last_lines(end[20:], 5) == [f"line {i}" for i in range(25, 30)]
    assert last_lines(end[20:], 100) == [f"line {i}" for i in range(1, 30)]
    assert last_lines(b"a\nb\nc\n", 2) == ["b", "c"]
    assert last_lines(b"", 2) == []


def test_an_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_LOG_FORMAT", "xml")
    with pytest.raises(RoleError, match=naming("text", "json", "'xml'")):
        log_format()


def test_a_server_by_itself_speaks_json_if_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    speaker(2)("plain")
    monkeypatch.setenv("FLEET_LOG_FORMAT", "json")
    speaker(2)("listening")
    plain, line = capsys.readouterr().err.splitlines()
    assert plain.endswith("] server 2: plain")
    found = json.loads(line)
    assert (found["role"], found["index"], found["text"]) == ("server", 2, "listening")
