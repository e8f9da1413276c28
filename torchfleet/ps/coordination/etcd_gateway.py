"""A client of etcd's JSON gateway (version 3), over plain HTTP or TLS. Environment variables name the key files."""

from __future__ import annotations

import http.client
import json
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchfleet.base.errors import CoordinatorUnreachable, FleetError, RoleError

CA, CERT, KEY = "FLEET_ETCD_CA", "FLEET_ETCD_CERT", "FLEET_ETCD_KEY"
USER, PASSWORD_FILE = "FLEET_ETCD_USER", "FLEET_ETCD_PASSWORD_FILE"
_TIMEOUT = 0.4  # seconds for one answer: a primary that waits longer cannot be sure to be primary


@dataclass(frozen=True)
class Access:
    """How to access etcd. Without `tls`: in the clear, and without a user."""

    tls: ssl.SSLContext | None = None
    user: str = ""
    password: str = field(default="", repr=False)


def secure_access(environment: Mapping[str, str] = os.environ) -> Access:
    """Access over TLS, with the files and the user that the environment names. Raises RoleError if one is unusable."""
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
    """Access in the clear. Raises RoleError if the environment names keys, because they would not be used."""
    for name in (CA, CERT, KEY, USER, PASSWORD_FILE):
        if environment.get(name):
            raise RoleError(f"{name} is for an etcd with TLS: give --coordinator etcds://host:port/NAME, or unset it")
    return Access()


class EtcdGateway:
    """Sends requests to the members of one etcd cluster, until one answers. The next request tries that one first."""

    def __init__(self, places: Sequence[str], access: Access) -> None:
        """`places`: host:port of the members."""
        self._places, self._access = list(places), access
        self._token = ""  # the user's, which expires after some minutes

    @property
    def place(self) -> str:
        """The member that answered last."""
        return self._places[0]

    def ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request, wait for the answer, and return it.

        Raises CoordinatorUnreachable if no member answers, FleetError if etcd refuses.
        """
        if self._access.user and not self._token:
            self._log_in()
        status, text = self._post(what, body)
        if status == http.HTTPStatus.UNAUTHORIZED and self._token:  # the token has expired
            self._log_in()
            status, text = self._post(what, body)
        return self._answer(what, status, text)

    def _log_in(self) -> None:
        self._token = ""
        status, text = self._post("auth/authenticate", {"name": self._access.user, "password": self._access.password})
        self._token = str(self._answer("auth/authenticate", status, text).get("token", ""))

    def _answer(self, what: str, status: int, text: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if status != http.HTTPStatus.OK or not isinstance(answer, dict):
            raise FleetError(f"etcd at {self.place} answered {what} with status {status}: {text[:200]!r}")
        return answer

    def _post(self, what: str, body: dict[str, Any]) -> tuple[int, bytes]:
        problems = []
        for place in self._places:
            try:
                answer = self._post_to(place, f"/v3/{what}", json.dumps(body))
            except (OSError, http.client.HTTPException) as error:
                problems.append(f"{place}: {error or type(error).__name__}")
                continue
            self._places.remove(place)
            self._places.insert(0, place)
            return answer
        raise CoordinatorUnreachable(f"no etcd answers {what} ({'; '.join(problems)}). Is it running there?")

    def _post_to(self, place: str, path: str, body: str) -> tuple[int, bytes]:
        tls = self._access.tls
        connection = (
            http.client.HTTPConnection(place, timeout=_TIMEOUT)
            if tls is None
            else http.client.HTTPSConnection(place, timeout=_TIMEOUT, context=tls)
        )
        headers = {"Content-Type": "application/json", **({"Authorization": self._token} if self._token else {})}
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()
