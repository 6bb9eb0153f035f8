"""A broker that closes a connection, without a word."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy(threading.Thread):
    """Passes bytes on, and cuts a connection that sends certain ones."""

    def __init__(self, port: int, cut: bytes) -> None:
        super().__init__(daemon=True)
        self._port, self._cut = port, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                for source, target, cut in ((client, server, self._cut), (server, client, None)):
                    threading.Thread(target=self._pass_on, args=(source, target, cut), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, cut: bytes | None) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                if cut is not None and cut in data:
                    break
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.join()
