"""`make demo-online`: clicks train a model, a server follows it, and the prediction of one item moves in seconds."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.extras import needs
from support.paths import ROOT

pytestmark = pytest.mark.long

PATIENCE = 200.0  # seconds; on an idle machine it takes about two


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    needs("uvicorn", "httptools")
    script = [sys.executable, str(ROOT / "examples" / "online" / "demo.py"), "--port", "0"]
    demo = subprocess.Popen(script, stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        line = demo.stdout.readline()
        while line.startswith(("waiting ", "... ")):
            line = demo.stdout.readline()
        assert line.startswith("open http://127.0.0.1:"), line
        yield line.split()[1]
    finally:
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0


def asked(url: str, post: bool = False) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST" if post else "GET"), timeout=30) as reply:
        return json.load(reply)


def wait_for(url: str, is_so: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        state: dict[str, Any] = asked(f"{url}prediction")
        if is_so(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"the prediction is {state}")


def test_the_prediction_follows_the_clicks_up_and_down(url: str) -> None:
    liked = wait_for(url, lambda state: state["prediction"] > 0.8)
    assert asked(f"{url}taste?liked=0", post=True)["liked"] is False
    ignored = wait_for(url, lambda state: state["prediction"] < 0.4)
    assert int(ignored["version"]) > int(liked["version"])
    asked(f"{url}taste?liked=1", post=True)
    wait_for(url, lambda state: state["prediction"] > 0.6)


def test_the_page_asks_nobody_else() -> None:
    page = Path(ROOT / "examples" / "online" / "demo_page.html").read_text()
    assert "://" not in page
    assert "src=" not in page


def test_a_job_that_does_not_save_is_shown_with_the_end_of_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "online"))
    import demo

    log = tmp_path / "train.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as job:
        job.wait(PATIENCE)
        with pytest.raises(SystemExit) as raised:
            demo._wait_for(tmp_path / "none", job, log)
    for expected in ("line 99", "status 3", str(log)):
        assert expected in str(raised.value)
    assert "line 1\n" not in str(raised.value)
    assert str(log) in capsys.readouterr().out


def test_a_port_in_use_is_said_before_anything_is_started() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        script = [sys.executable, str(ROOT / "examples" / "online" / "demo.py"), "--port", port]
        ended = subprocess.run(script, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ended.returncode == 1
    assert port in ended.stderr
    assert "Traceback" not in ended.stderr
