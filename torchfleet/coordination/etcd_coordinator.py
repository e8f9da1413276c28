"""etcd as the coordinator of jobs on several machines, through its JSON gateway (version 3)."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Sequence
from typing import Any

from torchfleet.coordination.view import RENEWAL, View, pack_view, unpack_view
from torchfleet.errors import CoordinatorUnreachable, FleetError

_TIMEOUT = 0.4  # seconds for one answer: a primary that is not sure for longer is no primary
_LEASE = int(6 * RENEWAL)  # seconds after which the records of a job that was killed go


class EtcdCoordinator:
    """As Coordinator. Records are keys below torchfleet/NAME/ and hang on a lease of whoever wrote them last."""

    def __init__(self, places: Sequence[str], name: str) -> None:
        """`places`: host:port of members of one etcd; the first that answers is asked."""
        self._places, self._name = list(places), name
        self._lease: str | None = None

    def read(self, shard: int) -> View | None:
        found = self._ask("kv/range", {"key": self._key(shard)}).get("kvs", [])
        return unpack_view(base64.b64decode(found[0]["value"]), f"etcd at {self._places[0]}") if found else None

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        key = self._key(shard)
        compared: dict[str, Any] = {"key": key, "result": "EQUAL"}
        if before is None:
            compared |= {"target": "CREATE", "create_revision": "0"}
        else:
            compared |= {"target": "VALUE", "value": _encoded(pack_view(before))}
        put = {"requestPut": {"key": key, "value": _encoded(pack_view(after)), "lease": self._own_lease()}}
        try:
            answer = self._ask("kv/txn", {"compare": [compared], "success": [put]})
        except CoordinatorUnreachable:
            # It may have been done all the same. Nobody else writes this view: it names its writer and its term.
            return self.read(shard) == after
        return bool(answer.get("succeeded"))

    def renew(self) -> None:
        if self._lease is not None:
            self._ask("lease/keepalive", {"ID": self._lease})

    def _own_lease(self) -> str:
        if self._lease is None:
            self._lease = str(self._ask("lease/grant", {"TTL": str(_LEASE)})["ID"])
        return self._lease

    def _key(self, shard: int) -> str:
        return _encoded(f"torchfleet/{self._name}/shard-{shard}".encode())

    def _ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        problems = []
        for place in self._places:
            try:
                status, text = _post(place, f"/v3/{what}", json.dumps(body))
                answer = json.loads(text)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{place}: {error or type(error).__name__}")
                continue
            if status != http.HTTPStatus.OK or not isinstance(answer, dict):
                raise FleetError(f"etcd at {place} answered {what} with status {status}: {text[:200]!r}")
            self._places.remove(place)
            self._places.insert(0, place)
            return answer
        raise CoordinatorUnreachable(f"no etcd answers {what} ({'; '.join(problems)}). Is it running there?")


def _post(place: str, path: str, body: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(place, timeout=_TIMEOUT)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
