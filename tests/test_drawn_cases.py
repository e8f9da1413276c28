"""`make test` draws the same cases in every process, whatever was imported there before."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def drawn() -> list[tuple[int, float, bytes]]:
    """The cases of a search that fails for none of them."""
    cases = []

    @settings(max_examples=100)
    @given(st.integers(), st.floats(allow_nan=False), st.binary(max_size=8))
    def search(number: int, real: float, data: bytes) -> None:
        cases.append((number, real, data))

    search()
    return cases


@pytest.mark.skipif("FLEET_SEARCH_DEPTH" in os.environ, reason="needs fixed searches: make fuzz draws others")
def test_a_search_draws_the_same_cases_after_another_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drawn()
    name = "module_of_constants"
    (tmp_path / f"{name}.py").write_text(f"NUMBERS = {[7_000_000 + n for n in range(200)]}\nREAL = 0.123456789\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module(name)
    try:
        assert drawn() == before
    finally:
        del sys.modules[name]
