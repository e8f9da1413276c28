"""The files of a training script for a ConfigMap: small text files that all pods of the job can read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torchfleet.base.errors import RoleError

MOST_BYTES = 1 << 20  # of a ConfigMap
_SPARE = 1 << 14  # for names, labels and paths
KINDS = (".py", ".json", ".yaml", ".yml", ".toml", ".txt", ".cfg", ".ini", ".sh", ".sql", ".proto")
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_MOST_FILES = 512  # a folder with more files is probably not a script's folder
_SKIPPED = ("__pycache__", "log", "node_modules")


@dataclass(frozen=True)
class ScriptFile:
    """A file of the script's folder: its key in the ConfigMap, its path below the folder, its text."""

    key: str
    path: str
    text: str


def script_files(script: Path, is_alone: bool = False) -> tuple[list[ScriptFile], list[str]]:
    """Return the script with the source and settings files of its folder, chosen by suffix, and the paths of the files
    that were left out. Hidden files are left out and not reported.

    Raises RoleError if the files do not fit into a ConfigMap.
    """
    paths = [script] if is_alone else sorted(_below(script.parent))
    taken = [path for path in paths if path.suffix in KINDS or path == script]
    others = [str(path.relative_to(script.parent)) for path in paths if path not in taken]
    files = [_read(path, script.parent) for path in taken]
    _check_size(files, script)
    return files, others


def _below(folder: Path) -> list[Path]:
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.name.startswith(".") or path.name in _SKIPPED:
                continue
            if path.is_dir() and not path.is_symlink():
                waiting.append(path)
            elif path.is_file():
                found.append(path)
        if len(found) > _MOST_FILES:
            raise RoleError(
                f"{folder} has more than {_MOST_FILES} files, and all of its sources would travel with the script. Put "
                "the script into a folder of its own, give --script_alone, or build an image: --in_image"
            )
    return found


def _read(path: Path, folder: Path) -> ScriptFile:
    place = PurePosixPath(path.relative_to(folder))
    key = "__".join(place.parts)
    if not _KEY.fullmatch(key) or len(key) > 253:
        raise RoleError(
            f"{path}: a ConfigMap takes letters, digits, -, _ and . in names of files; rename it, or build an image "
            "with the script (--in_image)"
        )
    try:
        return ScriptFile(key, str(place), path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise RoleError(f"{path} travels with the script, and is not UTF-8: remove it, or build an image") from None
    except OSError as error:
        raise RoleError(f"cannot read {path}, which travels with the script: {error}") from None


def _check_size(files: list[ScriptFile], script: Path) -> None:
    keys = [file.key for file in files]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RoleError(f"two files of {script.parent} would be called {twice} in the ConfigMap: rename one")
    sizes = {file.path: len(file.text.encode()) for file in files}
    total = sum(sizes.values())
    if total > MOST_BYTES - _SPARE:
        largest = ", ".join(f"{path} ({sizes[path]:,})" for path in sorted(sizes, key=sizes.__getitem__)[:-4:-1])
        raise RoleError(
            f"the script and its folder have {total:,} bytes, and a ConfigMap holds {MOST_BYTES:,}. The largest: "
            f"{largest}. Build an image with the script in it (FROM torchfleet, COPY ...) and give --in_image; or send "
            "the script without its folder: --script_alone"
        )
