"""Event streams: what a handler publishes is appended to a stream, and its claim is the commit."""

from idemp.streams.streams import FOREVER, Event, Stream, Streams

__all__ = ["FOREVER", "Event", "Stream", "Streams"]
