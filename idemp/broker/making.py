"""Which adapter a broker's URL means."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from idemp.broker.port import Broker
    from idemp.settings import Settings


def missing_file(url: str) -> Path | None:
    """The file of an embedded broker where it does not exist; `None` for every other broker.

    Example:
        >>> missing_file("local:///nowhere/queues.db"), missing_file("pyamqp://broker")
        (PosixPath('/nowhere/queues.db'), None)
    """
    if not url.startswith("local:"):
        return None
    from idemp.broker.local.file import file_of

    path = file_of(url).absolute()
    return None if path.exists() else path


def make_broker(url: str, settings: Settings) -> Broker:
    """The broker of a URL.

    Raises:
        ConfigurationError: a URL that can't be read.
        GuaranteeError: a transport that loses messages, unless that is allowed.
    """
    if url.startswith("local:"):
        from idemp.broker.local import LocalBroker

        return LocalBroker(url)
    if url.startswith(("stomp:", "stomp+ssl:")):
        from idemp.broker.stomp import StompBroker

        return StompBroker(url)
    from idemp.broker.kombu import KombuBroker

    return KombuBroker(url, allow_at_most_once=settings.allow_at_most_once)
