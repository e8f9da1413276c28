"""The dashboard by HTTP: what is served, to whom, and what bad clients cannot do."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.made_history import MadeJob, append, write
from support.messages import lines_naming, naming
from support.scripts.launching import SOON, wait_until

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.http_listener import Bounds
from torchfleet.launch.job_spec import JobSpec
from torchfleet.launch.job_watch import JobWatch
from torchfleet.observe.dashboard.access import Access, token_of, token_of_this_process
from torchfleet.observe.dashboard.dashboard_server import Dashboard
from torchfleet.observe.dashboard.run_folders import RunFolders
from torchfleet.observe.watch.history import HistoryReader
from torchfleet.observe.watch.watchers import Watching

TOKEN = "a-token-of-sixteen-letters"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    return write(tmp_path / "log" / "2026-11-16_10-00-00_1", MadeJob(seconds=20), until=10)


@contextlib.contextmanager
def served(folder: Path, token: str | None = None) -> Iterator[Dashboard]:
    dashboard = Dashboard(RunFolders([folder]), port=0, token=token)
    try:
        yield dashboard
    finally:
        dashboard.close(patience=0.5)


def get(dashboard: Dashboard, path: str, method: str = "GET", body: str = "", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=60)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body or None, sent)
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


class Events:
    """A client of the stream."""

    def __init__(self, dashboard: Dashboard, query: str = "", **headers: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", dashboard.port, timeout=60)
        self._connection.request("GET", f"/events{query}", headers={k.replace("_", "-"): v for k, v in headers.items()})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200

    def next(self) -> tuple[str, str, Any]:
        """Name, id and body of the next event."""
        fields: dict[str, str] = {}
        while True:
            line = self._answer.readline().decode().rstrip("\n")
            if not line and "data" in fields:
                return fields["event"], fields.get("id", ""), json.loads(fields["data"])
            name, _, value = line.partition(": ")
            fields[name] = value

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def test_the_page_and_its_files_are_served_with_guards(run: Path) -> None:
    with served(run) as dashboard:
        for path in ("/", "/app.js", "/app.css", "/js/store.js", "/vendor/uPlot.iife.min.js", "/icon.svg"):
            status, headers, body = get(dashboard, path)
            assert (status, len(body) > 100) == (200, True)
            assert headers["X-Content-Type-Options"] == "nosniff"
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert "Access-Control-Allow-Origin" not in headers
        page = get(dashboard, "/")[2].decode()
        assert "<script>" not in page
        assert "style=" not in page
        assert "//" not in page.replace("</", "")  # nothing comes from another host


def test_a_stream_begins_with_all_goes_on_with_deltas_and_takes_up_where_it_was(run: Path) -> None:
    job = MadeJob(seconds=20)
    with served(run) as dashboard:
        events = Events(dashboard)
        kind, first, body = events.next()
        assert kind == "snapshot"
        assert set(body["roles"]) == {"server.0", "server.1", "worker.0", "worker.1", "worker.2", "worker.3"}
        append(run, job.second(10))
        kind, second, body = events.next()
        assert (kind, body["job"]["points"]) == ("delta", [9, 10])
        assert len(body["roles"]) == 6
        events.close()
        append(run, job.second(11))
        again = Events(dashboard, Last_Event_ID=second)
        kind, third, body = again.next()
        assert (kind, body["job"]["points"]) == ("delta", [10, 11])
        assert len({first, second, third}) == 3
        again.close()
        for unknown in ("other-1", second.partition("-")[0] + "-999", "-", "x" * 1000):
            other = Events(dashboard, Last_Event_ID=unknown)
            assert other.next()[0] == "snapshot"
            other.close()


def test_the_last_records_are_sent_before_the_end(run: Path) -> None:
    dashboard = Dashboard(RunFolders([run]), port=0)
    events = Events(dashboard)
    assert events.next()[2]["head"]["state"] == "running"
    append(run, MadeJob(seconds=20).end())
    dashboard.close()
    assert events.next()[2]["head"]["state"] == "finished"
    assert events.next()[0] == "closing"


def test_logs_come_by_the_names_of_the_record_alone(run: Path) -> None:
    bad = {"time": 1.0, "kind": "role", "key": "worker.9", "role": "worker", "status": {}, "log": "../../secret"}
    append(run, [bad])
    with served(run) as dashboard:
        status, _, body = get(dashboard, "/api/log?role=worker.0")
        assert status == 200
        assert json.loads(body)["text"].endswith("worker 0: step 19\n")
        found = json.loads(get(dashboard, "/api/find?role=worker.0&text=step%203")[2])
        assert [line[-6:] for line in found["lines"]] == ["step 3"]
        for query in (
            "role=worker.9", "role=../../secret", "role=workerlog.0", "role=", "role=worker.0%00", "",
            "role=worker.0&run=..", "run=../../&role=worker.0", "run=%2Fetc&role=passwd",
        ):  # fmt: skip
            assert get(dashboard, f"/api/log?{query}")[0] == 404
            assert get(dashboard, f"/api/find?{query}&text=secret")[0] == 404
        many = "&".join(f"a{number}=1" for number in range(50))
        assert get(dashboard, f"/api/log?{many}")[0] == 400


@pytest.mark.parametrize(
    "path",
    ["/../secret", "/static/../../secret", "//etc/passwd", "/%2e%2e/secret", "/js/", "/history.jsonl", "/api", "/\\x"],
)
def test_paths_lead_to_files_of_the_page_alone(run: Path, path: str) -> None:
    with served(run) as dashboard:
        status, _, body = get(dashboard, path)
        assert status == 404
        assert b"secret" not in body


def test_numbers_without_end_are_no_numbers(run: Path) -> None:
    endless = "9" * 5000
    with served(run) as dashboard:
        assert get(dashboard, f"/api/log?role=worker.0&file={endless}&start={endless}")[0] == 200
        assert get(dashboard, "/login", method="POST", Content_Length=endless)[0] == 400
        assert get(dashboard, "ftp://[")[0] == 404


def test_names_that_are_no_utf8_reach_the_page(run: Path) -> None:
    append(run, [{"time": 2.0, "kind": "start", "command": ["caf\udce9.py"], "attempt": 0}])
    with served(run) as dashboard:
        stream = Events(dashboard)
        assert stream.next()[2]["head"]["command"] == ["caf\udce9.py"]
        stream.close()


def test_a_mistake_of_the_server_is_told_once(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(self: Dashboard, name: str) -> None:
        raise KeyError(name)

    monkeypatch.setattr(Dashboard, "feed", fails)
    with served(run) as dashboard:
        for _ in range(2):
            assert not _answers(dashboard)
    assert len(lines_naming(capsys.readouterr().err, "KeyError")) == 1


def test_a_request_by_another_name_or_from_another_site_is_refused(run: Path) -> None:
    with served(run) as dashboard:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost.evil.example"):
            assert get(dashboard, "/api/runs", Host=host)[0] == 421
            assert get(dashboard, "/", Host=host)[0] == 421
        for host in ("localhost:9999", "127.0.0.1", "[::1]:80", socket.gethostname()):
            assert get(dashboard, "/api/runs", Host=host)[0] == 200
        assert get(dashboard, "/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
        assert get(dashboard, "/api/runs", Sec_Fetch_Site="same-origin")[0] == 200
        assert get(dashboard, "/api/runs", method="POST", body="x")[0] == 400
        assert get(dashboard, "/api/runs", method="DELETE")[0] == 501


def test_data_needs_the_token_and_the_page_does_not(run: Path) -> None:
    with served(run, TOKEN) as dashboard:
        assert dashboard.url.endswith(f"#token={TOKEN}")
        assert get(dashboard, "/")[0] == 200
        for path in ("/api/runs", "/events", "/api/log?role=worker.0", "/api/find?role=worker.0&text=a"):
            assert get(dashboard, path)[0] == 401
            assert get(dashboard, path, Cookie=f"fleet_dashboard_{dashboard.port}={TOKEN}")[0] == 401
        for wrong in ("", "wrong", TOKEN[:-1], TOKEN + "x", "é" * 16):
            assert get(dashboard, "/login", method="POST", body=wrong or " ")[0] == 403
        assert get(dashboard, "/login", method="POST", body="x" * 600)[0] == 400
        status, headers, _ = get(dashboard, "/login", method="POST", body=TOKEN)
        cookie, _, rules = headers["Set-Cookie"].partition("; ")
        assert (status, rules) == (200, "Path=/; HttpOnly; SameSite=Strict")
        assert TOKEN not in cookie
        assert get(dashboard, "/api/runs", Cookie=cookie)[0] == 200
        assert get(dashboard, "/api/runs", Cookie=cookie[:-1])[0] == 401
        assert get(dashboard, "/api/runs", Authorization=f"Bearer {TOKEN}")[0] == 200
        assert get(dashboard, "/api/runs", Authorization="Bearer no")[0] == 401


def test_beyond_loopback_there_is_always_a_token(tmp_path: Path) -> None:
    with pytest.raises(FleetError, match="token"):
        Access("0.0.0.0", None)
    assert token_of(None) != token_of(None)
    made = token_of(str(tmp_path / "token"))
    assert made == token_of(str(tmp_path / "token"))
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(FleetError, match="chmod 600"):
        token_of(str(tmp_path / "token"))
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    with pytest.raises(FleetError, match=naming("token", 16)):
        token_of(str(tmp_path / "short"))


@pytest.mark.parametrize("host", ["203.0.113.9", "no-such-name.invalid"])
def test_an_address_of_another_machine_is_told_as_such(run: Path, host: str) -> None:
    with pytest.raises(FleetError, match=naming(host)):
        Dashboard(RunFolders([run]), host, port=0, token=TOKEN)


def test_a_job_prints_its_token_once_keeps_it_over_attempts_and_records_none(tmp_path: Path) -> None:
    job, lines = JobSpec(("train.py",), tmp_path, watching=Watching(dashboard=0)), list[str]()
    for attempt in range(2):
        watch = JobWatch(job, tmp_path, attempt, shows=False)
        lines += [record["text"] for record in HistoryReader(tmp_path).records() if record["kind"] == "event"]
        dashboard = watch._watchers[-1]._dashboard  # type: ignore[attr-defined]
        try:
            url, _, token = dashboard.url.partition("#token=")
            assert get(dashboard, "/api/runs")[0] == 401
            assert get(dashboard, "/api/runs", Authorization=f"Bearer {token_of_this_process()}")[0] == 200
            assert (len(f"[fleetrun] dashboard: {dashboard.url}") <= 80, token) == (True, token_of_this_process())
            assert lines[-1] == f"[fleetrun] dashboard: {url}"
        finally:
            watch.close()
    assert token_of_this_process() not in (tmp_path / "history.jsonl").read_text()


def test_garbage_slow_clients_and_too_many_of_them_do_no_harm(run: Path) -> None:
    with served(run) as dashboard:
        dashboard._server.bounds = Bounds(request_seconds=0.5)
        for garbage in (
            b"\x00\xff" * 100,
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"A" * 70_000,
            b"\x16\x03\x01\x02\x00",
        ):
            with socket.create_connection(("127.0.0.1", dashboard.port)) as client, contextlib.suppress(OSError):
                client.sendall(garbage + b"\r\n\r\n")
                client.settimeout(60)
                client.recv(1000)
        dripping = socket.create_connection(("127.0.0.1", dashboard.port))
        begin = time.monotonic()
        with contextlib.suppress(OSError):  # a byte now and then would never end
            while time.monotonic() - begin < 100:
                dripping.sendall(b"G")
                time.sleep(0.1)
        assert time.monotonic() - begin < 100
        dripping.close()
        dashboard._server.bounds = Bounds(request_seconds=30.0)
        held = [socket.create_connection(("127.0.0.1", dashboard.port)) for _ in range(Bounds.connections)]
        held.append(socket.create_connection(("127.0.0.1", dashboard.port)))
        held[0].settimeout(60)
        assert b"503" in held[0].recv(100)
        for client in held:
            client.close()
        wait_until(lambda: _answers(dashboard), SOON, "answer after a flood of connections")


def test_silent_connections_without_a_token_keep_no_reader_out(run: Path) -> None:
    """100 authorised requests while four times as many connections as there are places say nothing."""
    with served(run, "t" * 20) as dashboard, contextlib.ExitStack() as stack:
        for number in range(100):
            for _ in range(4):
                stack.enter_context(socket.create_connection(("127.0.0.1", dashboard.port)))
            assert get(dashboard, "/api/runs", Authorization=f"Bearer {'t' * 20}")[0] == 200, number


def _answers(dashboard: Dashboard) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return get(dashboard, "/api/runs")[0] == 200
    return False


def test_a_client_that_does_not_read_is_dropped(run: Path) -> None:
    command = ["x" * 199] * 199
    begin = {"time": 1.0, "kind": "start", "command": command, "attempt": 0}
    append(run, [begin, *({"time": 2.0, "kind": "event", "text": "y" * 2000} for _ in range(1000))])  # megabytes
    before = _streams()  # clients of other tests may be going still
    with served(run) as dashboard:
        dashboard._server.bounds = Bounds(reply_seconds=0.5)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", dashboard.port))
        client.sendall(b"GET /events HTTP/1.0\r\nHost: localhost\r\n\r\n")
        client.settimeout(SOON)
        assert client.recv(12).startswith(b"HTTP/1.")  # the thread of the stream may be gone before it is looked for
        wait_until(lambda: not _streams() - before, SOON, "end of the stream")
        client.close()


def _streams() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if "process_request_thread" in thread.name}


def test_a_taken_port_is_an_error_and_the_default_one_gives_way(run: Path) -> None:
    with served(run) as first:
        with pytest.raises(FleetError, match=naming(f"127.0.0.1:{first.port}")):
            Dashboard(RunFolders([run]), port=first.port)
        others = [Dashboard(RunFolders([run])) for _ in range(2)]
        assert others[0].port != others[1].port
        for other in others:
            other.close()


def test_runs_are_those_that_have_a_record_the_newest_first(run: Path) -> None:
    parent = run.parent
    write(parent / "2026-11-17_10-00-00_2", MadeJob(seconds=5))
    (parent / "2026-11-18_10-00-00_3").mkdir()  # without a record
    (parent / "latest").symlink_to("2026-11-17_10-00-00_2")
    folders = RunFolders([parent])
    assert folders.names() == ["2026-11-17_10-00-00_2", "2026-11-16_10-00-00_1"]
    assert folders.folders("..") is None
    assert folders.folders("latest") is None
    assert RunFolders([parent / "latest"]).names() == ["2026-11-17_10-00-00_2"]
    both = RunFolders([run, parent / "latest"])
    assert both.folders(both.names()[0]) == [run, parent / "latest"]
    for wrong, text in ((parent / "2026-11-18_10-00-00_3", "history.jsonl"), (parent / "nowhere", "nowhere")):
        with pytest.raises(FleetError, match=text):
            RunFolders([wrong])


def test_another_run_is_served_for_a_comparison(run: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "other" / run.name, MadeJob(seconds=20, num_workers=1), until=5)
    dashboard = Dashboard(RunFolders([run], other.parent), port=0)
    try:
        told = json.loads(get(dashboard, "/api/runs")[2])
        assert told == {"runs": [run.name], "compare": f"other/{run.name}"}
        name, _, body = Events(dashboard, f"?run={told['compare']}").next()
        assert name == "snapshot"
        assert sum(key.startswith("worker") for key in body["roles"]) == 1
        assert get(dashboard, "/events?run=other")[0] == 404
    finally:
        dashboard.close(patience=0.5)


def test_a_folder_to_compare_with_that_has_no_run_is_an_error(run: Path, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=naming(tmp_path / "none")):
        RunFolders([run], tmp_path / "none")
