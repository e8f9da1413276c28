"""The writer of versions: takes over what a job saves, or what its servers change, beside the processes that serve."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from torchfleet.apps.serve.versions.level_file import Level
from torchfleet.apps.serve.versions.pushed_rows import PushedRows
from torchfleet.apps.serve.versions.saved_chain import News, SavedChain
from torchfleet.apps.serve.versions.version_maker import VersionMaker
from torchfleet.apps.serve.versions.version_store import VersionStore
from torchfleet.base.errors import CheckpointError, FleetError, ServerRestarted
from torchfleet.base.monitor.notices import tell
from torchfleet.ps.net.keys import KeyFolder
from torchfleet.ps.net.private_jobs import way_in
from torchfleet.ps.net.wire import Role
from torchfleet.ps.worker.client.connection import Patience
from torchfleet.ps.worker.client.subscriber import Subscriber

RETRY = 5.0  # seconds until a save that could not be read, or a version that could not be written, is tried again
FILES_AFTER = 10.0  # seconds without an answer of the servers, after which newer saves are taken over
REST = 40.0  # the pause before the next request, in times that the last replies took: training comes first
LONGEST_REST = 1.2  # seconds
LOOKS_AT_SAVES = 5  # looks for changes on servers for each look for a new save, which brings their graph
_PATIENCE = Patience(timeout=3.0, retries=1)


class FollowSettings(msgspec.Struct, frozen=True):
    """What a follower follows, and how."""

    model: str  # the folder, or URL, of the saves
    follow: bool = True  # False: take over what is there, and end
    servers: list[str] = []  # addresses of the servers to follow; empty: files alone
    key_dir: str | None = None
    base: str = ""  # a save whose rows are elsewhere: only later changes are taken over; "": all rows are taken over
    base_time: float = 0.0  # of that save's link: another run may have saved under the same name
    every: float = 0.2  # seconds between two looks
    keep: int = 8  # versions that one can go back to
    spacing: float = 60.0  # seconds between two of these
    unread: float = 3.0  # seconds without a reader after which the follower ends


class Follower:
    """Makes a new version at each call of `step` if anything has changed. Belongs to one thread."""

    def __init__(self, folder: Path, settings: FollowSettings, say: Callable[[str], None] = tell) -> None:
        self._settings, self._say = settings, say
        self.maker = VersionMaker(folder, settings.keep, settings.spacing, say, bool(settings.base))
        self._chain = SavedChain(settings.model, settings.base, settings.base_time)
        self._retry_at, self._last_gap = 0.0, ""
        self._look_at_saves, self._lacks_model = 0.0, ""
        self._pushed: PushedRows | None = None
        self._client: Subscriber | None = None
        self._answered = time.monotonic()  # when the servers last answered

    @property
    def store(self) -> VersionStore:
        return self.maker.store

    @property
    def pause(self) -> float:
        """Seconds from the beginning of a step to the beginning of the next step."""
        if self._pushed is None:
            return self._settings.every
        return max(self._settings.every, min(LONGEST_REST, REST * self._pushed.answer_seconds))

    def step(self) -> None:
        """Look once for changes, and take them over. An error is reported, and the current version stays."""
        try:
            if time.monotonic() >= self._retry_at:
                if self._settings.servers and self.maker.manifest is not None:
                    self._follow_servers()
                else:
                    self._follow_files()
                self.maker.settle()
            self.maker.publish()
        except OSError as error:
            if not self.store.folder.exists():
                return  # the processes that read it have ended, and removed it
            self.store.status.num_disk_full += 1
            self.maker.trouble(f"a new version cannot be written to {self.store.folder}: {error}. The old one stays.")
            if self._pushed is not None:
                self._pushed.is_lost = True
            self._chain.look_again()
            self._retry_at = time.monotonic() + RETRY
        self.store.write_status()

    def close(self) -> None:
        """Stop. Versions stay where they are."""
        self.maker.close()
        self._disconnect()

    # Files

    def _follow_files(self) -> None:
        try:
            news = self._chain.news()
            if news is not None:
                self._take(news)
            self.maker.trouble("")
        except CheckpointError as error:
            self._retry_at = time.monotonic() + RETRY
            self._chain.look_again()
            rest = "" if self.store.current is None else " The previous version stays."
            self.maker.trouble(f"{str(error).removesuffix('.')}.{rest}")

    def _take(self, news: News) -> None:
        """Apply saves one after the other. Those before a damaged one are taken over, then CheckpointError is
        raised.
        """
        if news.gap:
            self._note_gap(news.gap)
        for link in news.links:
            try:
                level = self._chain.write(news, link, self.maker.stack)
                network, model = self._chain.network(news, link), self._chain.model(link)
            except CheckpointError as error:
                if self._chain.is_replaced:  # a save made meanwhile has replaced it: that one is read next
                    return
                self._note_gap(f"save {link.number} cannot be applied: {error}")
                raise
            created = news.created if link is news.links[-1] else link.time
            source = f"save {link.number} of {self._chain.storage.path}"
            self.maker.manifest = news.manifest
            self.maker.take([level], news.is_whole and link is news.links[0], network, created, source, model)
            self._chain.taken = link

    def _note_gap(self, text: str) -> None:
        if text != self._last_gap:  # once, however often it is tried
            self._last_gap = text
            self.store.status.num_gaps += 1
            self._say(f"torchfleet serve: gap in the chain of saves: {text}")

    # Servers

    def _follow_servers(self) -> None:
        try:
            try:
                self._take_changes()
            except ServerRestarted:  # a connection belongs to one process of a server
                self._disconnect()
                self._take_changes()
            self._answered = time.monotonic()
            self.maker.trouble(self._lacks_model)
        except FleetError as error:
            self._retry_at = time.monotonic() + RETRY / 5
            self.maker.trouble(f"the servers cannot be followed: {error}")
            if time.monotonic() - self._answered > FILES_AFTER:
                self._follow_saves_meanwhile()

    def _take_changes(self) -> None:
        """Take over changed rows and network up to one moment of each server, or all rows if a subscription is lost."""
        pushed, stack = self._subscription(), self.maker.stack
        base: list[Level] | None = None
        found = None if pushed.is_lost else pushed.changes(stack)
        if found is None:
            self.store.status.num_resyncs += 1
            self._say("torchfleet serve: reading all rows from the servers")
            base = pushed.read_all(stack)
            found = pushed.changes(stack)
        if found is None:
            raise ServerRestarted("a server was restarted while its rows were read")
        levels, is_network_new = found
        model = self._newest_model()
        if base is not None or levels or is_network_new or model is not None:
            network = pushed.network() if base is not None or is_network_new else None
            self.maker.take([*levels, *(base or [])], base is not None, network, pushed.created, "the servers", model)

    def _newest_model(self) -> bytes | None:
        """The serving.json of a save that was made since the last look: servers have no graph. None: as before."""
        now = time.monotonic()
        if now < self._look_at_saves:
            return None
        self._look_at_saves = now + self._settings.every * LOOKS_AT_SAVES
        try:
            found = self._chain.newest_model()
            self._lacks_model = ""
            return found
        except CheckpointError as error:
            self._lacks_model = f"the graph of the newest save cannot be read: {error}"
            return None

    def _subscription(self) -> PushedRows:
        assert self.maker.manifest is not None
        if self._pushed is None:
            reached, key_dir = way_in(self._settings.servers, self._settings.key_dir)
            keys = KeyFolder(key_dir) if key_dir else None
            self._client = Subscriber.connect(reached, keys, role=Role.WORKER, patience=_PATIENCE)
            self._pushed = PushedRows(self._client, self.maker.manifest)
        return self._pushed

    def _disconnect(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = self._pushed = None

    def _follow_saves_meanwhile(self) -> None:
        """Take over saves that are newer than the current version, and report that the servers do not answer."""
        with contextlib.suppress(CheckpointError):
            news = self._chain.news()
            if news is None or news.created <= self.maker.created:
                return
            self._say("torchfleet serve: the servers do not answer; a newer save is taken over meanwhile")
            self._chain.taken = None  # the stack has rows of the servers: the whole chain replaces it
            self._chain.look_again()
            whole = self._chain.news()
            if self._pushed is not None:
                self._pushed.is_lost = True
            if whole is not None:
                self._take(whole)
