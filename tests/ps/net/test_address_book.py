"""Servers that moved: a client finds one by its first address, wherever the book says that it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.fleets import ServerThread
from support.messages import naming

from torchfleet.base.errors import SecurityError
from torchfleet.ps.net import addresses
from torchfleet.ps.net.addresses import endpoint_in, present_address, write_book
from torchfleet.ps.net.private_jobs import Way
from torchfleet.ps.server.server import Server
from torchfleet.ps.tables.settings.spec import TableSpec
from torchfleet.ps.worker.client.client import Client
from torchfleet.ps.worker.client.connection import Patience


def test_what_is_not_in_the_book_is_where_its_name_says(tmp_path: Path) -> None:
    endpoint = Way(address_book=str(tmp_path / "book")).endpoint("a:1|b:2").split("|")
    assert [present_address(each) for each in endpoint] == ["tcp://a:1", "tcp://b:2"]
    write_book(tmp_path / "book", {"b:2": "c:3"})
    assert [present_address(each) for each in endpoint] == ["tcp://a:1", "tcp://c:3"]
    assert addresses.shown("|".join(endpoint)) == "tcp://a:1|tcp://b:2"


def test_a_request_under_way_is_answered_by_the_server_at_its_new_address(tmp_path: Path) -> None:
    """The same server behind another socket, as one that goes on from its log elsewhere: what it did is done once."""
    book, server = tmp_path / "book", Server(max_table_bytes=1 << 22)
    with ServerThread("tcp://127.0.0.1:0", server=server) as first:
        place = first.endpoint.removeprefix("tcp://")
        client = Client.connect([endpoint_in(str(book), place)], patience=Patience(30.0, 3, pause=0.2))
        client.create_table(TableSpec("rows", dim=2))
        client.push("rows", np.array([3], np.uint64), np.ones((1, 2), np.float32))
    with ServerThread("tcp://127.0.0.1:0", server=server) as second, client:
        assert second.endpoint != first.endpoint
        write_book(book, {place: second.endpoint.removeprefix("tcp://")})
        assert client.stats()[0]["tables"]["rows"]["rows"] == 1


def test_a_server_listens_where_the_book_says_and_asks_for_keys_there(tmp_path: Path) -> None:
    write_book(tmp_path / "book", {"127.0.0.1:1": "0.0.0.0:0"})
    with pytest.raises(SecurityError, match=naming("0.0.0.0")):
        addresses.listen(endpoint_in(str(tmp_path / "book"), "127.0.0.1:1"))
