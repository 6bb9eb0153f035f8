"""Real ports behind wrappers that fail, or die, where a test says so.

The product has no hooks for tests: everything that can go wrong goes wrong at a port.

>>> from idemp.inbox.memory import InMemoryStore
>>> script = Script()
>>> script.die("before begin")
>>> FaultyStore(InMemoryStore(), script).begin()
Traceback (most recent call last):
...
idemp.testing.crash_points.Crash: before begin
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from idemp.broker.port import Endpoint, Refusal, Topology
from idemp.errors import CommitUnknown, StoreUnavailable, TransientStoreError
from idemp.testing.crash_points import Crash

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from uuid import UUID

    from idemp.broker.memory import InMemoryBroker
    from idemp.broker.port import Delivery, Publisher, Receiver, Settlement
    from idemp.inbox.document.port import Document, Documents
    from idemp.inbox.port import Claim, Mark
    from idemp.messages import Output

CommitFault = Literal["", "lost, committed", "lost, not committed", "transient", "away"]
Answer = Literal["confirm", "lose", "unsendable", "nacked", "returned", "timeout", "blocked", "closed"]
"""What becomes of an output: `lose` means that it arrives, and its confirm does not."""


def _raise(point: str) -> NoReturn:
    raise Crash(point)


class Script:
    """Counts the calls of all ports, and dies at one of them; shared by the ports of one process.

    Args:
        death: what happens at the point where the process shall die; default: a `Crash` is raised there.

    Attributes:
        on_commit: called after each COMMIT that took effect, with its unit of work.
        calls: names of the calls so far, in order.
        crash_before: the call before which the process dies, by name or by number (from 1).
        crash_after: likewise after it.
        commit_faults: what becomes of the next commits, one each.
        store_faults: what the next `begin` raise, one each; `None` for nothing.
        answers: what becomes of the next outputs, one each.
        crash_after_outputs: how many outputs still go out before the process dies.

    Example:
        >>> script = Script()
        >>> script.call("claim", lambda: "done"), script.calls
        ('done', ['claim'])
    """

    def __init__(self, death: Callable[[str], NoReturn] = _raise) -> None:
        self.death = death
        self.on_commit: Callable[[FaultyUnit], object] = lambda _: None
        self.clear()

    def die(self, point: str) -> None:
        """Die at the next such point: "before claim" or "after commit", for example."""
        when, _, call = point.partition(" ")
        setattr(self, f"crash_{when}", call)

    def clear(self) -> None:
        """No more faults; calls are counted from the beginning."""
        self.calls: list[str] = []
        self.crash_before: int | str | None = None
        self.crash_after: int | str | None = None
        self.commit_faults: list[CommitFault] = []
        self.store_faults: list[BaseException | None] = []
        self.answers: list[Answer] = []
        self.crash_after_outputs: int | None = None
        self._dead: str | None = None

    def die_now(self, point: str) -> None:
        """The process dies here, and whatever its `finally` blocks still ask of a port does not happen."""
        try:
            self.death(point)
        except Crash:
            self._dead = point
            raise

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        """Make a call of a port, or die before or after it."""
        if self._dead is not None:
            raise Crash(self._dead)
        self.calls.append(name)
        here = (len(self.calls), name)
        if self.crash_before in here:
            self.die_now(f"before {name}")
        answer = do()
        if self.crash_after in here:
            self.die_now(f"after {name}")
        return answer


class FaultyUnit:
    """A unit of work whose calls go through a script."""

    def __init__(self, inner: Any, script: Script) -> None:
        self._inner = inner
        self._script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def claim(self, claim: Claim) -> Any:
        """As the port says."""
        return self._script.call("claim", lambda: self._inner.claim(claim))

    def claim_all(self, *arguments: Any) -> Any:
        """As the port says."""
        return self._script.call("claim", lambda: self._inner.claim_all(*arguments))

    def store_outputs(self, *arguments: Any) -> None:
        """As the port says."""
        self._script.call("store", lambda: self._inner.store_outputs(*arguments))

    def store_all(self, *arguments: Any) -> None:
        """As the port says."""
        self._script.call("store", lambda: self._inner.store_all(*arguments))

    def claim_and_store(self, *arguments: Any) -> Any:
        """As the port says."""
        return self._script.call("claim and store", lambda: self._inner.claim_and_store(*arguments))

    def commit(self) -> None:
        """Commit, or fail as the script says, before or after it took effect."""
        self._script.call("commit", self._commit)

    def _commit(self) -> None:
        fault = self._script.commit_faults.pop(0) if self._script.commit_faults else ""
        if fault in {"", "lost, committed"}:
            self._inner.commit()
            self._script.on_commit(self)
        if fault.startswith("lost"):
            raise CommitUnknown("COMMIT was sent, and the test took its answer away")
        if fault == "transient":
            raise TransientStoreError("the test says: serialization failure")
        if fault == "away":
            raise StoreUnavailable("the test says: away")

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inner.__exit__(kind, error, trace)


class FaultyStore:
    """An inbox store whose calls go through a script."""

    def __init__(self, inner: Any, script: Script) -> None:
        self.inner = inner
        self.script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, claims: Sequence[Claim] = (), *, late: bool = False) -> FaultyUnit:
        """As the port says, or raise what the script says."""
        fault = self.script.store_faults.pop(0) if self.script.store_faults else None
        if fault is not None:
            raise fault
        return FaultyUnit(self.script.call("begin", lambda: self.inner.begin(claims, late=late)), self.script)

    def note_start(self, consumer: str, key: UUID) -> int:
        """As the port says."""
        starts: int = self.script.call("note start", lambda: self.inner.note_start(consumer, key))
        return starts

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        """As the port says."""
        self.script.call("note end", lambda: self.inner.note_end(consumer, key, left))

    def record(self, marks: Sequence[Mark]) -> None:
        """As the port says."""
        self.script.call("record", lambda: self.inner.record(list(marks)))


class FaultyDocuments:
    """A collection of documents whose requests go through a script.

    Args:
        inner: the documents.
        script: shared with the other ports of the process.

    Attributes:
        write_faults: what becomes of the next writes, one each, as of commits.
        slow: writes that were given up, and have not arrived yet; call one to have it arrive.
    """

    def __init__(self, inner: Documents, script: Script) -> None:
        self.inner = inner
        self.script = script
        self.largest = inner.largest
        self.write_faults: list[CommitFault | Literal["slow"]] = []
        self.slow: list[Callable[[], str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, id: str) -> Document | None:
        """As the port says."""
        found: Document | None = self.script.call("read document", lambda: self.inner.read(id))
        return found

    def write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        """As the port says, or as the script does."""
        revision: str = self.script.call("write document", lambda: self._write(id, body, expected))
        return revision

    def _write(self, id: str, body: Mapping[str, Any], expected: str | None) -> str:
        fault = self.write_faults.pop(0) if self.write_faults else ""
        if fault == "slow":
            self.slow.append(lambda: self.inner.write(id, body, expected))
        revision = self.inner.write(id, body, expected) if fault in {"", "lost, committed"} else ""
        if fault in {"slow", "lost, committed", "lost, not committed"}:
            raise CommitUnknown("The write was sent, and the test took its answer away.")
        if fault == "transient":
            raise TransientStoreError("the test says: throttled")
        if fault == "away":
            raise StoreUnavailable("the test says: away")
        return revision

    def delete(self, id: str, expected: str) -> None:
        """As the port says."""
        self.script.call("delete document", lambda: self.inner.delete(id, expected))

    def scan(self, prefix: str, cursor: str | None = None, limit: int = 500) -> tuple[Sequence[Document], str | None]:
        """As the port says."""
        page: tuple[Sequence[Document], str | None] = self.script.call(
            "scan documents", lambda: self.inner.scan(prefix, cursor, limit)
        )
        return page


class FaultyPublisher:
    """A publisher whose answers a script decides; `sent` is what reached the broker, in order."""

    def __init__(self, inner: Publisher, script: Script) -> None:
        self.inner = inner
        self.endpoint = getattr(inner, "endpoint", Endpoint())
        self.script = script
        self.sent: list[Output] = []
        self.confirmed: list[Output] = []

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """Send, lose, refuse: as the script says."""
        answers: list[Refusal | None] = self.script.call("publish", lambda: self._publish(outputs, timeout))
        return answers

    def _publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        answers = []
        for output in outputs:
            if self.script.crash_after_outputs is not None:
                if self.script.crash_after_outputs == 0:
                    self.script.die_now("in the middle of publishing")
                self.script.crash_after_outputs -= 1
            answers.append(self._one(output, timeout))
        return answers

    def _one(self, output: Output, timeout: float) -> Refusal | None:
        answer = self.script.answers.pop(0) if self.script.answers else "confirm"
        if answer not in {"confirm", "lose"}:
            return Refusal(answer, "the test says so")  # type: ignore[arg-type]
        (refusal,) = self.inner.publish([output], timeout)
        if refusal is None:
            self.sent.append(output)
            if answer == "lose":
                return Refusal("timeout", "the test took the confirm away")
            self.confirmed.append(output)
        return refusal

    def keep_alive(self) -> None:
        """As the port says."""
        self.inner.keep_alive()

    def close(self) -> None:
        """As the port says."""
        self.inner.close()


class FaultyReceiver:
    """A receiver whose settlements a script decides; one that died gives nothing back by itself."""

    def __init__(self, inner: Receiver, script: Script) -> None:
        self.inner = inner
        self.script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def settle(self, delivery: Delivery, settlement: Settlement) -> None:
        """Settle, or die before or after that."""
        self.script.call("settle", lambda: self.inner.settle(delivery, settlement))


class DeclaringPublisher:
    """A publisher to queues that are made when something is sent to them: the consumers of outputs are not under test."""

    def __init__(self, broker: InMemoryBroker) -> None:
        self._broker = broker
        self._inner = broker.publisher()

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        """As the port says; all queues are there."""
        for output in outputs:
            if output.exchange == "":
                self._broker.declare(Topology(exchange="", queues=(output.routing_key,)))
        return self._inner.publish(outputs, timeout)

    def keep_alive(self) -> None:
        """As the port says."""
        self._inner.keep_alive()

    def close(self) -> None:
        """As the port says."""
        self._inner.close()
