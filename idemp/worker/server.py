"""An HTTP server of a few pages, for health checks and metrics."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from idemp.errors import ConfigurationError

__all__ = ["Page", "Server"]


class Page(NamedTuple):
    """An answer.

    Example:
        >>> Page(200, "application/json", b"{}").status
        200
    """

    status: int
    media_type: str
    body: bytes


class Server:
    """Answers `GET` for some paths, in threads.

    Args:
        name: Of the settings `NAME_host` and `NAME_port`.
        host: Address to listen at.
        port: TCP port; 0 takes a free one.
        pages: Return the page of each path, by what the client accepts; called in a thread of the server.

    Attributes:
        port: TCP port that it listens at.

    Raises:
        ConfigurationError: The address cannot be used.

    Example:
        >>> from urllib.request import urlopen
        >>> server = Server("health", "127.0.0.1", 0, {"/ready": lambda accept: Page(200, "text/plain", b"yes")})
        >>> urlopen(f"http://127.0.0.1:{server.port}/ready").read()
        b'yes'
        >>> server.close()
    """

    def __init__(self, name: str, host: str, port: int, pages: Mapping[str, Callable[[str], Page]]) -> None:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = pages.get(self.path.partition("?")[0].rstrip("/"))
                missing = Page(404, "text/plain", f"pages: {' '.join(pages)}\n".encode())
                status, media_type, body = page(self.headers.get("Accept", "")) if page else missing
                self.send_response(status)
                self.send_header("Content-Type", media_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Log nothing: probes come every few seconds."""

        class Listening(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Listening((host, port), Answer)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(f"{name}_host={host}, {name}_port={port} cannot be used: {error}") from None
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name=f"idemp-{name}", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
