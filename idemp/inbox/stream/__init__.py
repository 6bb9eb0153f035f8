"""Event streams as inbox: the stream is the record of what was handled, and of the outputs.

`StreamInbox` is the store; `Streams` is the port below it, for event stores of other kinds; `SqlStreams` in
`idemp.inbox.sql` and `InMemoryStreams` implement it. Handlers read their stream with `stream_of(ctx)`.
"""

from idemp.inbox.stream.inbox import StreamInbox
from idemp.inbox.stream.memory import InMemoryStreams
from idemp.inbox.stream.port import AlreadyCommitted, Commit, Event, Found, Pending, Streams, WrongVersion
from idemp.inbox.stream.session import StreamSession, stream_of
from idemp.inbox.stream.stream import Stream

__all__ = [
    "AlreadyCommitted",
    "Commit",
    "Event",
    "Found",
    "InMemoryStreams",
    "Pending",
    "Stream",
    "StreamInbox",
    "StreamSession",
    "Streams",
    "WrongVersion",
    "stream_of",
]
