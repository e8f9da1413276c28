"""A server under fuzzed messages and an audit hook: `audited_server.py FOLDER NUM` prints what it was seen to do.

All messages are sent twice, to two servers: the first compiles kernels, which numba keeps as pickles; the second is
watched. At the end the script itself does what a server must not do, so that a hook that sees nothing is noticed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from support.fuzz.messages import SPEC, frames_of, joined, messages
from support.fuzz.mutation import Mutator

from torchfleet.base.errors import FleetError
from torchfleet.ps.net.wire import Command, Message, Role, decode, pack
from torchfleet.ps.server.saves.table_saving import SaveBody
from torchfleet.ps.server.server import Server

FORBIDDEN = (
    "exec", "compile", "import", "pickle.find_class", "marshal.loads", "subprocess.Popen", "os.system", "os.exec",
    "os.posix_spawn", "os.fork", "ctypes.dlopen", "socket.connect",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
CHANGING = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "shutil.rmtree")


class Watch:
    """What happens between `on` and `off`, by kind."""

    def __init__(self, folder: str) -> None:
        self._folder, self.is_on = os.path.realpath(folder) + os.sep, False
        self.seen: Counter[str] = Counter()
        self.num_written = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event in FORBIDDEN:
            self.seen[f"{event} {arguments[0]!s:.80}"] += 1
        elif event in CHANGING or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            self._changed(event, arguments[0])

    def _changed(self, event: str, path: object) -> None:
        if isinstance(path, int) or self._is_inside(os.fsdecode(path)):  # type: ignore[arg-type]
            self.num_written += 1
        else:
            self.seen[f"{event} {path}"] += 1

    def _is_inside(self, path: str) -> bool:
        return os.path.abspath(path).startswith(self._folder) or path == os.devnull


def inputs(folder: str, num: int) -> list[list[bytes]]:
    """Good messages and spoiled ones, saves into the folder among them."""
    good = messages()
    mutator, dice = Mutator(5, [b"TFLT"]), random.Random(5)
    found = [frames_of(data) for data in good]
    while len(found) < num:
        frames = frames_of(mutator.spoiled(dice.choice(good), dice.choice(good)))
        with contextlib.suppress(FleetError):
            if decode(frames).command is Command.STOP:
                continue
        found.append(frames)
    for at in range(0, num, num // 4):
        body = SaveBody(f"{folder}/model", f"save-{at + 1}", True, at + 1)
        message = Message(Command.SAVE, Role.FIRST_WORKER, arrays=[pack(body)])
        message.client, message.call, message.sequence, message.floor = 77, at + 1, at + 1, at + 1
        found.insert(at, frames_of(joined(message)))
    return found


def send(all_frames: list[list[bytes]], folder: str) -> int:
    server = Server(max_table_bytes=1 << 16, save_roots=[folder])
    server.state.add_table(SPEC)
    num_answers = 0
    for frames in all_frames:
        num_answers += len(server.handle("peer", frames, None))
        server.work()
    while server.work() is not None:
        num_answers += len(server.tick(0.0))
    return num_answers


def main() -> None:
    folder, num = sys.argv[1], int(sys.argv[2])
    Path(folder).mkdir()
    all_frames = inputs(folder, num)
    send(all_frames, folder)
    watch = Watch(folder)
    watch.is_on = True
    num_answers = send(all_frames, folder)
    watch.is_on = False
    seen, watch.seen = dict(watch.seen), Counter()
    watch.is_on = True
    compile("1", "control", "eval")
    with open(folder + ".outside", "w") as outside:
        outside.write("control")
    watch.is_on = False
    print(json.dumps({"answers": num_answers, "written": watch.num_written, "seen": seen, "control": list(watch.seen)}))


if __name__ == "__main__":
    main()
