"""A listener for HTTP on a port of this machine, which asks no name service and tells of no lost client."""

from __future__ import annotations

import socket
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from torchfleet.base.monitor.notices import tell


class HttpListener(HTTPServer):
    """Of IPv4 or IPv6, as the address is."""

    _has_told = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the search for the name of this machine, as HTTPServer does it: it may wait for a name server."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away, or was too slow, is nothing to tell of; a mistake of ours is, once."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError) and not self._has_told:
            self._has_told = True
            tell(f"port {self.server_port}: a request could not be answered: {error!r:.500}")
