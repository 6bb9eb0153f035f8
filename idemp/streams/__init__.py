"""Event streams: a handler's published messages are appended to a stream, and its claim is the commit."""

from idemp.streams.streams import FOREVER, Event, Stream, Streams

__all__ = ["FOREVER", "Event", "Stream", "Streams"]
