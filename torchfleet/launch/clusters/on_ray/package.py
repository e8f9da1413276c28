"""The package that a job sends to the nodes of Ray: a folder with the files of sent_files, and nothing else."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.base.own_folders import own_folder
from torchfleet.launch.clusters.script_imports import OWN, Sources
from torchfleet.launch.clusters.sent_files import Destination, SentFile, described_files, sent_files

MOST_BYTES = 500 << 20  # of a package of Ray
PACKAGE = Destination(
    name="the package for Ray",
    readers="Every user of the cluster can read a package",
    instead="Put it where only the nodes can read it",
    reader="processes",
    most_files=10_000,
    alternative="put them on storage that all nodes reach",
)
_INSTALLED = {"site-packages", "dist-packages", ".venv", "venv", OWN}  # folders of packages that the nodes have
_OTHERWISE = "start the job with `ray job submit --working-dir`, which sends a folder as it is"


def package_files(
    folder: Path, script: str | None, module: str | None, named: Sequence[str], key_dir: str | None
) -> tuple[list[SentFile], dict[str, str]]:
    """Return the files of the job that runs this script or module, and those that a source names but that are not sent.
    With neither, return the sources that this process has loaded from the folder: a function may use all of them.

    Raises RoleError as sent_files does, and if Ray would refuse the package for its size.
    """
    sources = Sources(folder, _OTHERWISE)
    if script is not None:
        scripts = [Path(os.path.abspath(script))]
    else:
        scripts = _loaded(folder) if module is None else list(sources.modules(module))
    sources.follow(scripts)
    files, left = sent_files(sources, scripts if script is not None else (), named, PACKAGE, key_dir)
    _check_size(files, folder)
    return files, left


@contextlib.contextmanager
def package(folder: Path, files: Sequence[SentFile]) -> Iterator[Path]:
    """Yield a private folder with copies of these files, at their places below `folder`. It is removed at the end."""
    with own_folder("package") as made:
        for file in files:
            copy = made / file.place
            copy.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copy(file.path, copy)
            except OSError as error:
                raise RoleError(f"cannot copy {file.path}, which is sent with the script: {error}") from None
        yield made


def tell(files: Sequence[SentFile], left: dict[str, str], say: Callable[[str], None]) -> None:
    for line in described_files(files, left, PACKAGE):
        say(f"[fleetrun] {line}")


def _loaded(folder: Path) -> list[Path]:
    """The sources below a folder from which this process has loaded modules, without installed packages."""
    names = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    paths = sorted({Path(os.path.abspath(name)) for name in names if isinstance(name, str) and name.endswith(".py")})
    below = [path for path in paths if path.is_relative_to(folder) and path.is_file()]
    return [path for path in below if not _INSTALLED & set(path.relative_to(folder).parts)]


def _check_size(files: Sequence[SentFile], folder: Path) -> None:
    sizes = {file.place: file.path.stat().st_size for file in files}
    total = sum(sizes.values())
    if total > MOST_BYTES:
        largest = ", ".join(f"{place} ({sizes[place]:,})" for place in sorted(sizes, key=sizes.__getitem__)[:-4:-1])
        raise RoleError(
            f"the files of {folder} that the job needs have {total:,} bytes, and Ray takes {MOST_BYTES:,}. The "
            f"largest: {largest}. Keep data and models on storage that all nodes reach"
        )
