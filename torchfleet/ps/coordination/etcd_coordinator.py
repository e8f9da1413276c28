"""etcd as the coordinator of jobs on several machines."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from torchfleet.base.errors import CoordinatorUnreachable
from torchfleet.ps.coordination.etcd_gateway import Answer, EtcdGateway
from torchfleet.ps.coordination.view import RENEWAL, View, pack_view, unpack_view

_LEASE = int(6 * RENEWAL)  # seconds after which etcd removes the records of a killed job


class EtcdCoordinator:
    """A Coordinator whose records are keys below torchfleet/NAME/. Each is attached to the lease of its last writer."""

    def __init__(self, gateway: EtcdGateway, name: str) -> None:
        self._gateway, self._name = gateway, name
        self._lease: str | None = None
        self._seen: set[int] = set()  # shards whose record this process has read or written

    def read(self, shard: int) -> View | None:
        found = self._gateway.ask("kv/range", {"key": self._key(shard)}, _Range).kvs
        where = f"etcd at {self._gateway.place}"
        if found:
            view = unpack_view(found[0].value, where)
            self._seen.add(shard)
            return view
        if shard in self._seen:
            raise CoordinatorUnreachable(f"{where} has lost the record of shard {shard}: is it the etcd of this job?")
        return None

    def replace(self, shard: int, before: View | None, after: View) -> bool:
        key = self._key(shard)
        compared: dict[str, Any] = {"key": key, "result": "EQUAL"}
        if before is None:
            compared |= {"target": "CREATE", "create_revision": "0"}
        else:
            compared |= {"target": "VALUE", "value": _encoded(pack_view(before))}
        put = {"requestPut": {"key": key, "value": _encoded(pack_view(after)), "lease": self._own_lease()}}
        try:
            if self._gateway.ask("kv/txn", {"compare": [compared], "success": [put]}, _Transaction).succeeded:
                self._seen.add(shard)
                return True
        except CoordinatorUnreachable:
            current = self.read(shard)
            if current == before:
                self.renew()  # etcd may have refused the change because the lease has expired
                raise  # the change may still be carried out
            return current == after
        return self.read(shard) == after  # a member that did not answer may have made the same change before

    def renew(self) -> None:
        if self._lease is not None and not self._keep_alive(self._lease):
            self._lease = None  # etcd has removed the lease: the next change is written under a new one

    def _keep_alive(self, lease: str) -> bool:
        return self._gateway.ask("lease/keepalive", {"ID": lease}, _KeptAlive).result.TTL not in ("", "0")

    def _own_lease(self) -> str:
        if self._lease is None:
            self._lease = self._gateway.ask("lease/grant", {"TTL": str(_LEASE)}, _Granted).ID
        return self._lease

    def _key(self, shard: int) -> str:
        return _encoded(f"torchfleet/{self._name}/shard-{shard}".encode())


class _KeyValue(msgspec.Struct):
    value: bytes  # msgspec decodes base64


class _Range(Answer):
    kvs: tuple[_KeyValue, ...] = ()


class _Transaction(Answer):
    succeeded: bool = False


class _Granted(Answer):
    ID: str


class _Lease(Answer):
    TTL: str = ""  # absent if the lease does not exist


class _KeptAlive(msgspec.Struct):
    result: _Lease


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
