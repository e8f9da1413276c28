"""Environment variables by name. A variable may have two names: ours and Paddle's."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torchfleet.base.errors import RoleError

NUMBER = re.compile(r"[0-9]{1,18}")  # int() may refuse longer ones


class NamedVariables:
    """Reads variables that may have several names. Those that are set must agree."""

    def __init__(self, environment: Mapping[str, str], is_collective: bool) -> None:
        self.environment, self._is_collective = environment, is_collective

    def get(self, *names: str) -> str:
        values = {name: value for name in names if (value := self.environment.get(name))}
        if len(set(values.values())) > 1:
            raise RoleError(
                " and ".join(f"{name}={value!r}" for name, value in values.items())
                + " say different things. Set one of them, or make them agree."
            )
        if values:
            return next(iter(values.values()))
        role = "FLEET_ROLE" if "FLEET_ROLE" in self.environment else "TRAINING_ROLE"
        if self._is_collective:
            known = ("WORLD_SIZE", "RANK", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ID")
            role = next(name for name in known if self.environment.get(name))
        raise RoleError(
            f"{role} is set, but {' (or '.join(names)}{')' * (len(names) - 1)} is missing. Set it, or start "
            "with fleetrun."
        )

    def endpoints(self, *names: str) -> tuple[str, ...]:
        return endpoints_of(self.get(*names), " / ".join(names))

    def number(self, *names: str, at_least: int = 0) -> int:
        value = self.get(*names)
        if not NUMBER.fullmatch(value.removeprefix("-")) or int(value) < at_least:
            raise RoleError(f"{' / '.join(names)} must be a number of at least {at_least}, found {value!r}")
        return int(value)


def endpoints_of(text: str, source: str) -> tuple[str, ...]:
    """Parse addresses `host:port`, separated by commas. An error names `source`, the variable or argument."""
    addresses = tuple(address.strip() for address in text.split(",") if address.strip())
    is_replicated = "server" in source.lower()  # | separates the replicas of a server
    places = [place for address in addresses for place in (address.split("|") if is_replicated else [address])]
    for address in places:
        host, colon, port = address.rpartition(":")
        if not (host and colon and NUMBER.fullmatch(port) and int(port) < 1 << 16):
            raise RoleError(f"{source}: an address must be host:port, found {address!r} in {text!r}")
    if len(set(places)) != len(places):
        raise RoleError(f"{source}: an address appears twice in {text!r}")
    return addresses
