"""What is shown where a reader is gone, or a terminal has not all letters."""

from __future__ import annotations

import io
import sys

import pytest

from torchfleet.observe.watch.reader_gone import Shown


@pytest.mark.parametrize(("encoding", "shown"), [("latin-1", "\\u2192"), ("utf-8", "\u2192")])
def test_letters_that_a_terminal_has_not_do_not_end_the_output(
    monkeypatch: pytest.MonkeyPatch, encoding: str, shown: str
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    safely = Shown()
    for line in ("one \u2192", "two \udcff", "three"):
        safely(lambda line=line: print(line, flush=True))
    assert not safely.is_gone
    assert written.getvalue().decode(encoding).splitlines() == [f"one {shown}", "two \\udcff", "three"]
