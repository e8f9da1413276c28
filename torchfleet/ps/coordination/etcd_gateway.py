"""A client of etcd's JSON gateway (version 3), over plain HTTP or TLS. Environment variables name the key files.

A member that gives a bad answer is treated like a member that does not answer. Bad answers are: an error of etcd or of
a proxy before it, a redirect, which is not followed, an incomplete answer, too long an answer, JSON of another type.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from torchfleet.base.errors import CoordinatorUnreachable, RoleError
from torchfleet.base.prepared_types import prepared
from torchfleet.ps.coordination.timed_reply import read_reply

CA, CERT, KEY = "FLEET_ETCD_CA", "FLEET_ETCD_CERT", "FLEET_ETCD_KEY"
USER, PASSWORD_FILE = "FLEET_ETCD_USER", "FLEET_ETCD_PASSWORD_FILE"
_TIMEOUT = 0.4  # seconds for a connection, and again for the whole answer
_SHOWN = 200  # bytes of a bad answer in an error


@dataclass(frozen=True)
class Access:
    """How to access etcd. Without `tls`: unencrypted, and without a user."""

    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)


def secure_access(environment: Mapping[str, str] = os.environ) -> Access:
    """Access over TLS, with the files and the user that the environment names. Raises RoleError if a file is unusable,
    or if only one of two variables that belong together is set.
    """
    found = {name: environment.get(name, "") for name in (CA, CERT, KEY, USER, PASSWORD_FILE)}
    for one, other in ((CERT, KEY), (USER, PASSWORD_FILE)):
        if bool(found[one]) != bool(found[other]):
            raise RoleError(f"{one} and {other} belong together: set both, or none")
    try:
        tls = ssl.create_default_context(cafile=found[CA] or None)
        if found[CERT]:
            tls.load_cert_chain(found[CERT], found[KEY])
        password = Path(found[PASSWORD_FILE]).read_text().rstrip("\r\n") if found[USER] else ""
    except (OSError, ValueError) as error:  # an error of ssl is an OSError
        named = ", ".join(f"{name}={value}" for name, value in found.items() if value)
        raise RoleError(f"expected files in PEM, and one with a password ({named}), found: {error}") from None
    return Access(tls, found[USER], password)


def plain_access(environment: Mapping[str, str] = os.environ) -> Access:
    """Unencrypted access. Raises RoleError if the environment names files or a user, because they would not be used."""
    for name in (CA, CERT, KEY, USER, PASSWORD_FILE):
        if environment.get(name):
            raise RoleError(f"{name} is for an etcd with TLS: give --coordinator etcds://host:port/NAME, or unset it")
    return Access()


class Answer(msgspec.Struct):
    """The field that every answer of etcd has. A subclass adds the fields that are read."""

    header: dict[str, Any]


class _Token(Answer):
    token: Annotated[str, msgspec.Meta(pattern=r"^[!-~]+$")]  # it becomes a header


Kind = TypeVar("Kind", bound=msgspec.Struct)


class EtcdGateway:
    """Sends a request to the members of one etcd cluster in turn, until one answers. The next request tries that member
    first.
    """

    def __init__(self, places: Sequence[str], access: Access) -> None:
        """`places`: host:port of the members."""
        self._places, self._access = list(places), access
        self._token = ""  # the user's, which expires after some minutes

    @property
    def place(self) -> str:
        """The member that answered last."""
        return self._places[0]

    def ask(self, what: str, body: dict[str, Any], kind: type[Kind]) -> Kind:
        """Send a request, wait for the answer, and return it.

        Raises CoordinatorUnreachable, which says what each member did, if no member gives an answer of this kind. It is
        then unknown whether the request was carried out.
        """
        problems = []
        for place in list(self._places):
            try:
                answer = self._ask_one(place, what, body, kind)
            except (OSError, http.client.HTTPException, ValueError, _BadAnswer) as error:
                problems.append(f"{place}: {error or type(error).__name__}")
                continue
            self._places.remove(place)
            self._places.insert(0, place)
            return answer
        raise CoordinatorUnreachable(f"no etcd answers {what} ({'; '.join(problems)}). Is it running there?")

    def _ask_one(self, place: str, what: str, body: dict[str, Any], kind: type[Kind]) -> Kind:
        if not self._access.user:
            return self._post(place, what, body, kind)
        had_token = bool(self._token)
        if not had_token:
            self._log_in(place)
        try:
            return self._post(place, what, body, kind)
        except _BadAnswer as error:
            if not had_token or not error.is_refusal:
                raise
        self._log_in(place)  # the token has expired, or users were changed
        return self._post(place, what, body, kind)

    def _log_in(self, place: str) -> None:
        self._token = ""
        named = {"name": self._access.user, "password": self._access.password}
        self._token = self._post(place, "auth/authenticate", named, _Token).token

    def _post(self, place: str, what: str, body: dict[str, Any], kind: type[Kind]) -> Kind:
        tls = self._access.tls
        connection = (
            http.client.HTTPConnection(place, timeout=_TIMEOUT)
            if tls is None
            else http.client.HTTPSConnection(place, timeout=_TIMEOUT, context=tls)
        )
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        try:
            connection.connect()
            until = time.monotonic() + _TIMEOUT
            connection.request("POST", f"/v3/{what}", json.dumps(body), headers)
            status, text = read_reply(connection.sock, until)
        finally:
            connection.close()
        return _checked(status, text, kind)


class _BadAnswer(Exception):
    """A member's answer is not the one that etcd gives when it has carried out a request."""

    def __init__(self, text: str, is_refusal: bool = False) -> None:
        super().__init__(text)
        self.is_refusal = is_refusal


def _checked(status: int, text: bytes, kind: type[Kind]) -> Kind:
    if status == HTTPStatus.OK:
        try:
            return msgspec.json.decode(text, type=prepared(kind))
        except (ValueError, RecursionError) as error:
            raise _BadAnswer(f"expected an answer of etcd, found {text[:_SHOWN]!r} ({error})") from None
    hundreds = status // 100
    raise _BadAnswer(f"answered with status {status}: {text[:_SHOWN]!r}{_ADVICE.get(hundreds, '')}", hundreds == 4)


_ADVICE = {
    3: ". A redirect is not followed: give the address of etcd itself",
    4: f". Is this etcd 3.4 or later, and are {USER}, {PASSWORD_FILE} and the user's rights right?",
}
