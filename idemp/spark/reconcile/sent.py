"""What was sent: a producer's or broker's log, whatever its columns are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from idemp.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@dataclass(frozen=True, kw_only=True)
class Sent:
    """Where a log has what was sent. Each is a SQL expression, as for `DataFrame.selectExpr`; a column's name is one.

    Args:
        frame: the log, one row for each message that was sent.
        consumers: those that get these messages; they alone are judged.
        id: the message id of the envelope.
        time: when it was sent; a row whose time can't be read counts as sent so long ago that its grace time is over.
        type: the message type.
        consumer: which of `consumers` a row is for; without it, each row is for all of them.
        source: the CloudEvents source, where ids are CloudEvents.
        headers: the application headers as a JSON object, for apps that read their ids there.
        body: the JSON body, to tell conflicting ones. As text or bytes, each is parsed, in Python, and compared with what
            the inbox has; a struct is compared within the log.
        digest: anything that differs where bodies do, such as `sha2(body, 256)`, in the place of what the body says; idemp's
            own fingerprint is compared with the inbox, too.
        position: the place in the log, such as `concat(topic, '/', partition, '#', offset)`: rows of the same place
            are one message that was read twice. Without it, each row was sent.
        app: the consumer's app as `MODULE:APP`, for types whose key is not the message id; it reads each `body`. Types that
            it does not handle, or that are not opted in, are not judged.

    Raises:
        ConfigurationError: no consumer is named; there is an `app`, and no `body` or several consumers.

    Example:
        >>> Sent(frame=..., consumers="orders", id="message_id", time="sent_at")
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: Nobody says who gets what was sent. Name the consumers, as a list.
    """

    frame: DataFrame
    consumers: Sequence[str]
    id: str
    time: str
    type: str | None = None
    consumer: str | None = None
    source: str | None = None
    headers: str | None = None
    body: str | None = None
    digest: str | None = None
    position: str | None = None
    app: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.consumers, str) or not self.consumers:
            raise ConfigurationError("Nobody says who gets what was sent.", fix="Name the consumers, as a list.")
        if self.app is not None and self.body is None:
            raise ConfigurationError(f"App {self.app!r} reads ids out of bodies, and none is given.", fix="Map body.")
        if self.app is not None and len(self.consumers) > 1:
            raise ConfigurationError(
                f"App {self.app!r} is one consumer, and {len(self.consumers)} are named.", fix="Name its own only."
            )
