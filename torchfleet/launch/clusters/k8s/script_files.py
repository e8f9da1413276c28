"""The files of a training script for a ConfigMap: small text files that all pods of the job can read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torchfleet.base.errors import RoleError
from torchfleet.launch.clusters.script_imports import Sources
from torchfleet.launch.clusters.sent_files import Destination, SentFile, sent_files

MOST_BYTES = 1 << 20  # of a ConfigMap
_SPARE = 1 << 14  # for names, labels and paths
_KEY = re.compile(r"[-._a-zA-Z0-9]+")
_CHOSEN = "send chosen files only: --script_alone with --files"
CONFIG_MAP = Destination(
    name="the ConfigMap",
    readers="Every user who can read the namespace can read a ConfigMap",
    instead="Put it into a Secret of your own (--env_secret)",
    reader="pods",
    most_files=512,
    alternative="build an image: --in_image",
)


@dataclass(frozen=True)
class ScriptFile:
    """A file of the script's folder: its key in the ConfigMap, its path below the folder, its text."""

    key: str
    path: str
    text: str
    sign: str | None = None  # why it looks like a key or credentials, although the user named it


def script_files(
    script: Path, is_alone: bool = False, named: Sequence[str] = ()
) -> tuple[list[SentFile], dict[str, str]]:
    """Return the script, the modules of its folder that it imports (not if `is_alone`) and the files that the user
    named. Also return the paths that a source file names but that are not sent, each with that source file.

    Raises RoleError as sent_files does, and if the script imports a compiled module.
    """
    sources = Sources(script.parent, _CHOSEN)
    if is_alone:
        sources.files.append(script)
    else:
        sources.follow([script])
    if sources.compiled:
        raise RoleError(
            f"the script imports {sources.compiled[0]}, which is compiled and cannot be sent as text: build an image "
            f"with it and give --in_image, or {_CHOSEN}"
        )
    return sent_files(sources, [script], named, CONFIG_MAP)


def config_map_files(files: Sequence[SentFile]) -> list[ScriptFile]:
    """Return the files as a ConfigMap holds them. Raises RoleError for a file that it cannot hold, for two files with
    the same key, and if all of them together are too large.
    """
    made = [ScriptFile(_key(file), file.place, _text(file), file.sign) for file in files]
    _check_size(made)
    return made


def _key(file: SentFile) -> str:
    key = "__".join(PurePosixPath(file.place).parts)
    if not _KEY.fullmatch(key) or len(key) > 253:
        raise RoleError(
            f"{file.path}: a ConfigMap takes letters, digits, -, _ and . in names of files; rename it, or build an "
            "image with the script (--in_image)"
        )
    return key


def _text(file: SentFile) -> str:
    try:
        return file.path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise RoleError(
            f"{file.path} ({file.origin}) is not UTF-8, and a ConfigMap holds text: build an image with it"
        ) from None
    except OSError as error:
        raise RoleError(f"cannot read {file.path}, which is sent with the script: {error}") from None


def _check_size(files: Sequence[ScriptFile]) -> None:
    keys = [file.key for file in files]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise RoleError(f"two files would be called {twice} in the ConfigMap: rename one")
    sizes = {file.path: len(file.text.encode()) for file in files}
    total = sum(sizes.values())
    if total > MOST_BYTES - _SPARE:
        largest = ", ".join(f"{path} ({sizes[path]:,})" for path in sorted(sizes, key=sizes.__getitem__)[:-4:-1])
        raise RoleError(
            f"the script and its files have {total:,} bytes, and a ConfigMap holds {MOST_BYTES:,}. The largest: "
            f"{largest}. Build an image with the script in it (FROM torchfleet, COPY ...) and give --in_image"
        )
