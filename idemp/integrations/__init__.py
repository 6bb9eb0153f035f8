"""Callbacks for consumers of other clients: `KombuCallbacks`, `PikaCallbacks` and `AioPikaCallbacks`, each in its module."""

from __future__ import annotations

from typing import Any

__all__ = ["reject"]


def reject(message: Any, _error: Exception) -> Any:
    """Reject a message without requeueing it, so that the dead-letter exchange of its queue takes it.

    **A queue without a dead-letter exchange drops the message.** Pass it as `dead=reject`, or call it in a function of your own.

    Args:
        message: `kombu.Message`, `PikaMessage` or `aio_pika.IncomingMessage`.

    Returns:
        An awaitable for a message of aio-pika.

    Example:
        >>> from idemp.integrations.kombu import KombuCallbacks
        >>> callbacks = KombuCallbacks(lambda message, redelivered=False: None, dead=reject)
    """
    return message.reject(requeue=False)
