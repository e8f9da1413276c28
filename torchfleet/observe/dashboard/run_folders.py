"""Finds the available runs: folders that have a history.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.observe.watch.history import NAME

_MOST_RUNS = 500


class RunFolders:
    """Runs by name. A client's name is only looked up among the names found on the disk.

    One folder that contains runs, such as --log_dir, gives all of them, the newest first. Several folders are the
    machines of one job: each is a run, or contains runs, of which the newest is used. Raises FleetError if a folder
    is neither.
    """

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._parent: Path | None = None
        self._fixed: dict[str, list[Path]] = {}
        given = [Path(folder) for folder in folders]
        for folder in given:
            if not _is_run(folder) and not _runs_below(folder):
                raise FleetError(_nothing_in(folder))
        if len(given) == 1 and not _is_run(given[0]):
            self._parent = given[0]
        else:
            found = [folder if _is_run(folder) else next(iter(_runs_below(folder).values())) for folder in given]
            self._fixed = {found[0].resolve().name: found}

    def names(self) -> list[str]:
        """The newest first."""
        return list(self._fixed) if self._parent is None else list(_runs_below(self._parent))

    def folders(self, name: str) -> list[Path] | None:
        """The folders of a run, one of every machine; None if there is no run of this name."""
        if self._parent is None:
            return self._fixed.get(name)
        found = _runs_below(self._parent).get(name)
        return None if found is None else [found]


def _is_run(folder: Path) -> bool:
    return (folder / NAME).is_file()


def _runs_below(folder: Path) -> dict[str, Path]:
    """Names begin with the time of the start, so that their order is that of time."""
    try:
        found = [path for path in folder.iterdir() if not path.is_symlink() and _is_run(path)]
    except OSError:
        return {}
    return {path.name: path for path in sorted(found, key=lambda path: path.name, reverse=True)[:_MOST_RUNS]}


def _nothing_in(folder: Path) -> str:
    what = f"no {NAME} in it or in the folders below it" if folder.is_dir() else "no such folder"
    return (
        f"{folder}: {what}. Expected the folder of a run, such as log/latest, or the --log_dir of fleetrun, which "
        "holds them."
    )
