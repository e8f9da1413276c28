"""Models that `fleet serve` serves, for the dashboard: version, age, rate and latency from their /metrics."""

from __future__ import annotations

import contextlib
import http.client
import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from torchfleet.base.errors import FleetError

PERIOD = 2.0  # seconds between two looks; rates and latencies are those since the last one
_TIMEOUT = 2.0  # seconds for an answer
_MOST = 1 << 20  # bytes of an answer
_LINE = re.compile(r'torchfleet_serve_(\w+?)(?:\{\w+="([^"]*)"\})? (\S+)')


@dataclass
class _Look:
    """What one server's metrics said, by name and label."""

    time: float = 0.0
    values: dict[tuple[str, str], float] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, float]:
        return {label: value for (found, label), value in self.values.items() if found == name}


class ServedModels:
    """Asks the servers when `rows` is called, at most once in `period` seconds. Threads may share it."""

    def __init__(self, urls: Sequence[str] = (), token: str = "", period: float = PERIOD) -> None:
        """`urls`: as `fleet serve` prints them. `token`: sent to all of them. Raises FleetError for other addresses."""
        self._places = [_place(url) for url in urls]
        self._token, self._period, self._lock = token, period, threading.Lock()
        self._last: dict[str, _Look] = {}
        self._rows: list[dict[str, Any]] = []
        self._looked = -math.inf

    def rows(self) -> list[dict[str, Any]]:
        """One for each model, in the order of the urls. Figures that are not known are None."""
        with self._lock:
            if time.monotonic() - self._looked >= self._period:
                self._rows = [self._row(*place) for place in self._places]
                self._looked = time.monotonic()
            return self._rows

    def _row(self, url: str, scheme: str, host: str, name: str) -> dict[str, Any]:
        row: dict[str, Any] = {"model": name, "url": url, "is_reached": False}
        row |= dict.fromkeys(("version", "age_s", "rate", "p99_ms", "refused_rate"))
        try:
            look = _Look(time.monotonic(), _values(_text(scheme, host, self._token)))
        except (OSError, http.client.HTTPException, ValueError):
            self._last.pop(url, None)
            return row
        before = self._last.get(url)
        self._last[url] = look
        versions, ages = look.of("model_version"), look.of("model_age_seconds")
        row |= {"is_reached": True, "version": max(versions.values(), default=None)}
        row["age_s"] = max(ages.values(), default=None)  # of the process that is behind the others
        return row if before is None else row | _since(before, look)


def _since(before: _Look, look: _Look) -> dict[str, float | None]:
    seconds = max(1e-9, look.time - before.time)
    requests = _difference(before.of("requests_total"), look.of("requests_total"))
    answered = _difference(before.of("request_seconds_bucket"), look.of("request_seconds_bucket"))
    if requests is None or answered is None:
        return {}
    total = sum(requests.values())
    return {
        "rate": total / seconds,
        "refused_rate": (total - requests.get("ok", 0.0) - requests.get("left", 0.0)) / seconds,
        "p99_ms": _bound(answered, 0.99),
    }


def _difference(before: dict[str, float], now: dict[str, float]) -> dict[str, float] | None:
    """The increase of each counter; None if the server has restarted."""
    found = {label: value - before.get(label, 0.0) for label, value in now.items()}
    return None if any(value < 0 for value in found.values()) else found


def _bound(buckets: dict[str, float], share: float) -> float | None:
    """Milliseconds below which this share of the requests was answered, by the bounds of the histogram."""
    total = buckets.get("+Inf", 0.0)
    bounds = sorted((float(bound), num) for bound, num in buckets.items() if bound != "+Inf")
    return next((1000 * bound for bound, num in bounds if total and num >= share * total), None)


def _values(text: str) -> dict[tuple[str, str], float]:
    """Raises ValueError if these are not the metrics of `fleet serve`."""
    found = [_LINE.fullmatch(line) for line in text.splitlines()]
    values = {(one[1], one[2] or ""): float(one[3]) for one in found if one is not None}
    if not any(name == "requests_total" for name, _ in values) or not all(map(math.isfinite, values.values())):
        raise ValueError("these are not metrics of fleet serve")
    return values


def _text(scheme: str, host: str, token: str) -> str:
    """The metrics. Redirects are not followed: the token is for this server alone."""
    kind = http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(kind(host, timeout=_TIMEOUT)) as connection:
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {token}"} if token else {})
        answer = connection.getresponse()
        body = answer.read(_MOST + 1)
        if answer.status != 200 or len(body) > _MOST:
            raise ValueError("no metrics")
        return body.decode("utf-8", "replace")


def _place(url: str) -> tuple[str, str, str, str]:
    """(url, scheme, host and port, name of the model)."""
    found = re.fullmatch(r"(https?)://([^/?#@\s]+)/v2/models/([\w.-]{1,128})/?", url)
    if found is None or not urlsplit(url).hostname:
        raise FleetError(
            f"--served: expected an address as fleet serve prints it, http://HOST:PORT/v2/models/NAME, found {url!r}"
        )
    return url, found[1], found[2], found[3]
