"""From a click to a prediction: a stream of clicks trains a model, a server follows it, and a page shows what is
predicted for one item. Choose on the page whether users click it, and see the prediction move.

python examples/online/demo.py                 then open the page that it names
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from generate import ITEM, NUM_USERS, TAG, USER, hours, rows

PAGE = HERE / "demo_page.html"
SHOWN = ITEM + 12_345  # the item of the page
SHOWN_TAGS = [TAG + 7, TAG + 77]
START = "20261115"
LOG, TAIL = "train.log", 30  # the job's log; its lines that are shown after an error
AHEAD = 3  # parts that may wait for the job


class Clicks:
    """Writes a part of clicks at a time: those of the generator, and of users who see the item of the page."""

    def __init__(self, folder: Path, views: int) -> None:
        self._folder, self._views = folder, views
        self._names, self._rng = hours(START, 1 << 20), np.random.default_rng(0)
        self.is_liked, self.num_views, self.num_parts = True, 0, 0

    def write(self) -> None:
        name = next(self._names)
        place = self._folder / name
        place.mkdir(parents=True)
        own = list(self._shown())
        (place / "part-0").write_text("".join([*rows(name, self._views, 60, 0), *own]))
        (place / "_SUCCESS").touch()
        self.num_views += len(own)
        self.num_parts += 1

    def _shown(self) -> Iterator[str]:
        for user in self._rng.integers(0, NUM_USERS, self._views).tolist():
            click = int(self._rng.random() < (0.95 if self.is_liked else 0.05))
            yield f"1 {click} 1 1 1 {USER + user} 1 {SHOWN} 2 {' '.join(map(str, SHOWN_TAGS))}\n"


class Predictions:
    """Asks the server that follows the job, by the Open Inference Protocol."""

    def __init__(self, url: str, num_users: int = 32) -> None:
        users = [[USER + i] for i in range(num_users)]
        columns = {"user": users, "item": [[SHOWN]] * num_users, "tags": [SHOWN_TAGS] * num_users}
        inputs = [
            {"name": name, "shape": [num_users, len(data[0])], "datatype": "INT64", "data": data}
            for name, data in columns.items()
        ]
        self._body = json.dumps({"inputs": inputs}).encode()
        self._url = f"{url}/infer"

    def ask(self) -> tuple[float, str]:
        """(the mean probability of a click, the version of the model)."""
        with urllib.request.urlopen(self._url, self._body, timeout=10) as reply:
            found = json.load(reply)
        logits = np.array(found["outputs"][0]["data"])
        return float(np.mean(1 / (1 + np.exp(-logits)))), found["model_version"]


class Demo:
    """A job that trains, a server that follows it, and this process, which writes clicks and has the page."""

    def __init__(self, folder: Path, port: int, every: float, views: int) -> None:
        try:  # first: the port may be taken
            self._page = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except OSError as error:
            raise SystemExit(f"--port {port} cannot be used: {error.strerror}. Give another, or 0") from None
        self.url = f"http://127.0.0.1:{self._page.server_port}/"
        self._clicks = Clicks(folder / "clicks", views)
        self._every = every
        self._threads: list[threading.Thread] = []
        self._is_over = threading.Event()
        self._clicks.write()
        self._done = folder / "model" / "donefile.jsonl"
        self._processes = [_start(folder, "--data", folder / "clicks", "--model_dir", folder / "model")]
        try:
            _wait_for(self._done, self._processes[0], folder / LOG)
            print("waiting for fleet serve to load the save", flush=True)
            self._predictions = Predictions(self._serve(folder))
        except BaseException:
            self.close()
            raise
        self._threads = [threading.Thread(target=work) for work in (self._write, self._page.serve_forever)]
        for thread in self._threads:
            thread.start()

    def state(self) -> dict[str, Any]:
        clicks = self._clicks
        prediction, version = self._predictions.ask()
        return {"prediction": prediction, "version": version, "liked": clicks.is_liked, "clicks": clicks.num_views}

    def choose(self, is_liked: bool) -> None:
        self._clicks.is_liked = is_liked

    def wait(self) -> None:
        """Until one of the processes ends, or this one is interrupted."""
        while all(process.poll() is None for process in self._processes):
            time.sleep(0.2)

    def close(self) -> None:
        self._is_over.set()
        if self._threads:
            self._page.shutdown()
        for thread in self._threads:
            thread.join()
        self._page.server_close()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write(self) -> None:
        while not self._is_over.wait(self._every):
            last = json.loads(self._done.read_text().splitlines()[-1])
            if self._clicks.num_parts - last["number"] < AHEAD:  # on a busy machine, the job must not fall behind
                self._clicks.write()

    def _serve(self, folder: Path) -> str:
        command = [sys.executable, "-m", "torchfleet.observe.commands", "serve", str(folder / "model")]
        made = subprocess.Popen([*command, "--follow", "--port", "0"], stdout=subprocess.PIPE, text=True)
        self._processes.append(made)
        assert made.stdout is not None
        for line in made.stdout:
            if " at http" in line:
                return line.rpartition(" ")[2].strip()
        raise SystemExit("fleet serve ended; its message is above")


_TRAIN = ("--hours", "0", "--poll_seconds", "0.1", "--lr", "0.3", "--mode", "async")


def _start(folder: Path, *arguments: Any) -> subprocess.Popen[Any]:
    with open(folder / LOG, "wb") as log:
        command = [sys.executable, str(HERE / "train.py"), *_TRAIN, *map(str, arguments)]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _wait_for(path: Path, process: subprocess.Popen[Any], log: Path, seconds: float = 300.0) -> None:
    """Wait for the job's first save. Raises SystemExit, which shows the end of the log, if it does not come."""
    began = told = time.monotonic()
    print(f"waiting for the job's first save, up to {seconds:.0f} s; its log is {log}", flush=True)
    while not path.exists():
        now = time.monotonic()
        if process.poll() is not None or now - began > seconds:
            why = f"has ended with status {process.poll()}" if process.poll() is not None else "is still running"
            tail = "".join(log.read_text("utf-8", "replace").splitlines(keepends=True)[-TAIL:])
            raise SystemExit(f"{tail}\nthe job {why}, and has not saved {path}. Above is the end of {log}")
        if now - told > 10:
            told = now
            print(f"... {now - began:.0f} s", flush=True)
        time.sleep(0.1)


def _handler(demo: Demo) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/":
                self._reply(PAGE.read_bytes(), "text/html; charset=utf-8")
            elif path == "/prediction":
                self._reply(json.dumps(demo.state()).encode(), "application/json")
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            path, _, query = self.path.partition("?")
            liked = urllib.parse.parse_qs(query).get("liked")
            if path != "/taste" or liked not in (["0"], ["1"]):
                self.send_error(404)
                return
            demo.choose(liked == ["1"])
            self._reply(json.dumps(demo.state()).encode(), "application/json")

        def _reply(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080, help="of the page; 0 for any that is free")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between two parts of clicks")
    parser.add_argument("--views", type=int, default=200, help="views of the item in each part, and as many of others")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # SIGINT is ignored in what a shell starts in the background
        signal.signal(number, signal.default_int_handler)
    folder = Path(tempfile.mkdtemp(prefix="fleet-demo-"))  # stays after an error: the logs are in it
    try:
        demo = Demo(folder, options.port, options.every, options.views)
        try:
            print(f"open {demo.url}", flush=True)
            demo.wait()
        finally:
            demo.close()
    except KeyboardInterrupt:
        pass
    else:
        raise SystemExit(f"a process of the demo has ended; the job's log is {folder / LOG}")
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
