"""Real ports behind wrappers that fail, or die, where a test says so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

from idemp.broker.port import Refusal
from idemp.errors import CommitUnknown, StoreUnavailable, TransientStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType
    from uuid import UUID

    from idemp.broker.port import Publisher
    from idemp.inbox.port import Claim, Mark
    from idemp.messages import Output

CommitFault = Literal["", "lost, committed", "lost, not committed", "transient", "away"]
Answer = Literal["confirm", "lose", "unsendable", "nacked", "returned", "timeout", "blocked", "closed"]
"""What becomes of an output: `lose` means that it arrives, and its confirm does not."""


class Crash(BaseException):
    """The process dies here: nothing catches it, and nothing of this process happens after it."""


class Script:
    """Counts the calls of all ports, and dies at one of them."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.crash_before: int | str | None = None
        self.crash_after: int | str | None = None
        self.commit_faults: list[CommitFault] = []
        self.store_faults: list[BaseException | None] = []
        self.answers: list[Answer] = []
        self.crash_after_outputs: int | None = None

    def clear(self) -> None:
        """No more faults; calls are counted from the beginning."""
        self.__init__()  # type: ignore[misc]

    def call(self, name: str, do: Callable[[], Any]) -> Any:
        self.calls.append(name)
        here = (len(self.calls), name)
        if self.crash_before in here:
            raise Crash(f"before {name}")
        answer = do()
        if self.crash_after in here:
            raise Crash(f"after {name}")
        return answer


class FaultyUnit:
    def __init__(self, inner: Any, script: Script) -> None:
        self._inner = inner
        self._script = script

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def claim(self, claim: Claim) -> Any:
        return self._script.call("claim", lambda: self._inner.claim(claim))

    def store_outputs(self, *arguments: Any) -> None:
        self._script.call("store", lambda: self._inner.store_outputs(*arguments))

    def claim_and_store(self, *arguments: Any) -> Any:
        return self._script.call("claim and store", lambda: self._inner.claim_and_store(*arguments))

    def commit(self) -> None:
        self._script.call("commit", self._commit)

    def _commit(self) -> None:
        fault = self._script.commit_faults.pop(0) if self._script.commit_faults else ""
        if fault in {"", "lost, committed"}:
            self._inner.commit()
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
        fault = self.script.store_faults.pop(0) if self.script.store_faults else None
        if fault is not None:
            raise fault
        return FaultyUnit(self.script.call("begin", lambda: self.inner.begin(claims, late=late)), self.script)

    def note_start(self, consumer: str, key: UUID) -> int:
        starts: int = self.script.call("note start", lambda: self.inner.note_start(consumer, key))
        return starts

    def note_end(self, consumer: str, key: UUID, left: int = 0) -> None:
        self.script.call("note end", lambda: self.inner.note_end(consumer, key, left))

    def record(self, marks: Sequence[Mark]) -> None:
        self.script.call("record", lambda: self.inner.record(list(marks)))


class FaultyPublisher:
    """A publisher whose answers a script decides; `sent` is what reached the broker, in order."""

    def __init__(self, inner: Publisher, script: Script) -> None:
        self.inner = inner
        self.script = script
        self.sent: list[Output] = []
        self.confirmed: list[Output] = []

    def publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        answers: list[Refusal | None] = self.script.call("publish", lambda: self._publish(outputs, timeout))
        return answers

    def _publish(self, outputs: Sequence[Output], timeout: float) -> list[Refusal | None]:
        answers = []
        for output in outputs:
            if self.script.crash_after_outputs is not None:
                if self.script.crash_after_outputs == 0:
                    raise Crash("in the middle of publishing")
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
        self.inner.keep_alive()

    def close(self) -> None:
        self.inner.close()
