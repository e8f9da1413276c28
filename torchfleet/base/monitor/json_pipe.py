"""A named pipe whose writer believes it to be its log: what comes out of it is logged as JSON lines."""

from __future__ import annotations

import os
import select
import threading
from pathlib import Path

from torchfleet.base.monitor.json_lines import JsonLog
from torchfleet.base.monitor.log_file import LogFile

_PIECE = 1 << 16  # bytes that are taken at a time
_LOOK = 200  # milliseconds between two looks whether it is closed
_PATIENCE = 2.0  # seconds for what is still in the pipe, when it is closed


class JsonPipe:
    """Reads from a thread, until all writers have closed it or `close` is called. It owns `log`."""

    def __init__(self, path: Path, log: LogFile, role: str, index: int) -> None:
        self._path, self._log, self._json = path, log, JsonLog(log.write, role, index)
        self._is_over = False
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._end = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # does not wait for a writer
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Everything that was written is in the log, unless a writer goes on and on."""
        self._is_over = True
        self._thread.join(_PATIENCE)
        self._path.unlink(missing_ok=True)

    def _copy(self) -> None:
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        while True:
            found = waiting.poll(_LOOK)
            if found and found[0][1] & select.POLLIN:
                self._json.write(os.read(self._end, _PIECE))
            elif found or self._is_over:  # the last writer has gone
                break
        self._json.end()
        self._log.close()
        os.close(self._end)
