"""Access control of the page: a request must use a name of this machine, come from the page, and have the token."""

from __future__ import annotations

import functools
import hashlib
import hmac
import os
import secrets
from email.message import Message
from http.cookies import CookieError, SimpleCookie
from pathlib import Path

from torchfleet.base.errors import FleetError
from torchfleet.base.monitor.host_names import HostNames, is_loopback

_NUM_BYTES = 16  # of a random token: the URL with it fits into 80 columns
_SHORTEST = 16  # characters of a token
_LONGEST = 200


class Access:
    """`token`: None admits every client that can reach the port; use it on loopback only."""

    def __init__(self, host: str, token: str | None) -> None:
        if token is None and not is_loopback(host):
            raise FleetError(f"the dashboard on {host} can be reached from other machines: it needs a token")
        self.token = token
        self._names = HostNames(host)

    def is_known_host(self, header: str | None) -> bool:
        """Whether the Host header names this machine."""
        return self._names.is_known(header or "")

    def is_own_page(self, headers: Message) -> bool:
        """Whether the browser reports that this page or the user sent the request. Other programs report nothing."""
        return headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")

    def is_token(self, given: str) -> bool:
        return self.token is None or _same(given, self.token)

    def may_read(self, headers: Message, cookie_name: str) -> bool:
        """Whether a request has the cookie of a login, or the token itself: `Authorization: Bearer TOKEN`."""
        if self.token is None:
            return True
        scheme, _, given = (headers.get("Authorization") or "").partition(" ")
        if scheme.lower() == "bearer":
            return _same(given.strip(), self.token)
        try:
            found = SimpleCookie(headers.get("Cookie") or "").get(cookie_name)
        except CookieError:
            return False
        return found is not None and _same(found.value, self.cookie())

    def cookie(self) -> str:
        """The value that a browser stores instead of the token."""
        return hmac.new((self.token or "").encode(), b"fleet dashboard cookie", hashlib.sha256).hexdigest()


def new_token() -> str:
    return secrets.token_urlsafe(_NUM_BYTES)


@functools.cache
def token_of_this_process() -> str:
    """Return the same token for every attempt of a job, so that an open page keeps working."""
    return new_token()


def token_of(path: str | None) -> str:
    """Return the token in this file, which is created if missing; without a path, a random one. Raises FleetError."""
    if path is None:
        return new_token()
    file = Path(path)
    try:
        if not file.exists():
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as made:
                made.write(new_token() + "\n")
        if file.stat().st_mode & 0o077:
            raise FleetError(f"others can read the token in {file}: chmod 600 {file}")
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"the token cannot be read from {file}: {error}") from None
    if not (_SHORTEST <= len(token) <= _LONGEST and token.isascii() and token.isprintable() and " " not in token):
        raise FleetError(
            f"expected a token of {_SHORTEST} to {_LONGEST} letters and digits in {file}, found {len(token)} characters"
            ": remove the file, and one is made"
        )
    return token


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
