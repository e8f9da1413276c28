"""Messages between replicas: what a primary takes for a confirmation, and what it hands to its server at a glance."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchfleet.ps.net.wire import HEADER, Command, Message, Role, decode, encode, pack
from torchfleet.ps.server.replicas.between import (
    STUCK,
    FollowBody,
    Identity,
    append,
    confirm,
    confirm_in,
    follow,
    is_for_primary,
)

OWN = Identity(shard=3, replica=1, restart=2, incarnation=77)


def test_a_confirmation_is_read_as_it_was_made() -> None:
    frames = confirm(OWN, 5, 9, 123_456, STUCK)
    found = confirm_in(frames, OWN.shard)
    assert found is not None
    assert replace(found, arrays=[]) == replace(decode(frames), arrays=[])
    assert (found.term, found.call, found.sequence, found.flags, found.client) == (5, 9, 123_456, STUCK, 77)


def test_nothing_else_is_taken_for_a_confirmation() -> None:
    header = bytearray(confirm(OWN, 5, 9, 1)[0])
    assert confirm_in([bytes(header)], OWN.shard) is not None
    assert confirm_in([], OWN.shard) is None
    assert confirm_in([bytes(header)], OWN.shard + 1) is None
    assert confirm_in([bytes(header[:-1])], OWN.shard) is None
    assert confirm_in([bytes(header), b""], OWN.shard) is None
    assert confirm_in(encode(Message(Command.CONFIRM, Role.SERVER, shard=3, arrays=[pack({})])), OWN.shard) is None
    assert confirm_in(encode(Message(Command.CONFIRM, Role.WORKER, shard=3)), OWN.shard) is None
    for at in (0, 4, 5, 6):  # the magic bytes, version, command, role
        other = bytearray(header)
        other[at] ^= 1
        assert confirm_in([bytes(other)], OWN.shard) is None


def test_a_message_has_the_entry_as_it_came() -> None:
    entry = [b"head", b"", bytes(range(100))]
    frames = append(OWN, 5, 11, 9, 1.5, entry, 1)
    message = decode(frames)
    assert [array.data.tobytes() for array in message.arrays] == entry
    assert all(sent is given for sent, given in zip(frames[1:], entry, strict=True)), "not copied"
    found = (message.term, message.client, message.call, message.sequence, message.flags, message.incarnation)
    assert found == (5, 11, 9, 1_500_000, 1, 77)
    asked = decode(follow(OWN, 5))
    assert (asked.client, asked.incarnation, asked.worker, asked.shard, asked.term) == (77, 77, 1, 3, 5)
    assert FollowBody(OWN.name).name == "1.2.4d"


@pytest.mark.parametrize("command", list(Command))
def test_a_primary_hands_requests_of_clients_to_its_server(command: Command) -> None:
    is_clients = command not in (Command.FOLLOW, Command.APPEND, Command.LOST)
    for seen in (0, 6, 7):
        assert is_for_primary(encode(Message(command, term=seen)), 7) is is_clients
    assert not is_for_primary(encode(Message(command, term=8)), 7), "the shard may have another primary"


def test_what_has_no_whole_header_is_for_no_primary() -> None:
    assert not is_for_primary([], 7)
    assert not is_for_primary([bytes(HEADER.size - 1)], 7)
