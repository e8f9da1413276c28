"""Where tests find files: of the repository, of their own, and of real data where there is any."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SUPPORT = TESTS / "support"
SCRIPTS = SUPPORT / "scripts"  # run as processes of their own
ROOT = TESTS.parent
REAL_DATA = ROOT.parent / "shared" / "data"  # absent on a user's machine
