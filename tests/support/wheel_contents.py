"""What a wheel of torchfleet has to have, and must not have: `python tests/support/wheel_contents.py dist/*.whl`.

It needs nothing but Python: `make wheel` calls it in an environment without torchfleet.
"""

from __future__ import annotations

import shutil
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = "share/doc/torchfleet"  # where the wheel installs the pages of docs
COMMANDS = ("fleetrun = torchfleet.launch.__main__:main", "fleet = torchfleet.observe.commands.__main__:main")


def package_files(root: Path = ROOT) -> set[str]:
    """Every file of the package, data among them, by its path in the repository; and pages where they are installed."""
    files = (path.relative_to(root) for path in (root / "torchfleet").rglob("*") if path.is_file())
    pages = {f"{PAGES}/{path.relative_to(root / 'docs').as_posix()}" for path in (root / "docs").rglob("*.md")}
    return pages | {file.as_posix() for file in files if not {"__pycache__", ".DS_Store"} & set(file.parts)}


def copy_sources(folder: Path) -> None:
    """What a wheel is built of, into a new folder: builds leave their files there, not in the repository."""
    shutil.copytree(ROOT / "torchfleet", folder / "torchfleet", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)


def problems(wheel: Path, expected: set[str]) -> list[str]:
    """What is wrong with the wheel, a line each; `expected` are the files of the package."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        about = {name.partition(".dist-info/")[2]: name for name in names if ".dist-info/" in name}
        metadata, points = (
            archive.read(about[name]).decode() if name in about else "" for name in ("METADATA", "entry_points.txt")
        )
    packed = {name.partition(".data/data/")[2] or name for name in names - set(about.values())}
    found = [
        f"lacks {name}: data files are named in pyproject.toml, package-data" for name in sorted(expected - packed)
    ]
    found += [f"has {name}, which is no file of the package" for name in sorted(packed - expected)]
    found += [f"has no command {line!r}" for line in COMMANDS if line not in points.splitlines()]
    found += [f"has no {name}" for name in ("licenses/LICENSE", "METADATA", "RECORD") if name not in about]
    found += [
        f"says nothing of {key}" for key in ("Requires-Python", "License-Expression") if f"\n{key}: " not in metadata
    ]
    if "torchfleet/py.typed" not in packed:
        found.append("has no torchfleet/py.typed: type checkers would not read its annotations")
    return found


def main(wheels: list[str]) -> int:
    """Prints what is wrong; returns the exit status."""
    if not wheels:
        print("give the wheels to look into")
        return 2
    found = [f"{wheel} {problem}" for wheel in wheels for problem in problems(Path(wheel), package_files())]
    print("\n".join(found) or f"{len(wheels)} in order: {len(package_files())} files of the package, no others")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
