"""What a handler sees of its stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeVar

from idemp.errors import ConfigurationError, HandlerError, TransactionEnded

if TYPE_CHECKING:
    from idemp.context import Context
    from idemp.inbox.stream.known import KnownCommits
    from idemp.inbox.stream.port import Event
    from idemp.inbox.stream.stream import Stream

S = TypeVar("S")


class StreamSession:
    """The stream of a handler's message, in the handler's unit of work. `stream_of(ctx)` gives it.

    It is read once, when the message is claimed. What the handler publishes (returns, yields, `ctx.publish`) is appended at
    COMMIT, if nobody appended anything else meanwhile; if somebody did, the handler runs again.

    Args:
        known: where they are read, and what was read of them before.
    """

    def __init__(self, known: KnownCommits) -> None:
        self._known = known
        self._own: Stream | None = None
        self.broken: TransactionEnded | None = None
        self.raised: Exception | None = None  # of what the handler asked for

    @property
    def is_open(self) -> bool:
        """Whether the handling has a stream."""
        return self._own is not None

    def enter(self, name: str) -> None:
        """Read the stream that the handling is about."""
        self._own = self.open(name)

    @property
    def stream(self) -> Stream:
        """The stream as it was read.

        Raises:
            HandlerError: the message's type is not opted in, so that no stream is its own.
        """
        if self._own is None:
            raise HandlerError(
                "This handling has no stream of its own: its type is not opted in.",
                fix='Declare it with Idempotent(entity="…"), or read a stream with .open(name).',
            )
        return self._own

    @property
    def name(self) -> str:
        """Its name."""
        return self.stream.name

    @property
    def events(self) -> tuple[Event, ...]:
        """Its events, in order; not those that this handling publishes."""
        return self.stream.events

    @property
    def version(self) -> int:
        """The version of its last event; 0 of a new stream."""
        return self.stream.version

    def fold(self, function: Callable[[S, Event], S], initial: S) -> S:
        """The state that follows from its events: see `Stream.fold`."""
        return self.stream.fold(function, initial)

    def open(self, name: str) -> Stream:
        """Another stream, as it is now, to be read only: nothing keeps it from changing before this handling's COMMIT."""
        try:
            return self._known.read(name)
        except Exception as error:
            self.raised = error
            raise

    def commit(self) -> None:
        """Refused: the handling's end commits."""
        self._refuse("commit")

    def rollback(self) -> None:
        """Refused: an exception rolls back."""
        self._refuse("rollback")

    def _refuse(self, what: str) -> NoReturn:
        self.broken = TransactionEnded(
            f"The handler called {what} on the unit of work that holds its claim; nothing of it was kept.",
            fix=f"Leave {what} to idemp: return to commit, raise to roll back.",
        )
        self.raised = self.broken
        raise self.broken


def stream_of(ctx: Context) -> StreamSession:
    """The stream that a handler's message is about; `ctx.session` by its own type.

    Raises:
        ConfigurationError: the handler's store is no `StreamInbox`.

    Example:
        >>> from idemp import App, Context, Idempotent, Message
        >>> from idemp.broker.memory import InMemoryBroker
        >>> from idemp.inbox.memory import InMemoryStore
        >>> from idemp.inbox.stream import InMemoryStreams, StreamInbox
        >>> inbox = StreamInbox(InMemoryStreams(), InMemoryStore())
        >>> app = App("orders", store=inbox, broker=InMemoryBroker())
        >>> @app.handler(dict, type="orders.Add", policy=Idempotent(entity="order"))
        ... def add(message: dict[str, str], ctx: Context) -> None:
        ...     ctx.publish({"items": stream_of(ctx).version + 1}, type="orders.Added", mandatory=False)
        >>> app.start()
        >>> protocol = app.protocol(app.broker.publisher())
        >>> for id in ("message-1", "message-2", "message-1"):
        ...     message = Message(body=b'{"order": "7"}', type="orders.Add", message_id=id)
        ...     print(protocol.process(message).name)
        HANDLED
        HANDLED
        REDISPATCHED
        >>> [(event.version, event.data) for event in inbox.read("7").events]
        [(1, {'items': 1}), (2, {'items': 2})]
    """
    session: object = ctx.session
    if not isinstance(session, StreamSession):
        raise ConfigurationError(
            f"This handler's session is a {type(session).__name__}, since its store is no StreamInbox.",
            fix="Give its app one: App(…, store=StreamInbox(streams, beside=…)).",
        )
    return session
