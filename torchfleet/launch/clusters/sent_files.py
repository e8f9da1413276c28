"""Decides which files leave this machine with a job, for every launcher that sends files, with a reason for each file.

They are the script, the modules of its folder that it imports, and what --files names. Keys are refused.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.script_imports import Sources
from torchfleet.launch.clusters.secret_signs import MOST_TEXT, key_sign, secret_sign

SCRIPT, IMPORTED, NAMED = "the script", "imported", "--files"


@dataclass(frozen=True)
class Destination:
    """Where files go, and what a user should know about it."""

    name: str  # of the object that holds the files
    readers: str  # a sentence: who can read it
    instead: str  # a sentence: what to do with a secret
    reader: str  # who needs the files
    most_files: int  # in a folder that --files names: a larger folder was probably not meant
    alternative: str  # what a user can do instead of naming files


@dataclass(frozen=True)
class SentFile:
    """A file that leaves this machine."""

    path: Path
    place: str  # its path below the script's folder
    origin: str = SCRIPT  # why it is sent
    sign: str | None = None  # why it looks like credentials, although the user named it
    unknown: tuple[int, ...] = ()  # lines that import a module whose name is not a literal


def sent_files(
    sources: Sources, scripts: Sequence[Path], named: Sequence[str], to: Destination, key_dir: str | None = None
) -> tuple[list[SentFile], dict[str, str]]:
    """Return the sources and the files that the user named. Also return the paths of files that a source names but that
    are not sent, each with that source.

    Raises RoleError for keys, for files of `key_dir`, and for a file that looks like credentials unless the user named
    the file itself.
    """
    folder = sources.folder
    origins = dict.fromkeys((*sources.files, *sources.compiled), IMPORTED) | dict.fromkeys(scripts, SCRIPT)
    explicit = {_below(text, folder) for text in named}
    for path in sorted(explicit):
        for found in _all_files(path, to) if path.is_dir() else [path]:
            origins.setdefault(found, NAMED)
    files = []
    for path, origin in origins.items():
        sign = _checked_sign(path, _target(path, folder, origin), origin, path in explicit, to, key_dir)
        unknown = tuple(sources.unknown.get(path, ()))
        files.append(SentFile(path, path.relative_to(folder).as_posix(), origin, sign, unknown))
    left = {path: source for path, source in sources.mentioned.items() if path not in origins}
    return files, {str(path.relative_to(folder)): str(source.relative_to(folder)) for path, source in left.items()}


def described_files(files: Sequence[SentFile], left: dict[str, str], to: Destination) -> list[str]:
    """Return lines that list every file with the reason why it is sent, and what may be missing."""
    if not files:
        return []
    sent = ", ".join(file.place if file.origin == SCRIPT else f"{file.place} ({file.origin})" for file in files)
    lines = [f"{to.name} has {len(files)} file{'s' * (len(files) > 1)}: {sent}"]
    lines += [
        f"{file.place} looks like a key or credentials ({file.sign}), and is sent because --files names it. "
        f"{to.readers}"
        for file in files
        if file.sign
    ]
    lines += [
        f"{file.place}, line {', '.join(map(str, file.unknown))}: a module is imported by a computed name. If it is in "
        "the script's folder, add it with --files."
        for file in files
        if file.unknown
    ]
    return lines + [
        f"{source} mentions the file {path}, which is not sent with the job. If {to.reader} need it, add it with "
        "--files."
        for path, source in left.items()
    ]


def _below(text: str, folder: Path) -> Path:
    """Return a path of --files. It must be below the script's folder: it has the same place in the job's folder."""
    path = Path(os.path.abspath(text))
    if not path.exists():
        raise RoleError(f"--files {text}: expected a file or a folder, found nothing at {path}")
    if not path.is_relative_to(folder):
        raise RoleError(f"--files {text}: expected a path below the script's folder, {folder}: copy it there")
    return path


def _all_files(folder: Path, to: Destination) -> list[Path]:
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
        if len(found) > to.most_files:
            raise RoleError(
                f"--files {folder}: found more than {to.most_files:,} files there. Name those that are needed, or "
                f"{to.alternative}"
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


def _checked_sign(
    path: Path, target: Path, origin: str, is_explicit: bool, to: Destination, key_dir: str | None
) -> str | None:
    """Return why a file that the user named looks like credentials, None for other files. Raises RoleError."""
    if key_dir is not None and target.is_relative_to(os.path.realpath(key_dir)):
        raise RoleError(f"{path} ({origin}) is in the folder of keys, --key_dir {key_dir}, and keys are never sent")
    text = _beginning(path)
    key = key_sign(path.name, text) or key_sign(target.name, "")
    if key is not None:
        raise RoleError(
            f"{path} ({origin}) is a key: {key}. Keys are never sent. {to.instead}, and keep it out of the script's "
            "folder"
        )
    sign = secret_sign(path.name, text) or secret_sign(target.name, "")
    if sign is not None and not is_explicit:
        raise RoleError(
            f"{path} ({origin}) looks like a key or credentials: {sign}. {to.readers}. {to.instead}; "
            f"if it holds no secret, name it: --files {path}"
        )
    return sign


def _beginning(path: Path) -> str:
    """Return the part of a file that is searched: its beginning, whatever the encoding."""
    try:
        with path.open("rb") as file:
            return file.read(MOST_TEXT).decode("utf-8", "replace")
    except OSError as error:
        raise RoleError(f"cannot read {path}, which is sent with the script: {error}") from None
