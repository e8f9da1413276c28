"""etcd as the coordinator of jobs on several machines."""

from __future__ import annotations

import base64
from typing import Any

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.etcd_gateway import EtcdGateway
from torchfleet.ps.coordination.view import RENEWAL, View, pack_view, unpack_view

_LEASE = int(6 * RENEWAL)  # seconds after which etcd removes the records of a killed job


class EtcdCoordinator:
    """As Coordinator. Records are keys below torchfleet/NAME/. Each is attached to the lease of its last writer."""

    def __init__(self, gateway: EtcdGateway, name: str) -> None:
        self._gateway, self._name = gateway, name
        self._lease: str | None = None

    def read(self, shard: int) -> View | None:
        found = self._gateway.ask("kv/range", {"key": self._key(shard)}).get("kvs", [])
        return unpack_view(base64.b64decode(found[0]["value"]), f"etcd at {self._gateway.place}") if found else None

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        key = self._key(shard)
        compared: dict[str, Any] = {"key": key, "result": "EQUAL"}
        if before is None:
            compared |= {"target": "CREATE", "create_revision": "0"}
        else:
            compared |= {"target": "VALUE", "value": _encoded(pack_view(before))}
        put = {"requestPut": {"key": key, "value": _encoded(pack_view(after)), "lease": self._own_lease()}}
        try:
            answer = self._gateway.ask("kv/txn", {"compare": [compared], "success": [put]})
        except CoordinatorUnreachable:
            # The change may still have happened. No other replica writes this view: it names its writer and its term.
            return self.read(shard) == after
        return bool(answer.get("succeeded"))

    def renew(self) -> None:
        if self._lease is not None:
            self._gateway.ask("lease/keepalive", {"ID": self._lease})

    def _own_lease(self) -> str:
        if self._lease is None:
            self._lease = str(self._gateway.ask("lease/grant", {"TTL": str(_LEASE)})["ID"])
        return self._lease

    def _key(self, shard: int) -> str:
        return _encoded(f"torchfleet/{self._name}/shard-{shard}".encode())


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
