"""Where compiled kernels are kept: beside their sources, in the user's cache folder, or nowhere for long."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.messages import lines_naming
from support.paths import ROOT

USE = """
import numpy as np
from torchfleet.ps.kernels.rows import all_finite
print(all_finite(np.ones(4, np.uint32)))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package beside whose kernels nothing can be written: a file stands where the folder would."""
    copy = tmp_path / "site" / "torchfleet"
    shutil.copytree(ROOT / "torchfleet", copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "ps" / "kernels" / "__pycache__").write_text("not a folder")
    return copy.parent


def run(package: Path, tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return subprocess.run(
        [sys.executable, "-c", USE],
        env={**kept, "PYTHONPATH": str(package), "TMPDIR": str(tmp_path), **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


@pytest.mark.slow
@pytest.mark.long
def test_a_read_only_package_without_a_home_compiles_anew_and_says_so_once(package: Path, tmp_path: Path) -> None:
    ended = run(package, tmp_path, HOME="/dev/null/nowhere")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("True\n")
    assert ended.stderr.count("NUMBA_CACHE_DIR") == 1
    assert not list(tmp_path.glob("torchfleet-kernels-*")), "the temporary folder is removed at the end"


@pytest.mark.slow
def test_a_read_only_package_keeps_its_kernels_in_the_users_cache(package: Path, tmp_path: Path) -> None:
    ended = run(package, tmp_path, HOME=str(tmp_path / "home"))
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    (kept,) = (tmp_path / "home" / ".cache" / "torchfleet").iterdir()
    assert list(kept.rglob("*.nbi"))
    assert kept.stat().st_mode & 0o077 == 0, "what is loaded from there is executed"


@pytest.mark.slow
def test_the_folder_that_the_user_has_chosen_is_used(package: Path, tmp_path: Path) -> None:
    ended = run(package, tmp_path, HOME="/dev/null/nowhere", NUMBA_CACHE_DIR=str(tmp_path / "chosen"))
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr
    assert list((tmp_path / "chosen").rglob("*.nbi"))


@pytest.mark.slow
def test_a_chosen_folder_in_which_others_can_write_is_refused(package: Path, tmp_path: Path) -> None:
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen").chmod(0o777)
    ended = run(package, tmp_path, NUMBA_CACHE_DIR=str(tmp_path / "chosen"))
    assert ended.returncode == 1
    assert lines_naming(ended.stderr, "SecurityError", "NUMBA_CACHE_DIR")
    assert f"chmod go-w {tmp_path}/chosen" in ended.stderr


@pytest.mark.slow
@pytest.mark.long
def test_kernels_beside_their_sources_are_not_used_where_others_can_write(package: Path, tmp_path: Path) -> None:
    open_to_all = package / "torchfleet" / "ps" / "kernels" / "__pycache__"
    open_to_all.unlink()
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    ended = run(package, tmp_path, HOME=str(tmp_path / "home"))
    assert ended.returncode == 0, ended.stderr
    assert not list(open_to_all.glob("*.nb?"))
    assert list((tmp_path / "home" / ".cache" / "torchfleet").rglob("*.nbi"))
