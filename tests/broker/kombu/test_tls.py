"""TLS: over a proxy that ends it in front of the broker."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import ExitStack, closing, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

from idemp.broker.kombu import KombuBroker
from idemp.broker.port import Ack, Topology
from idemp.errors import BrokerUnavailable
from tests.broker.kombu.tools import SOON, an_output, received

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOPOLOGY = Topology(exchange="", queues=("work",))


def certificate(folder: Path, name: str) -> Path:
    """A certificate with its key in one file, signed by itself, for a host of this name."""
    file = folder / "both.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=test -addext subjectAltName={name}"
    made = subprocess.run([*command.split(), "-keyout", "-"], capture_output=True, check=True)
    file.write_bytes(made.stdout)
    return file


class Proxy:
    """Takes TLS connections and passes them on in the clear."""

    def __init__(self, certificate: Path, target: int) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._target = target
        self._open = ExitStack()
        self._listener = self._open.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._open.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                plain = self._listener.accept()[0]
                try:
                    client = self._open.enter_context(self._context.wrap_socket(plain, server_side=True))
                except OSError:  # the client does not like the certificate
                    plain.close()
                    continue
                server = self._open.enter_context(socket.create_connection(("127.0.0.1", self._target)))
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    @staticmethod
    def _pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while some := source.recv(65536):
                sink.sendall(some)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def tls_url(rabbitmq_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """The vhost over TLS; the certificate's host is the test's parameter."""
    if not shutil.which("openssl"):
        pytest.skip("openssl makes the certificate")
    file = certificate(tmp_path, request.param)
    parts = urlsplit(rabbitmq_url)
    with closing(Proxy(file, parts.port)) as proxy:
        yield f"amqps://guest:guest@127.0.0.1:{proxy.port}{parts.path}?ssl_ca_certs={file}"


@pytest.mark.parametrize("tls_url", ["IP:127.0.0.1"], indirect=True)
def test_everything_works_over_tls(tls_url: str) -> None:
    """Declaring, thousand in flight, bodies larger than a TLS record, receiving, closing."""
    broker = KombuBroker(tls_url)
    broker.declare(TOPOLOGY)
    bodies = [b"x" * (number * 50) for number in range(1000)]
    with broker.publisher() as publisher:
        assert set(publisher.publish([an_output("work", body=body) for body in bodies], SOON)) == {None}
        publisher.keep_alive()
        assert publisher.publish([an_output("work", body=b"last")], SOON) == [None]
    with closing(broker.receiver(["work"], prefetch=100)) as receiver:
        for body in [*bodies, b"last"]:
            delivery = received(receiver)
            assert delivery.message.body == body
            receiver.keep_alive()
            receiver.settle(delivery, Ack())
        assert receiver.receive(0.1) is None
    assert broker.depth("work") == 0


@pytest.mark.parametrize("tls_url", ["DNS:somebody.else"], indirect=True)
def test_certificate_of_another_host_is_refused(tls_url: str) -> None:
    """Trusted, but not this host's."""
    with pytest.raises(BrokerUnavailable, match="certificate"):
        KombuBroker(tls_url).declare(TOPOLOGY)


@pytest.mark.parametrize("tls_url", ["IP:127.0.0.1"], indirect=True)
def test_untrusted_certificate_is_refused(tls_url: str) -> None:
    """Nobody vouches for it."""
    with pytest.raises(BrokerUnavailable, match="certificate"):
        KombuBroker(tls_url.partition("?")[0]).declare(TOPOLOGY)
