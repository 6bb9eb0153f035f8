"""What a child does with things that its parent has in use: `python -m tests.forks.corners NAME…`."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import delete, func, insert, select
from sqlalchemy.exc import StatementError
from sqlalchemy.orm import scoped_session, sessionmaker

from idemp.broker.port import Ack
from idemp.errors import BrokerUnavailable, StoreError
from tests.broker.given import output
from tests.forks import wired
from tests.forks.wired import effect

SERVICE: Any = wired.SERVICE
Q = wired.QUEUE


class Child:
    """A forked child that runs a generator up to its yields, each when it is told to go on."""

    def __init__(self, steps: Callable[[], Iterator[None]], fork: Callable[[], int] = os.fork) -> None:
        self._ours, theirs = socket.socketpair()
        self.pid = fork()
        if self.pid:
            theirs.close()
            return
        for _ in steps():
            theirs.sendall(b".")
            theirs.recv(1)
        # As any program's end: with all that is registered for it.
        sys.exit()

    def wait(self) -> None:
        """Wait until it has come to its next yield."""
        assert self._ours.recv(1) == b".", f"the child ended with {self.end()}"

    def go_on(self) -> None:
        """Let it go on."""
        self._ours.sendall(b".")

    def end(self) -> int:
        """Wait for its end; its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def count(number: int) -> int:
    with SERVICE.engine.connect() as connection:
        return int(connection.scalar(select(func.count()).where(effect.c.number == number)))


def transaction() -> None:
    """A transaction that is open in the thread that forks stays the parent's, whatever the child does with it."""
    with SERVICE.engine.begin() as connection:
        connection.execute(insert(effect).values(number=1))

        def steps() -> Iterator[None]:
            with pytest.raises((StoreError, StatementError), match="opened by the parent"):
                connection.execute(insert(effect).values(number=1))
            SERVICE.settle(20)
            connection.close()
            yield

        child = Child(steps)
        child.wait()
        child.go_on()
        assert child.end() == 0
        connection.execute(insert(effect).values(number=1))
    assert count(1) == 2
    assert count(20) == 1


def end_of_the_child() -> None:
    """A child that ends with a transaction of its parent's in its hands, as by an exception, ends nothing of it."""
    with SERVICE.engine.begin() as connection:
        connection.execute(insert(effect).values(number=1))
        child = Child(lambda: iter([None]))
        child.wait()
        child.go_on()
        assert child.end() == 0
        connection.execute(insert(effect).values(number=1))
    assert count(1) == 2


def thread_local() -> None:
    """What another thread keeps in thread-local variables is not rolled back by the child, whenever it is collected."""
    sessions, kept = scoped_session(sessionmaker(SERVICE.engine)), threading.local()
    begun, go_on = threading.Event(), threading.Event()

    def other() -> None:
        kept.raw = SERVICE.engine.raw_connection()  # in no cycle: gone before the first line of Python in the child
        kept.raw.cursor().execute("INSERT INTO effect (number) VALUES (9)")
        sessions().execute(insert(effect).values(number=1))
        begun.set()
        go_on.wait()
        sessions().execute(insert(effect).values(number=1))
        sessions().commit()
        kept.raw.cursor().execute("INSERT INTO effect (number) VALUES (9)")
        kept.raw.commit()
        kept.raw.close()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()

    def steps() -> Iterator[None]:
        gc.collect()
        yield

    child = Child(steps)
    child.wait()
    child.go_on()
    assert child.end() == 0
    go_on.set()
    thread.join()
    assert (count(1), count(9)) == (2, 2)


def publisher() -> None:
    """Parent and child each publish on a connection of their own; neither closes the other's."""
    assert SERVICE.publisher.publish([output(b"parent", key=Q)], 30) == [None]
    link = vars(SERVICE.publisher).get("_link") or vars(SERVICE.publisher).get("_line")

    def steps() -> Iterator[None]:
        assert SERVICE.publisher.publish([output(b"child", key=Q)], 30) == [None]
        yield
        SERVICE.publisher.close()
        assert SERVICE.publisher.publish([output(b"child again", key=Q)], 30) == [None]
        if hasattr(link, "close"):
            link.close()

    child = Child(steps)
    child.wait()
    assert SERVICE.publisher.publish([output(b"parent beside it", key=Q)], 30) == [None]
    child.go_on()
    assert child.end() == 0
    assert SERVICE.publisher.publish([output(b"parent again", key=Q)], 30) == [None]
    assert link is (vars(SERVICE.publisher).get("_link") or vars(SERVICE.publisher).get("_line"))
    receiver = SERVICE.broker.receiver([Q], prefetch=20)
    found = set()
    while (delivery := receiver.receive(1.0)) is not None:
        found.add(bytes(delivery.message.body))
        receiver.settle(delivery, Ack())
    receiver.close()
    assert {b"parent", b"child", b"parent beside it", b"child again", b"parent again"} <= found


def receiver() -> None:
    """A delivery belongs to the process that received it: a child settles nothing, and gives nothing back."""
    assert SERVICE.publisher.publish([output(b"mine", key=Q)], 30) == [None]
    received = SERVICE.broker.receiver([Q], prefetch=100)
    while bytes((delivery := received.receive(30)).message.body) != b"mine":
        received.settle(delivery, Ack())

    def steps() -> Iterator[None]:
        with pytest.raises(BrokerUnavailable):
            received.settle(delivery, Ack())
        received.cancel()
        received.close()
        yield

    child = Child(steps)
    child.wait()
    child.go_on()
    assert child.end() == 0
    assert received.receive(1.0) is None  # it was not given back
    received.settle(delivery, Ack())
    received.close()
    assert SERVICE.broker.depth(Q) == 0


def names() -> None:
    """Each process is a worker of its own."""
    mine, ours = SERVICE.store.worker, []
    for _ in range(2):
        reading, writing = os.pipe()

        def steps(to: int = writing) -> Iterator[None]:
            SERVICE.handle.keep_up()
            os.write(to, f"{SERVICE.store.worker} {SERVICE.store.upkeep.worker_name}".encode())
            yield

        child = Child(steps)
        child.wait()
        child.go_on()
        assert child.end() == 0
        ours.append(os.read(reading, 200).decode().split())
    assert all(first == second for first, second in ours)
    assert len({mine, *(first for first, _ in ours)}) == 3
    alive = {row.name for row in SERVICE.store.upkeep.workers() if row.alive}
    assert {mine, *(first for first, _ in ours)} <= alive


def notifications() -> None:
    """Parent and child hear what is announced, each on a connection of its own."""
    upkeep = SERVICE.store.upkeep
    upkeep.wait_for_pending(0.01)

    def steps() -> Iterator[None]:
        upkeep.wait_for_pending(0.01)  # the first answer says only that it listens now
        yield
        assert upkeep.wait_for_pending(60)

    child = Child(steps)
    child.wait()
    upkeep.announce_pending()
    child.go_on()
    assert child.end() == 0
    assert upkeep.wait_for_pending(60)


def locks() -> None:
    """Locks that other threads hold at the fork, and turns of their handlers, keep no child waiting."""
    held, done = threading.Event(), threading.Event()
    from idemp.wrap import _TURNS

    def other() -> None:
        with SERVICE.publisher._lock, SERVICE.app._lock, _TURNS.alone(lambda: None):
            held.set()
            done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()

    def steps() -> Iterator[None]:
        company: list[str] = []
        with _TURNS.alone(lambda: company.append("a handler of the parent")):
            assert company == []
        SERVICE.settle(20)
        SERVICE.start(21)
        yield

    child = Child(steps)
    child.wait()
    child.go_on()
    assert child.end() == 0
    done.set()
    thread.join()
    assert (count(20), count(21)) == (1, 1)


def forked_in_c() -> None:
    """As uWSGI does it, past all that Python registers for a fork."""

    def steps() -> Iterator[None]:
        with SERVICE.engine.connect() as connection:
            connection.execute(insert(effect).values(number=1))
            yield
        SERVICE.settle(20)
        SERVICE.start(21)
        yield

    child = Child(steps, ctypes.PyDLL(None).fork)
    child.wait()
    SERVICE.settle(25)
    child.go_on()
    child.wait()
    SERVICE.settle(26)
    child.go_on()
    assert child.end() == 0
    assert [count(number) for number in (1, 20, 21, 25, 26)] == [0, 1, 1, 1, 1]


def parent_ends_first() -> None:
    """On SQLite: what a child commits stays, also when its parent closes the files that it had open at the fork."""

    def steps() -> Iterator[None]:
        SERVICE.settle(20)
        yield
        SERVICE.settle(22)
        yield

    child = Child(steps)
    child.wait()
    SERVICE.engine.dispose()
    SERVICE.publisher.close()
    child.go_on()
    child.wait()
    assert (count(20), count(22)) == (1, 1)  # seen by others while the child has its files open
    SERVICE.engine.dispose()
    child.go_on()
    assert child.end() == 0
    assert (count(20), count(22)) == (1, 1)
    assert SERVICE.broker.depth(Q) >= 2


def sqlite_in_use() -> None:
    """On SQLite: in a child that was forked while a transaction was open nothing works, and it says so."""
    with SERVICE.engine.begin() as connection:
        connection.execute(insert(effect).values(number=1))

        def steps() -> Iterator[None]:
            with pytest.raises(StoreError, match="was in use when this process was forked"), SERVICE.engine.connect():
                pass
            yield

        child = Child(steps)
        child.wait()
        child.go_on()
        assert child.end() == 0
    assert count(1) == 1


if __name__ == "__main__":
    for name in sys.argv[1:]:
        with SERVICE.engine.begin() as clearing:
            clearing.execute(delete(effect))
        globals()[name]()
    os._exit(0)
