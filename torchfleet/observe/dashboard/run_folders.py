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

    def __init__(self, folders: Sequence[str | Path], compared: str | Path | None = None) -> None:
        """`compared`: the folder of another run, or one that contains runs, of which the newest is used."""
        self._compared = None if compared is None else _newest(Path(compared))
        self._parent: Path | None = None
        self._fixed: dict[str, list[Path]] = {}
        given = [Path(folder) for folder in folders]
        for folder in given:
            _newest(folder)
        if len(given) == 1 and not _is_run(given[0]):
            self._parent = given[0]
        else:
            found = list(map(_newest, given))
            self._fixed = {found[0].resolve().name: found}

    def names(self) -> list[str]:
        """The newest first."""
        return list(self._fixed) if self._parent is None else list(_runs_below(self._parent))

    @property
    def compared(self) -> str:
        """The name of the run to compare others with; empty if there is none."""
        if self._compared is None:
            return ""
        name = self._compared.resolve().name
        own = self.folders_of(name)
        is_same = own is not None and own[0].resolve() == self._compared.resolve()
        return name if own is None or is_same else f"{self._compared.resolve().parent.name}/{name}"

    def folders(self, name: str) -> list[Path] | None:
        """The folders of a run, one of every machine; None if there is no run of this name."""
        if self._compared is not None and name == self.compared:
            return [self._compared]
        return self.folders_of(name)

    def folders_of(self, name: str) -> list[Path] | None:
        """`folders`, without the run that others are compared with."""
        if self._parent is None:
            return self._fixed.get(name)
        found = _runs_below(self._parent).get(name)
        return None if found is None else [found]


def _newest(folder: Path) -> Path:
    """The folder, if it is a run, or the newest run in it. Raises FleetError if it is neither."""
    found = folder if _is_run(folder) else next(iter(_runs_below(folder).values()), None)
    if found is None:
        raise FleetError(_nothing_in(folder))
    return found


def _is_run(folder: Path) -> bool:
    return (folder / NAME).is_file()


def _runs_below(folder: Path) -> dict[str, Path]:
    """The runs in a folder by name, the newest first: names begin with the time of the start."""
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
