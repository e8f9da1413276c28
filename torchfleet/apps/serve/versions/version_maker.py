"""Decides what the next version contains and when it is published. Nothing new is published while a user has gone back
to an older version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torchfleet.apps.serve.versions.level_file import Level
from torchfleet.apps.serve.versions.level_stack import LevelStack
from torchfleet.apps.serve.versions.saved_chain import dense_tables, layout
from torchfleet.apps.serve.versions.version_description import DescribedModel, Network
from torchfleet.apps.serve.versions.version_store import Status, VersionStore, Wanted, write_wanted
from torchfleet.ps.checkpoint.manifest import Manifest
from torchfleet.ps.tables.settings.spec import Floats


class VersionMaker:
    """Levels, network and serving.json of the newest version.

    Methods raise OSError if something cannot be written: what was published stays, and nothing more is published until
    `take` has succeeded again.
    """

    def __init__(
        self, folder: Path, keep: int, spacing: float, say: Callable[[str], None], keeps_gone: bool = False
    ) -> None:
        """`keep`, `spacing`: as in VersionStore. `keeps_gone`: as in LevelStack."""
        self.store, self._say = VersionStore(folder, keep, spacing), say
        self.stack = LevelStack(folder, self.store.next_file(), keeps_gone)
        self.manifest: Manifest | None = None  # of the save that describes the tables
        self.created = 0.0
        self._source = ""
        self._network: Network | None = None
        self._model: DescribedModel | None = None
        self._model_body = b""  # its contents
        self._is_whole = False  # the rows of the stack and the network belong together
        self._is_unpublished = False

    @property
    def status(self) -> Status:
        return self.store.status

    def take(
        self,
        levels: Sequence[Level],
        replaces: bool,
        network: Floats | None,
        created: float,
        source: str,
        model: bytes | None = None,
    ) -> None:
        """Put these levels, newest first, on top of the stack, or (`replaces`) in place of its levels. `network`: the
        values of all dense tables, if they have changed. `model`: a serving.json; None: as before. All of it becomes
        one version.
        """
        assert self.manifest is not None
        self._is_whole = False
        if replaces:
            self.stack.reset(levels)
        else:
            for level in reversed(levels):
                self.stack.add(level)
        if network is not None:
            parameters = layout(dense_tables(self.manifest))
            self._network = self.store.write_network(self.store.next_file(), parameters, network)
        if model is not None and (self._model is None or model != self._model_body):
            self._model, self._model_body = self.store.write_model(self.store.next_file(), model), model
        self.created, self._source = created, source
        self._is_whole = self._is_unpublished = True

    def settle(self) -> None:
        """Merge the levels that are due."""
        self._is_unpublished |= self.stack.settle()

    def publish(self) -> None:
        """Publish the newest contents, or the older version that a user asked for; remove files that are not needed."""
        status, pin = self.status, self.store.wanted().pin
        if pin and pin != status.pinned:
            self._go_back(pin)
        elif not pin and status.pinned:
            status.pinned, self._is_unpublished = 0, True
            self._say("torchfleet serve: the newest version is served again")
        if not status.pinned and self._is_unpublished and self._is_whole:
            self._publish_newest()
        if not self.stack.is_merging:
            self.store.remove_unused(self._files())

    def trouble(self, text: str) -> None:
        """Report once why there are no newer versions; "": nothing is wrong."""
        if text and text[:100] != self.status.trouble[:100]:
            self._say(f"torchfleet serve: {text}")
        self.status.trouble = text

    def close(self) -> None:
        self.stack.close()

    def _publish_newest(self) -> None:
        assert self.manifest is not None
        assert self._network is not None
        tables = {table.name: table.dim for table in self.manifest.tables if not table.is_dense}
        made = self.store.publish(
            self.stack.levels, tables, self._network, self.created, self._source, model=self._model
        )
        self.status.state, self.status.source = "following", made.source
        self._is_unpublished = False

    def _go_back(self, number: int) -> None:
        found, current = self.store.kept(number), self.store.current
        if found is not None:
            source = f"version {number}: {found.source}"
            self.store.publish(found.levels, found.tables, found.network, found.created, source, number, found.model)
            text = f"went back to version {number}, of {found.source}"
        elif current is not None and number in (current.number, current.restored):
            text = f"version {number} was asked for: it is current"
        else:  # it was dropped after the request was checked
            if self.store.wanted().pin == number:  # a newer request stays
                write_wanted(self.store.folder, Wanted(self.status.pinned))
            self._say(
                f"torchfleet serve: cannot go back to version {number}: only versions {self.store.numbers} are kept; "
                "the request is dropped"
            )
            return
        self.status.pinned = number
        self._say(f"torchfleet serve: {text}")

    def _files(self) -> set[str]:
        others = {file.file for file in (self._network, self._model) if file is not None}
        return others | {level.file for level in self.stack.levels}
