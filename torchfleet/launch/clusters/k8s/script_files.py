"""The files of a training script for a ConfigMap: small text files that all pods of the job can read."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.k8s.script_imports import Sources
from torchfleet.launch.clusters.k8s.secret_signs import secret_sign

MOST_BYTES = 1 << 20  # of a ConfigMap
_SPARE = 1 << 14  # for names, labels and paths
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_MOST_FILES = 512  # a folder with more files was probably not meant
SCRIPT, IMPORTED, NAMED = "the script", "imported", "--files"


@dataclass(frozen=True)
class ScriptFile:
    """A file of the script's folder: its key in the ConfigMap, its path below the folder, its text."""

    key: str
    path: str
    text: str
    origin: str = SCRIPT  # why it is sent
    sign: str | None = None  # why it looks like a key or credentials, although the user named it
    unknown: tuple[int, ...] = ()  # lines that import a module whose name is not written out


def script_files(
    script: Path, is_alone: bool = False, named: Sequence[str] = ()
) -> tuple[list[ScriptFile], dict[str, str]]:
    """Return the script, the modules of its folder that it imports (not if `is_alone`) and the files that the user
    named; and the paths of files that a source names but that are not sent, each with that source.

    Raises RoleError if a file looks like a key or credentials, unless the user named this very file, and if the files
    do not fit into a ConfigMap.
    """
    folder = script.parent
    sources = Sources(folder, [script]) if is_alone else Sources(folder).follow(script)
    origins = dict.fromkeys(sources.files, IMPORTED) | {script: SCRIPT}
    explicit = {_below(text, folder) for text in named}
    for path in sorted(explicit):
        for found in _all_files(path) if path.is_dir() else [path]:
            origins.setdefault(found, NAMED)
    files = [
        replace(_read(path, folder, origin, path in explicit), unknown=tuple(sources.unknown.get(path, ())))
        for path, origin in origins.items()
    ]
    _check_size(files, script)
    left = {path: source for path, source in sources.mentioned.items() if path not in origins}
    return files, {str(path.relative_to(folder)): str(source.relative_to(folder)) for path, source in left.items()}


def _below(text: str, folder: Path) -> Path:
    """Return a path of --files. It must be below the script's folder: pods have it at the same place below theirs."""
    path = Path(os.path.abspath(text))
    if not path.exists():
        raise RoleError(f"--files {text}: expected a file or a folder, found nothing at {path}")
    if not path.is_relative_to(folder):
        raise RoleError(f"--files {text}: expected a path below the script's folder, {folder}: copy it there")
    return path


def _all_files(folder: Path) -> list[Path]:
    """All files below a folder, without hidden ones and what Python has compiled."""
    found: list[Path] = []
    waiting = [folder]
    while waiting:
        for path in sorted(waiting.pop().iterdir()):
            if path.name.startswith(".") or path.name == "__pycache__":
                continue
            if path.is_dir() and not path.is_symlink():
                waiting.append(path)
            elif path.is_file():
                found.append(path)
        if len(found) > _MOST_FILES:
            raise RoleError(
                f"--files {folder}: found more than {_MOST_FILES} files there. Name those that are needed, or build an "
                "image: --in_image"
            )
    return found


def _target(path: Path, folder: Path, origin: str) -> Path:
    """Return the file that a path leads to. Raises RoleError if --files, or a folder that it names, has a link that
    leads out of the script's folder: the link may have been made by others, or may have been forgotten."""
    target = Path(os.path.realpath(path))
    if origin == NAMED and not target.is_relative_to(os.path.realpath(folder)):
        raise RoleError(
            f"--files: {path} is a link to {target}, which is not below the script's folder, {folder}: copy the file "
            "there"
        )
    return target


def _read(path: Path, folder: Path, origin: str, is_explicit: bool) -> ScriptFile:
    target = _target(path, folder, origin)
    place = PurePosixPath(path.relative_to(folder))
    key = "__".join(place.parts)
    if not _KEY.fullmatch(key) or len(key) > 253:
        raise RoleError(
            f"{path}: a ConfigMap takes letters, digits, -, _ and . in names of files; rename it, or build an image "
            "with the script (--in_image)"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RoleError(f"{path} ({origin}) is not UTF-8, and a ConfigMap holds text: build an image with it") from None
    except OSError as error:
        raise RoleError(f"cannot read {path}, which is sent with the script: {error}") from None
    sign = secret_sign(path.name, text) or secret_sign(target.name, "")
    if sign is not None and not is_explicit:
        raise RoleError(
            f"{path} ({origin}) looks like a key or credentials: {sign}. Everybody who can read the namespace can read "
            f"a ConfigMap. Put it into a Secret of your own (--env_secret); if it is none, name it: --files {path}"
        )
    return ScriptFile(key, str(place), text, origin, sign)


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
            f"the script and its files have {total:,} bytes, and a ConfigMap holds {MOST_BYTES:,}. The largest: "
            f"{largest}. Build an image with the script in it (FROM torchfleet, COPY ...) and give --in_image"
        )
