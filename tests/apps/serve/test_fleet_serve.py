"""`fleet serve` as users run it: processes, clients of others, wrong requests, kills."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import processes
from support.extras import needing
from support.inference_requests import WRONG
from support.scripts.launching import wait_until
from support.serving import SECONDS, Clicks, Served, as_json, clicks_batch, save_clicks, serving

import torchfleet as fleet
from torchfleet.apps.serve.serving_metrics import CLIENT_LEFT

pytestmark = [pytest.mark.slow, needing("uvicorn", "httptools")]
TOKEN = "a token of a test, long enough"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "clicks"
    save_clicks(folder)
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    bounds = ("--max_batch", "64", "--max_queue", "128", "--max_body", "100000", "--timeout_s", str(SECONDS))
    with serving(model, *bounds, "--access_log", str(model / "access.jsonl"), is_forked=False) as made:
        yield made


def expected_of(model: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = fleet.load_inference_model(str(model), Clicks())(**batch)
    return found


def test_predictions_are_those_of_the_model(served: Served, model: Path) -> None:
    for num in (1, 5, 64):
        batch = clicks_batch(num, num)
        status, found = served.infer({**as_json(batch), "id": "seven"})
        assert (status, found["id"], found["model_name"]) == (200, "seven", "clicks")
        assert found["outputs"][0]["shape"] == [num]
        values = torch.tensor(found["outputs"][0]["data"])
        torch.testing.assert_close(values, expected_of(model, batch), rtol=0, atol=1e-6)


def test_the_pages_of_the_protocol(served: Served) -> None:
    assert served.get("/v2")[1]["extensions"] == ["binary_tensor_data"]
    assert served.get("/v2/health/live") == (200, {"live": True})
    assert served.get("/v2/health/ready") == (200, {"ready": True})
    status, found = served.get("/v2/models/clicks")
    assert status == 200
    assert found["inputs"] == [
        {"name": "ids", "datatype": "INT64", "shape": [-1, 2]},
        {"name": "x", "datatype": "FP32", "shape": [-1, 1]},
    ]
    assert found["outputs"] == [{"name": "output", "datatype": "FP32", "shape": [-1]}]
    version = found["versions"][0]
    assert served.get(f"/v2/models/clicks/versions/{version}")[1] == found
    for path in ("/v2/models/clicks/ready", f"/v2/models/clicks/versions/{version}/ready"):
        assert served.get(path)[0] == 200
    body = json.dumps(as_json(clicks_batch(1))).encode()
    assert served.request("POST", f"/v2/models/clicks/versions/{version}/infer", body)[0] == 200
    for path in ("/v2/models/other", "/v2/models/clicks/versions/99", "/other", "/", "/v2/models/clicks/more"):
        status, found = served.get(path)
        assert status == 404
        assert isinstance(found["error"], str)
    assert served.request("POST", "/v2/models/clicks/versions/99/infer", body)[0] == 404
    assert served.get("/v2/models/clicks/infer")[0] == 405
    assert served.request("DELETE", "/v2")[0] == 405


def answers_of(served: Served, *pieces: bytes) -> list[tuple[int, Any]]:
    """Status and JSON of every answer on one connection, which the last request closes."""
    with socket.create_connection((served.host, served.port), timeout=30) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            raw.sendall(piece)
            time.sleep(0.02)
        with raw.makefile("rb") as stream:
            found = []
            while line := stream.readline():
                size = 0
                while (header := stream.readline().lower()) != b"\r\n":
                    size = int(header.split(b":")[1]) if header.startswith(b"content-length") else size
                found.append((int(line.split()[1]), json.loads(stream.read(size))))
            return found


def test_all_ways_of_sending_get_the_same_answer(served: Served) -> None:
    body = json.dumps(as_json(clicks_batch(3))).encode()
    line = b"POST /v2/models/clicks/infer HTTP/1.1\r\nhost: localhost\r\n"
    length = b"content-length: %d\r\n" % len(body)
    stay, last = line + length + b"\r\n" + body, line + b"connection: close\r\n" + length + b"\r\n" + body
    chunked = line + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    old = last.replace(b"HTTP/1.1", b"HTTP/1.0")
    queried = last.replace(b"/infer ", b"/infer?a=1 ")
    ways = [[last], [last[:50], last[50:200], last[200:]], [chunked], [old], [queried], [stay, stay, last]]
    ways += [[stay + stay + last], [stay + last[:90], last[90:]]]  # the next request comes before the answer
    expected = served.infer(body)
    assert expected[0] == 200
    for way in ways:
        found = answers_of(served, *way)
        assert len(found) == sum(piece.count(b"POST") for piece in way)
        assert all(one == expected for one in found)
    wrong = stay.replace(b'"INT64"', b'"INT65"')
    assert [status for status, _ in answers_of(served, wrong + stay + wrong + last)] == [400, 200, 400, 200]


def test_wrong_requests_get_4xx_and_memory_is_bounded(served: Served) -> None:
    (worker,) = served.workers()
    served.infer(WRONG[0])
    before = worker.memory_info().rss
    for body in WRONG:
        status, found = served.infer(body)
        assert 400 <= status < 500, body[:200]
        assert "Traceback" not in found["error"]
    assert worker.memory_info().rss - before < 50 << 20
    assert served.workers() == [worker]
    assert served.infer(as_json(clicks_batch(1)))[0] == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Content-Length": "200000"}, 413),
        ({"Transfer-Encoding": "chunked"}, 413),
        ({"Content-Length": "x"}, 400),
        ({"Content-Length": "10", "Content-Encoding": "gzip"}, 415),
        ({"Content-Length": "2", "Inference-Header-Content-Length": "-1"}, 400),
        ({"Content-Length": "2", "Inference-Header-Content-Length": "9" * 30}, 400),
        ({"X-Long": "x" * 70_000}, 431),
    ],
)
def test_bombs_are_refused_and_logged(served: Served, model: Path, headers: dict[str, str], expected: int) -> None:
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    asked = f"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: localhost\r\n{head}".encode()
    if expected != 431:
        asked += b"\r\n" + (b"" if expected == 413 else b"{}")
    chunks = 30 if "Transfer-Encoding" in headers else 0
    answer = next(filter(None, (answer_to(served, asked, chunks) for _ in range(50))))
    assert int(answer.split(b" ", 2)[1]) == expected
    assert b"error" in answer
    lines_once(model, lambda lines: expected in {line["status"] for line in lines})
    assert served.infer(as_json(clicks_batch(1)))[0] == 200


def test_a_slow_body_is_refused_and_logged(model: Path, tmp_path: Path) -> None:
    with serving(model, "--timeout_s", "3", "--access_log", str(tmp_path / "access.jsonl")) as made:
        answer = next(filter(None, (answer_to(made, head_of(10) + b"{}", 0) for _ in range(50))))
        assert int(answer.split(b" ", 2)[1]) == 408
        assert b"error" in answer
        lines_once(tmp_path, lambda lines: 408 in {line["status"] for line in lines})
        body = as_json(clicks_batch(1))
        wait_until(lambda: made.infer(body)[0] == 200, SECONDS, "answer within the 3 s that a prediction has, too")


def answer_to(served: Served, asked: bytes, num_chunks: int) -> bytes:
    """The whole answer; empty if it was lost: the server closes a connection of which it does not read all."""
    answer = b""
    with socket.create_connection((served.host, served.port), timeout=30) as connection, contextlib.suppress(OSError):
        connection.sendall(asked)
        with contextlib.suppress(OSError):  # the server need not read all of it
            for _ in range(num_chunks):
                connection.sendall(b"2000\r\n" + b"[" * 0x2000 + b"\r\n")
        while not answer.endswith(b"}") and (part := connection.recv(1 << 16)):
            answer += part
    return answer if answer.endswith(b"}") else b""


def test_an_endless_head_is_cut(served: Served) -> None:
    with socket.create_connection((served.host, served.port), timeout=30) as connection:
        connection.sendall(b"POST /v2/models/clicks/infer HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(1000):
                connection.sendall(b"X-More: " + b"x" * 1000 + b"\r\n")
        with contextlib.suppress(OSError):
            assert connection.recv(1 << 16)[:12] in (b"HTTP/1.1 431", b"")
    assert served.infer(as_json(clicks_batch(1)))[0] == 200


def test_too_many_samples_are_refused(served: Served) -> None:
    status, found = served.infer(as_json(clicks_batch(65)))
    assert status == 400
    assert "64" in found["error"]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The access log of a server. Lines are complete: each is written at once."""
    return [json.loads(line) for line in (folder / "access.jsonl").read_text().splitlines()]


def lines_once(folder: Path, is_so: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The access log, as soon as this is so: a line is written after the answer."""
    end = time.monotonic() + SECONDS
    while not is_so(lines := lines_of(folder)):
        assert time.monotonic() < end, lines[-5:]
        time.sleep(0.02)
    return lines


def test_metrics_and_access_log(served: Served, model: Path) -> None:
    served.infer(as_json(clicks_batch(2)))
    status, text = served.request("GET", "/metrics")
    assert status == 200
    for name in (
        "requests_total",
        "request_seconds_bucket",
        "batch_samples_bucket",
        "queue_samples",
        "model_age_seconds",
    ):
        assert f"torchfleet_serve_{name}".encode() in text
    infers = [line for line in lines_of(model) if line["path"] == "/v2/models/clicks/infer"]
    assert infers
    assert {"time", "client", "method", "path", "status", "ms", "bytes", "process"} == set(infers[0])


def head_of(num_bytes: int) -> bytes:
    return b"POST /v2/models/clicks/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % num_bytes


def test_clients_that_leave_are_counted_and_logged(model: Path, tmp_path: Path) -> None:
    """A small request, a large one, which goes through ASGI, and one whose body never came."""
    small = json.dumps(as_json(clicks_batch(1))).encode()
    large = small + b" " * (1 << 17)
    log = str(tmp_path / "access.jsonl")
    with serving(model, "--batch_wait_ms", "2000", "--timeout_s", "20", "--access_log", log) as made:
        for asked in (head_of(len(small)) + small, head_of(len(large)) + large, head_of(len(small))):
            with socket.create_connection((made.host, made.port), timeout=30) as connection:
                connection.sendall(asked)
        lines = lines_once(tmp_path, lambda lines: len(lines) == 3)
        found = {(line["status"], line["bytes"], line["path"]) for line in lines}
        assert found == {(CLIENT_LEFT, 0, "/v2/models/clicks/infer")}
        text = made.request("GET", "/metrics")[1].decode()
        assert 'torchfleet_serve_requests_total{outcome="left"} 3.0' in text
        assert 'torchfleet_serve_requests_total{outcome="ok"} 0.0' in text
        assert made.infer(small)[0] == 200


def test_a_crowded_process_refuses_predictions_and_stays_alive(model: Path) -> None:
    """More connections than may be: 503 as JSON, counted; probes and metrics are answered."""
    with serving(model, "--max_connections", "2", "--timeout_s", str(SECONDS)) as made, contextlib.ExitStack() as stack:
        body = as_json(clicks_batch(1))
        assert made.infer(body)[0] == 200
        for _ in range(2):
            stack.enter_context(socket.create_connection((made.host, made.port), timeout=30))
        status, found = made.infer(body)
        assert (status, type(found["error"])) == (503, str)
        assert made.get("/v2/health/live")[0] == 200
        assert made.get("/v2/health/ready")[0] == 503
        text = made.request("GET", "/metrics")[1].decode()
        assert 'torchfleet_serve_requests_total{outcome="busy"} 2.0' in text


@contextlib.contextmanager
def few_open_files() -> Iterator[None]:
    """Processes that are started here may open fewer files than the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_killed_processes_are_started_again_and_answers_go_on(model: Path) -> None:
    body = json.dumps(as_json(clicks_batch(2))).encode()
    expected = expected_of(model, clicks_batch(2))
    with few_open_files(), serving(model, "--workers", "2", is_forked=False) as made:
        before = made.workers()
        assert len(before) == 2
        soft, hard = before[0].rlimit(psutil.RLIMIT_NOFILE)
        assert soft == hard  # connections are open files
        before[0].kill()
        answers = 0
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with contextlib.suppress(ConnectionError):  # a connection that the killed process had taken
                status, answer = made.request("POST", "/v2/models/clicks/infer", body)
                assert status == 200
                found = torch.tensor(json.loads(answer)["outputs"][0]["data"])
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
                answers += 1
            if answers > 20 and len(made.workers()) == 2 and before[0].pid not in {p.pid for p in made.workers()}:
                break
            time.sleep(0.01)
        assert answers > 20
        assert len(made.workers()) == 2
        made.process.send_signal(signal.SIGKILL)  # the processes end with their launcher
        _, alive = psutil.wait_procs(before[1:], timeout=30)
        assert not alive


def test_an_end_resets_no_request_of_a_connection_that_is_kept(model: Path) -> None:
    """Clients that send one request after the other: each connection ends with an answer that says so."""
    body = json.dumps(as_json(clicks_batch(2))).encode()
    with serving(model, is_forked=False) as made, concurrent.futures.ThreadPoolExecutor(6) as pool:
        running = threading.Event()
        clients = [pool.submit(_ask_until_closed, made, body, running) for _ in range(6)]
        assert running.wait(SECONDS)
        time.sleep(0.2)
        made.process.terminate()
        found = [client.result(SECONDS) for client in clients]
        assert found == ["close"] * 6
        assert made.process.wait(SECONDS) == 0


def _ask_until_closed(made: Served, body: bytes, running: threading.Event) -> str | None:
    """The header `Connection` of the last answer. Raises an error for a request that is not answered."""
    connection = http.client.HTTPConnection(made.host, made.port, timeout=SECONDS)
    with contextlib.closing(connection):
        for _ in range(100_000):
            connection.request("POST", "/v2/models/clicks/infer", body)
            response = connection.getresponse()
            response.read()
            assert response.status == 200
            running.set()
            if response.getheader("Connection") == "close":
                return "close"
            time.sleep(0.02)
    return None


def test_an_ending_process_is_not_ready(model: Path) -> None:
    with serving(model, is_forked=False) as made:
        connection = http.client.HTTPConnection(made.host, made.port, timeout=SECONDS)
        with contextlib.closing(connection):
            connection.request("GET", "/v2/health/ready")
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())) == (200, {"ready": True})
            made.process.terminate()
            wait_until(lambda: not _is_listening(made), SECONDS, "port that is closed")
            connection.request("GET", "/v2/health/ready")
            response = connection.getresponse()
            assert (response.status, json.loads(response.read())) == (503, {"ready": False})


def _is_listening(made: Served) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((made.host, made.port), timeout=5):
        return True
    return False


def test_another_host_is_refused(served: Served) -> None:
    body = json.dumps(as_json(clicks_batch(1))).encode()
    infer = "/v2/models/clicks/infer"
    for host, expected in (("evil.example", 421), ("localhost:1", 200), ("10.0.0.7", 200), (socket.gethostname(), 200)):
        assert served.request("POST", infer, body, {"Host": host})[0] == expected
        assert served.request("GET", "/v2/health/live", None, {"Host": host})[0] == expected


def test_metrics_have_the_version_of_each_process(tmp_path: Path) -> None:
    """Also of a process that is not asked for its metrics."""
    folder = tmp_path / "clicks"
    save_clicks(folder)
    with serving(folder, "--workers", "2", "--follow", is_forked=False) as made:
        save_clicks(folder)

        def is_fresh() -> bool:
            text = made.request("GET", "/metrics")[1].decode()
            return all(f'model_version{{process="{i}"}} 2.0' in text for i in range(2))

        wait_until(is_fresh, SECONDS, "second version in both processes")


def test_a_full_queue_is_answered_at_once(model: Path) -> None:
    """The first batch waits for others; what does not fit into the queue is refused meanwhile."""
    options = ("--batch_wait_ms", "100000", "--max_batch", "4", "--max_queue", "4", "--timeout_s", str(SECONDS))
    with serving(model, *options) as made, concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = [pool.submit(made.infer, as_json(clicks_batch(1))) for _ in range(3)]
        is_waiting = lambda: "queue_samples 3.0" in made.request("GET", "/metrics")[1].decode()  # noqa: E731
        wait_until(is_waiting, SECONDS, "batch that waits")
        status, found = made.infer(as_json(clicks_batch(3)))
        assert status == 503
        assert isinstance(found["error"], str)
        assert not any(future.done() for future in first)
        assert made.infer(as_json(clicks_batch(1)))[0] == 200  # which makes the batch full
        assert [future.result()[0] for future in first] == [200, 200, 200]


def test_token_and_tls(model: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN + "\n")
    key, cert = certificate(tmp_path)
    with serving(model, "--token_file", str(tmp_path / "token"), "--tls_key", key, "--tls_cert", cert) as made:
        trusted = ssl.create_default_context(cafile=cert)

        def get(path: str, **headers: str) -> int:
            request = urllib.request.Request(f"https://localhost:{made.port}{path}", headers=headers)
            try:
                with urllib.request.urlopen(request, context=trusted, timeout=30) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return error.code

        assert get("/v2/health/ready") == 200
        for path in ("/v2", "/v2/models/clicks", "/metrics", "/v2/models/clicks/infer", "/nothing"):
            assert get(path) == 401
            assert get(path, Authorization="Bearer " + TOKEN[:-1]) == 401
        assert get("/v2/models/clicks", Authorization=f"Bearer {TOKEN}") == 200


def certificate(folder: Path) -> tuple[str, str]:
    key, cert = str(folder / "key.pem"), str(folder / "cert.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "1"]
    made = subprocess.run(
        [*command, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("needs openssl")
    return key, cert


def failed(*arguments: str) -> str:
    """What `fleet serve` says when it cannot serve."""
    command = [sys.executable, "-m", "torchfleet.observe.commands", "serve", *arguments, "--port", "0"]
    made = processes.run(command, timeout=100, stderr=subprocess.PIPE)
    assert made.returncode == 1, made
    assert "Traceback" not in made.stderr
    return made.stderr


def test_what_cannot_be_served_is_said(model: Path, tmp_path: Path) -> None:
    assert "manifest.json" in failed(str(tmp_path / "nothing"))
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    (damaged / "manifest.json").write_text((model / "manifest.json").read_text().replace("dense.0", "dense.1"))
    told = failed(str(damaged))
    assert "checksum" in told
    assert "previous" not in told  # there is none
    assert "--tls_key" in failed(str(model), "--tls_cert", __file__)
    assert "--network" in failed(str(model), "--network", "none.py:Net")
    assert "--max_body" in failed(str(model), "--max_body", "0")
    for wrong in ("0", "-1", "inf", "nan"):
        assert "--timeout_s" in failed(str(model), "--timeout_s", wrong)


def test_files_that_cannot_be_used_are_said_at_once(model: Path, tmp_path: Path) -> None:
    """Before the model is loaded, and without a stack trace or a question for a password."""
    key, cert = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other, _ = certificate(tmp_path / "other")
    secret = str(tmp_path / "secret.pem")
    subprocess.run(["openssl", "rsa", "-aes256", "-passout", "pass:abcd", "-in", key, "-out", secret], check=True)
    for wrong in (other, secret, cert, __file__):
        assert "--tls_key" in failed(str(model), "--tls_cert", cert, "--tls_key", wrong)
    (tmp_path / "empty").touch()
    assert "--token_file" in failed(str(model), "--token_file", str(tmp_path / "empty"))
    for place in (tmp_path, tmp_path / "none" / "access.jsonl"):
        assert "--access_log" in failed(str(model), "--access_log", str(place))


def test_a_network_of_the_users_own(model: Path, tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    support = os.path.dirname(os.path.dirname(os.path.abspath(sys.modules["support.serving"].__file__ or "")))
    script.write_text(f"import sys\nsys.path.insert(0, {support!r})\nfrom support.serving import Clicks\n")
    batch: Any = clicks_batch(5, 1)
    with serving(model, "--network", f"{script}:Clicks") as made:
        status, found = made.infer(as_json(batch))
    assert status == 200
    torch.testing.assert_close(torch.tensor(found["outputs"][0]["data"]), expected_of(model, batch), rtol=0, atol=1e-6)
