"""Reading frames that py-amqp can't decode.

py-amqp raises inside its reading loop for an id that is no UTF-8 or a header with a date beyond the year 9999. The
connection is then lost, the broker delivers the message again, and one such message stops a consumer for ever. Here
such a message arrives, with what is unreadable replaced, so that it can be parked.
"""

from __future__ import annotations

from base64 import b64encode
from struct import error as struct_error
from struct import pack, unpack_from
from typing import TYPE_CHECKING, Any, Final

from amqp import Message, spec
from amqp.channel import Channel
from amqp.exceptions import FrameSyntaxError, UnexpectedFrame
from amqp.serialization import dumps, loads

if TYPE_CHECKING:
    from collections.abc import Callable

#: Holds the header table of a message whose headers can't be decoded, in base64.
UNREADABLE_HEADERS: Final = "idemp-unreadable-headers"

_METHOD, _HEADER, _BODY, _HEARTBEAT = 1, 2, 3, 8
_WITH_CONTENT: Final = frozenset({spec.Basic.Return, spec.Basic.Deliver, spec.Basic.GetOk})
_TAG_AND_REDELIVERED: Final = 9  # bytes
_SHORT_STRING: Final = 255  # bytes at most
_REPLACED: Final = "\ufffd".encode()
_UNDECODABLE = (ValueError, OverflowError, OSError, struct_error, FrameSyntaxError)


class TolerantMessage(Message):  # type: ignore[misc]
    """A message from the wire whose properties are always readable."""

    def _load_properties(self, class_id: int, buf: bytes, offset: int) -> int:
        try:
            return int(super()._load_properties(class_id, buf, offset))
        except _UNDECODABLE:
            self.properties = _readable_properties(buf, offset)
            return len(buf)


def tolerant_frame_handler(
    connection: Any, callback: Callable[[int, tuple[int, int], bytes, Message | None], None]
) -> Callable[[tuple[int, int, bytes]], bool]:
    """What `amqp.method_framing.frame_handler` does, with messages that can always be read."""
    partial: dict[int, TolerantMessage] = {}
    expected: dict[int, int] = {}

    def deliver(channel: int) -> bool:
        message = partial[channel]
        if not message.ready:
            expected[channel] = _BODY
            return False
        expected[channel] = _METHOD
        del partial[channel]
        callback(channel, message.frame_method, message.frame_args, message)
        return True

    def on_frame(frame: tuple[int, int, bytes]) -> bool:
        kind, channel, buf = frame
        connection.bytes_recv += 1
        if kind == _HEARTBEAT:
            return False
        if kind != expected.get(channel, _METHOD):
            raise UnexpectedFrame(f"Received frame {kind} while expecting type {expected.get(channel, _METHOD)}")
        if kind == _METHOD:
            method: tuple[int, int] = unpack_from(">HH", buf, 0)
            if method not in _WITH_CONTENT:
                callback(channel, method, buf, None)
                return True
            partial[channel] = TolerantMessage(frame_method=method, frame_args=_readable_arguments(method, buf))
            expected[channel] = _HEADER
            return False
        if kind == _HEADER:
            partial[channel].inbound_header(buf)
        else:
            partial[channel].inbound_body(buf)
        return deliver(channel)

    return on_frame


def _readable_arguments(method: tuple[int, int], buf: bytes) -> bytes:
    """The arguments of a delivery, rewritten if its exchange or routing key is no UTF-8."""
    form: str = Channel._METHODS[method].args  # noqa: SLF001 - kept nowhere else
    try:
        _check_delivery(buf) if method == spec.Basic.Deliver else loads(form, buf, 4)
    except UnicodeDecodeError:
        values: list[Any] = []
        offset = 4
        for kind in form:
            if kind == "s":
                value, offset = _text(buf, offset)
                values.append(value)
            else:
                (value,), offset = loads(kind, buf, offset)
                values.append(value)
        return pack(">HH", *method) + bytes(dumps(form, values))
    return buf


def _check_delivery(buf: bytes) -> None:
    """What `loads` would find in a delivery's arguments, at a fraction of its time: three names and a number between."""
    offset = 4
    for behind in (_TAG_AND_REDELIVERED, 0, 0):
        (size,) = unpack_from("B", buf, offset)
        end = offset + 1 + size
        buf[offset + 1 : end].decode("utf-8")
        offset = end + behind


def _readable_properties(buf: bytes, offset: int) -> dict[str, Any]:
    (flags,) = unpack_from(">H", buf, offset)
    offset += 2
    properties: dict[str, Any] = {}
    for position, (name, kind) in enumerate(Message.PROPERTIES):
        if not flags & (0x8000 >> position):
            continue
        if kind == "s":
            properties[name], offset = _text(buf, offset)
        elif kind == "F":
            (size,) = unpack_from(">I", buf, offset)
            end = offset + 4 + size
            properties[name] = _headers(buf[offset:end])
            offset = end
        else:
            (properties[name],), offset = loads(kind, buf, offset)
    return properties


def _headers(table: bytes) -> dict[str, Any]:
    try:
        (headers,), _ = loads("F", table, 0)
    except _UNDECODABLE:
        return {UNREADABLE_HEADERS: b64encode(table).decode()}
    return dict(headers)


def _text(buf: bytes, offset: int) -> tuple[str, int]:
    end = offset + 1 + buf[offset]
    text = bytes(buf[offset + 1 : end]).decode("utf-8", "replace")
    if len(text.encode()) > _SHORT_STRING:
        # A replacement character takes three bytes where the bad one took one. One of them stays, whatever is cut off:
        # it marks an id that can't be told from others.
        text = text.encode()[: _SHORT_STRING - len(_REPLACED)].decode("utf-8", "ignore") + _REPLACED.decode()
    return text, end
