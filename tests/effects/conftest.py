"""A mail server and a web server of our own, each of which remembers what it was asked."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID, uuid4

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope

from idemp.effects import EffectRun
from tests.servers.process import free_port


def a_run(**given: Any) -> EffectRun:
    values = {"id": uuid4(), "name": "effect", "attempt": 1, "timeout": timedelta(seconds=5), "consumer": "shop"}
    return EffectRun(**{**values, **given})


class Post:
    """A real SMTP server: which Message-IDs it took, how often, and for whom."""

    def __init__(self) -> None:
        self.mails: list[Envelope] = []
        self.answers: dict[str, str] = {}  # to these recipients; "DATA" for what it says of the mail itself
        self.port = free_port()

    def ids(self) -> Counter[str]:  # no property: aiosmtpd reads all of a handler's for each connection
        return Counter(message_from_bytes(mail.content)["Message-ID"] for mail in list(self.mails))

    async def handle_RCPT(self, server: SMTP, session: Any, envelope: Envelope, address: str, options: Any) -> str:  # noqa: N802
        if (answer := self.answers.get(address)) is not None:
            return answer
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: SMTP, session: Any, envelope: Envelope) -> str:  # noqa: N802
        if (answer := self.answers.get("DATA")) is not None:
            return answer
        self.mails.append(envelope)
        return "250 taken"


@pytest.fixture
def post() -> Iterator[Post]:
    made = Post()
    controller = Controller(made, hostname="127.0.0.1", port=made.port, server_hostname="post.test")
    controller.start()
    yield made
    controller.stop()


@dataclass
class Web:
    """A web server that honours `Idempotency-Key`: it does once what it is asked several times."""

    url: str = ""
    asked: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    done: dict[str, bytes] = field(default_factory=dict)
    answer: Callable[[int], tuple[int, dict[str, str], bytes]] = lambda number: (201, {}, b"{}")
    lost_answers: int = 0  # of which the connection breaks once it is done


@pytest.fixture
def web() -> Iterator[Web]:
    made, lock = Web(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            with lock:
                made.asked.append((self.command, self.path, dict(self.headers), body))
                status, headers, content = made.answer(len(made.asked))
                key = self.headers["Idempotency-Key"]
                if 200 <= status < 300:
                    made.done.setdefault(key, body)
                    if made.lost_answers:
                        made.lost_answers -= 1
                        self.close_connection = True
                        return
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_PUT = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None: ...

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: Any) -> None: ...  # who asked has hung up

    server = Server(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


def key_of(output_id: UUID) -> str:
    return f'"{output_id}"'
