"""The fault proxy, before a server that the test holds in its hands."""

from __future__ import annotations

import errno
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from idemp.testing import FaultProxy
from tests.servers.process import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

QUIET = 0.15  # so long nothing may come where nothing should


class Ends:
    """A proxy, and both ends of a connection through it."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.proxy = FaultProxy(*listener.getsockname())
        self.opened: list[socket.socket] = []

    def connect(self) -> tuple[socket.socket, socket.socket]:
        client = socket.create_connection(self.proxy.address, 5)
        server, _ = self.listener.accept()
        server.settimeout(5)
        self.opened += [client, server]
        return client, server

    def threads(self) -> list[str]:
        """The proxy's threads; there may be other proxies."""
        return [thread.name for thread in threading.enumerate() if thread.name == f"fault-proxy-{self.proxy.port}"]

    def close(self) -> None:
        self.proxy.close()
        for end in self.opened:
            end.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Ends(listener)) as made:
        yield made
    assert not made.threads()


def quiet(end: socket.socket) -> bool:
    """Whether nothing comes, not even an end."""
    end.settimeout(QUIET)
    try:
        end.recv(1)
    except TimeoutError:
        return True
    finally:
        end.settimeout(5)
    return False


def whole(end: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count and (more := end.recv(count - len(got))):
        got += more
    return got


def was_reset(end: socket.socket) -> bool:
    try:
        return bool(end.recv(1)) and False
    except ConnectionResetError:
        return True


@contextmanager
def taking(seconds: float) -> Iterator[None]:
    """The block takes at least so long."""
    began = time.monotonic()
    yield
    assert time.monotonic() - began >= seconds


def test_passes_on_both_ways_and_counts(ends: Ends) -> None:
    client, server = ends.connect()
    much = bytes(range(256)) * 8192
    sending = threading.Thread(target=client.sendall, args=(much,))
    sending.start()
    assert whole(server, len(much)) == much
    sending.join()
    server.sendall(b"thanks")
    assert whole(client, 6) == b"thanks"
    assert (ends.proxy.bytes_to_server, ends.proxy.bytes_to_client) == (len(much), 6)
    assert (ends.proxy.connections, ends.proxy.open_connections) == (1, 1)


def test_an_end_is_passed_on_as_a_half_of_it(ends: Ends) -> None:
    client, server = ends.connect()
    client.shutdown(socket.SHUT_WR)
    assert server.recv(1) == b""
    server.sendall(b"late answer")
    assert whole(client, 11) == b"late answer"
    server.close()
    assert client.recv(1) == b""
    wait_until(lambda: ends.proxy.open_connections == 0, "the connection is forgotten")


def test_a_reset_is_passed_on_as_one(ends: Ends) -> None:
    client, server = ends.connect()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    server.close()
    assert was_reset(client)


def test_cut_closes_all_and_lets_new_ones_in(ends: Ends) -> None:
    pairs = [ends.connect(), ends.connect()]
    ends.proxy.cut()
    assert ends.proxy.open_connections == 0
    assert [end.recv(1) for pair in pairs for end in pair] == [b""] * 4
    client, server = ends.connect()
    client.sendall(b"new")
    assert whole(server, 3) == b"new"
    assert ends.proxy.connections == 3


def test_cut_by_reset(ends: Ends) -> None:
    client, server = ends.connect()
    ends.proxy.cut(reset=True)
    assert was_reset(client)
    assert was_reset(server)


def test_refuse_lets_nobody_in_and_keeps_who_is_there(ends: Ends) -> None:
    client, server = ends.connect()
    for _ in range(2):
        ends.proxy.refuse()
        with pytest.raises(OSError) as refused:
            socket.create_connection(ends.proxy.address, 5)
        assert refused.value.errno == errno.ECONNREFUSED
        client.sendall(b"x")
        assert whole(server, 1) == b"x"
        port = ends.proxy.port
        ends.proxy.heal()
        assert ends.proxy.port == port
        ends.connect()
    assert ends.proxy.connections == 3


def test_refuse_can_count_who_tried(ends: Ends) -> None:
    ends.proxy.refuse(accept=True)
    for _ in range(3):
        with suppress(ConnectionResetError), socket.create_connection(ends.proxy.address, 5) as client:
            assert was_reset(client)
    wait_until(lambda: ends.proxy.connections == 3, "all three are counted")
    wait_until(lambda: ends.proxy.open_connections == 0, "all three are forgotten")
    ends.proxy.heal()
    ends.connect()


def test_without_a_server_clients_are_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    reset = []
    with FaultProxy(*address) as proxy:
        try:
            with socket.create_connection(proxy.address, 5) as client:
                reset.append(was_reset(client))
        except ConnectionResetError:  # a slow client sees it while it connects
            reset.append(True)
    assert reset == [True]


@pytest.mark.parametrize("direction", ["to_server", "to_client", "both"])
def test_stall_keeps_what_comes_and_heal_lets_it_go_on(ends: Ends, direction: str) -> None:
    client, server = ends.connect()
    ends.proxy.stall(direction)  # type: ignore[arg-type]
    later = [*ends.connect(), client, server]
    for end in later:
        end.sendall(b"ping")
    stopped = {"to_server": later[1::2], "to_client": later[::2], "both": later}[direction]
    assert all(quiet(end) for end in stopped)
    assert all(whole(end, 4) == b"ping" for end in later if end not in stopped)
    ends.proxy.heal()
    assert all(whole(end, 4) == b"ping" for end in stopped)


def test_stall_holds_back_an_end_too(ends: Ends) -> None:
    client, server = ends.connect()
    ends.proxy.stall("to_server")
    client.close()
    assert quiet(server)
    ends.proxy.heal()
    assert server.recv(1) == b""


@pytest.mark.parametrize("direction", ["to_server", "to_client"])
def test_half_open_swallows_in_one_direction(ends: Ends, direction: str) -> None:
    client, server = ends.connect()
    ends.proxy.half_open(direction)  # type: ignore[arg-type]
    speaker, listener = (client, server) if direction == "to_server" else (server, client)
    speaker.sendall(b"into the void")
    assert quiet(listener)
    listener.sendall(b"heard")
    assert whole(speaker, 5) == b"heard"
    speaker.close()
    assert quiet(listener), "the peer's end is not told either"
    ends.proxy.heal()
    assert was_reset(listener)


def test_half_open_spares_connections_that_lost_nothing(ends: Ends) -> None:
    client, server = ends.connect()
    ends.proxy.half_open()
    ends.proxy.heal()
    client.sendall(b"x")
    assert whole(server, 1) == b"x"


def test_slow_by_rate_and_by_delay(ends: Ends) -> None:
    client, server = ends.connect()
    ends.proxy.slow(10_000)
    with taking(0.2):
        client.sendall(b"x" * 2_500)
        assert len(whole(server, 2_500)) == 2_500
    ends.proxy.slow(delay=0.2, direction="to_client")
    with taking(0.2):
        server.sendall(b"y")
        assert whole(client, 1) == b"y"
    ends.proxy.slow(1)
    client.sendall(b"z" * 1_000)
    ends.proxy.heal()
    assert whole(server, 1_000) == b"z" * 1_000
    with pytest.raises(ValueError, match="stall"):
        ends.proxy.slow(0)


def test_cut_before_the_bytes(ends: Ends) -> None:
    client, server = ends.connect()
    other, _ = ends.connect()
    trigger = ends.proxy.cut_when(b"COMMIT", before=True)
    client.sendall(b"INSERT; ")
    assert whole(server, 8) == b"INSERT; "
    assert not trigger.triggered
    client.sendall(b"more; COMMIT; then")
    assert trigger.wait_triggered(5)
    assert whole(server, 100) == b"more; "
    assert client.recv(1) == other.recv(1) == b""


def test_cut_there_only(ends: Ends) -> None:
    client, server = ends.connect()
    other, its_server = ends.connect()
    trigger = ends.proxy.cut_when(b"COMMIT", only_there=True, reset=True)
    client.sendall(b"COMMIT")
    assert trigger.wait_triggered(5)
    assert was_reset(client)
    assert was_reset(server)
    other.sendall(b"COMMIT")
    assert whole(its_server, 6) == b"COMMIT", "a trigger happens once"


def test_cut_the_answer(ends: Ends) -> None:
    client, server = ends.connect()
    trigger = ends.proxy.cut_when(b"COMMIT", before=False, answer_within=5)
    client.sendall(b"COMM")
    client.sendall(b"IT;")
    assert whole(server, 7) == b"COMMIT;"
    assert not trigger.triggered
    server.sendall(b"done")
    assert trigger.wait_triggered(5)
    assert client.recv(10) == b""


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_cut_where_no_answer_comes(ends: Ends, seconds: float) -> None:
    client, server = ends.connect()
    trigger = ends.proxy.cut_when(b"ACK", before=False, answer_within=seconds)
    with taking(seconds):
        client.sendall(b"ACK")
        assert trigger.wait_triggered(5)
    assert whole(server, 10) == b"ACK"
    assert client.recv(1) == b""


@pytest.mark.parametrize("pause", [0.0, 0.001])
def test_no_answer_is_quicker_than_a_cut(ends: Ends, pause: float) -> None:
    """Not even where the cut does not wait for it, or waits for about as long as the answer takes."""
    for _ in range(200):
        client, server = ends.connect()
        other, its_server = ends.connect()
        trigger = ends.proxy.cut_when(b"ACK", before=False, answer_within=pause)
        client.sendall(b"ACK")
        with suppress(OSError):
            if whole(server, 3) == b"ACK":
                server.sendall(b"answer")
                its_server.sendall(b"answer of another")
        assert client.recv(10) == b""
        assert trigger.wait_triggered(5)
        if not pause:
            assert other.recv(10) == b""
        ends.proxy.cut()


def test_bytes_spread_over_chunks_never_arrive_whole(ends: Ends) -> None:
    client, server = ends.connect()
    trigger = ends.proxy.cut_when(b"COMMIT")
    arrived = b""
    for byte in b"COMMIT":
        client.sendall(bytes([byte]))
        with suppress(OSError):
            arrived += server.recv(1)
    assert trigger.wait_triggered(5)
    assert arrived == b"COMMI"


def test_the_nth_time_in_one_chunk_or_in_several_and_on_any_connection(ends: Ends) -> None:
    client, server = ends.connect()
    other, its_server = ends.connect()
    client.sendall(b"ab")
    assert whole(server, 2) == b"ab"
    trigger = ends.proxy.cut_when(b"ab", nth=4)
    client.sendall(b"ab-ab-")
    assert whole(server, 6) == b"ab-ab-"
    other.sendall(b"ab-x")
    assert whole(its_server, 4) == b"ab-x"
    assert not trigger.triggered
    client.sendall(b"1ab2")
    assert trigger.wait_triggered(5)
    assert whole(server, 10) == b"1"


def test_cut_after_so_many_bytes(ends: Ends) -> None:
    client, server = ends.connect()
    client.sendall(b"before")
    assert whole(server, 6) == b"before"
    trigger = ends.proxy.cut_after(5)
    client.sendall(b"12")
    client.sendall(b"34567")
    assert trigger.wait_triggered(5)
    assert whole(server, 10) == b"12345"


def test_any_fault_can_be_triggered(ends: Ends) -> None:
    client, server = ends.connect()
    stalled = ends.proxy.when(b"2", lambda: ends.proxy.stall("to_client"), direction="to_client")
    server.sendall(b"12")
    assert stalled.wait_triggered(5)
    assert whole(client, 1) == b"1"
    assert quiet(client)
    ends.proxy.heal()
    assert whole(client, 1) == b"2"
    swallowed = ends.proxy.after(3, ends.proxy.half_open)
    client.sendall(b"12345")
    assert swallowed.wait_triggered(5)
    assert whole(server, 3) == b"123"
    assert quiet(server)


def test_two_triggers_happen_in_the_order_of_their_bytes(ends: Ends) -> None:
    client, server = ends.connect()
    happened: list[str] = []
    second = ends.proxy.when(b"second", lambda: happened.append("second"))
    first = ends.proxy.when(b"first", lambda: happened.append("first"))
    client.sendall(b"the first and the second")
    assert whole(server, 24) == b"the first and the second"
    assert first.wait_triggered(5)
    assert second.wait_triggered(5)
    assert happened == ["first", "second"]


def test_heal_disarms_triggers(ends: Ends) -> None:
    client, server = ends.connect()
    trigger = ends.proxy.cut_when(b"x")
    ends.proxy.heal()
    client.sendall(b"x")
    assert whole(server, 1) == b"x"
    assert not trigger.wait_triggered(0)


def test_senseless_triggers_are_refused(ends: Ends) -> None:
    for wrong in (lambda: ends.proxy.cut_when(b""), lambda: ends.proxy.cut_when(b"x", nth=0)):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(ValueError):
        ends.proxy.cut_when(b"x" * 5000)
    with pytest.raises(ValueError):
        ends.proxy.cut_after(0)


@pytest.mark.parametrize("fault", ["stall", "half_open", "refuse", "slow"])
def test_close_ends_every_thread_in_any_state(ends: Ends, fault: str) -> None:
    client, _ = ends.connect()
    if fault == "slow":
        ends.proxy.slow(1)
    else:
        getattr(ends.proxy, fault)()
    client.sendall(b"x" * 100_000)
    assert ends.threads()
    ends.proxy.close()
    ends.proxy.close()
    assert not ends.threads()


def test_heal_in_the_midst_of_a_refusal(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread: it listens again only where nobody does any more."""
    shutdown, failed = socket.socket.shutdown, []

    def heal() -> None:
        try:
            ends.proxy.heal()
        except OSError as error:
            failed.append(error)

    healing = threading.Thread(target=heal)

    def slowly(end: socket.socket, how: int) -> None:
        if healing.ident is None:
            healing.start()
            healing.join(0.1)
        shutdown(end, how)

    monkeypatch.setattr(socket.socket, "shutdown", slowly)
    ends.proxy.refuse()
    healing.join()
    assert not failed
    ends.connect()


def test_hundreds_of_cuts_leave_nothing_behind(ends: Ends) -> None:
    for number in range(200):
        client, server = ends.connect()
        client.sendall(b"x")
        assert whole(server, 1) == b"x"
        ends.proxy.cut(reset=bool(number % 2))
        client.close()
        server.close()
    assert ends.proxy.connections == 200
    assert ends.proxy.open_connections == 0


@pytest.mark.parametrize(
    ("url", "through"),
    [
        ("pyamqp://guest:p%40ss@127.0.0.1:5672//", "pyamqp://guest:p%40ss@{}//"),
        ("postgresql+psycopg://me@db/shop?connect_timeout=3", "postgresql+psycopg://me@{}/shop?connect_timeout=3"),
        ("redis://cache:6379", "redis://{}"),
    ],
)
def test_urls_through_the_proxy(ends: Ends, url: str, through: str) -> None:
    assert ends.proxy.through(url) == through.format(f"127.0.0.1:{ends.proxy.port}")


def test_before_a_real_database(postgresql_url: str) -> None:
    url = sa.make_url(postgresql_url)
    with FaultProxy(url.host or "", url.port or 0) as proxy:
        engine = sa.create_engine(proxy.through(postgresql_url))
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE kept (n int)"))
        trigger = proxy.cut_when(b"COMMIT\0", direction="to_client", before=True)
        with engine.connect() as connection:
            connection.execute(sa.text("INSERT INTO kept VALUES (1)"))
            with pytest.raises(sa.exc.OperationalError):
                connection.commit()
        assert trigger.wait_triggered(5)
        with engine.connect() as connection:
            assert connection.scalar(sa.text("SELECT count(*) FROM kept")) == 1
        engine.dispose()
