"""A TCP proxy that cuts connections, or holds bytes back: for answers that are lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

Cut = str  # "", "before" what a client has sent reaches the server, or "after" the server has answered


class Proxy:
    """Forwards connections to a port of 127.0.0.1.

    Args:
        decide: Called with what a client has sent; says whether its connection ends there.
        hold: Called with what the server has sent; returns how many of these bytes to forward before `release`.
    """

    def __init__(
        self, port: int, decide: Callable[[bytes], Cut] = lambda _: "", hold: Callable[[bytes], int | None] = lambda _: None
    ) -> None:
        self._target, self._decide, self._hold = port, decide, hold
        self.released = threading.Event()
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        for each in (self._listener, *self._sockets):
            _end(each)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [client, server]
                answers = _Answers()
                threading.Thread(target=self._forward, args=(client, server, answers), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client, answers), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket, answers: _Answers) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                cut = self._decide(data)
                if cut == "before":
                    break
                if cut == "after":
                    answers.swallow.set()
                server.sendall(data)
                if cut == "after":
                    assert answers.swallowed.wait(60)
                    break
        _end(client)
        _end(server)

    def _back(self, server: socket.socket, client: socket.socket, answers: _Answers) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if answers.swallow.is_set():
                    answers.swallowed.set()
                    break
                held = self._hold(data)
                if held is not None:
                    client.sendall(data[:held])
                    self.released.wait()
                    data = data[held:]
                client.sendall(data)
        _end(client)
        _end(server)


class _Answers:
    def __init__(self) -> None:
        self.swallow, self.swallowed = threading.Event(), threading.Event()


def _end(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
