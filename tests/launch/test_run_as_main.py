"""A script or module in this process, against Python itself in another one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import torchfleet

TOLD = "import sys\nprint(__name__, sys.argv, sys.path[0])\n"
RUN = "import sys\nfrom torchfleet.launch.run_as_main import run_as_main\n"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["told.py", "link.py", "told"])
def test_name_arguments_and_path_are_those_of_python(target: str, tmp_path: Path) -> None:
    """A script, a link to one in another folder, and a module of the working directory."""
    scripts, linked = tmp_path / "scripts", tmp_path / "linked"
    for folder in (scripts, linked):
        folder.mkdir()
    (scripts / "told.py").write_text(TOLD)
    (linked / "link.py").symlink_to(scripts / "told.py")
    is_module = target == "told"
    place = target if is_module else str((linked if target == "link.py" else scripts) / target)
    asked = [sys.executable, *(["-m"] if is_module else []), place, "one", "--two"]
    expected = subprocess.run(asked, cwd=scripts, capture_output=True, text=True, timeout=60, check=True).stdout
    code = f"{RUN}run_as_main({place!r}, ['one', '--two'], {is_module})"
    env = {"PYTHONPATH": str(Path(torchfleet.__file__).parent.parent)}
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=60, check=True, env=env).stdout
    assert found.split() == expected.split()
    assert "__main__" in found
