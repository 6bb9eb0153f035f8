"""Which adapter a broker's URL means."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from idemp.broker.port import Broker
    from idemp.settings import Settings


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
