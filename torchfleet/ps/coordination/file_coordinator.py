"""The coordinator of jobs on one machine: files in a folder that fleetrun makes.

Each term is one file, which can be created only once; the first file has number 0, whatever its term. The replica that
creates the file of the next term has changed the view. There is no lock, so a process that is suspended in the middle
does not block the others.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.base.ownership import check_own
from torchfleet.ps.coordination.view import View, pack_view, unpack_view


class FileCoordinator:
    """A Coordinator for processes of one machine and one user."""

    def __init__(self, folder: str | Path) -> None:
        """Raises SecurityError if other users can write to the folder, CoordinatorUnreachable if it does not exist."""
        self._folder = Path(folder)
        with self._errors():
            check_own(self._folder)

    def read(self, shard: int) -> View | None:
        with self._errors():
            names = (path.name.partition(".") for path in self._folder.iterdir())
            terms = [int(term) for name, _, term in names if name == f"shard-{shard}" and term.isdigit()]
            if not terms:
                return None
            path = self._path(shard, max(terms))
            return unpack_view(path.read_bytes(), str(path))

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        assert before is None or after.term == before.term + 1
        current = self.read(shard)
        if current != before:
            return current == after
        with self._errors(), tempfile.NamedTemporaryFile(dir=self._folder, prefix="new-") as written:
            written.write(pack_view(after))
            written.flush()
            try:
                os.link(written.name, self._path(shard, after.term if before else 0))
            except FileExistsError:
                return self.read(shard) == after
            return True

    def renew(self) -> None:
        pass

    def _path(self, shard: int, term: int) -> Path:
        return self._folder / f"shard-{shard}.{term}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CoordinatorUnreachable(
                f"cannot read or write {self._folder}, the folder in which fleetrun records the primary of each shard: "
                f"{error}"
            ) from None
