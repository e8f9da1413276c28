"""Modules that are imported when something of them is first used.

All processes of the tests read all files of tests. What only a few tests need is not imported by them all.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


class Late:
    """Stands for a module; the package that it is in must be installed, else the tests of the file are skipped."""

    def __init__(self, name: str) -> None:
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install 'torchfleet[dev]'", allow_module_level=True)
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("_", "pytest", "is_hypothesis")):  # pytest asks whether this is a test or a fixture
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
