"""The one reading of a delivery: by a worker, `wrap`, `claim`, a backfill, a reconciliation and the testing kit alike.

A message handled here and there has one type, one id, one time and one body only if all of them read it by this function.
"""

from __future__ import annotations

from collections.abc import Mapping

from idemp.cloudevents import read_event
from idemp.errors import Unreadable
from idemp.messages import UNREADABLE, Delivery

__all__ = ["read_delivery"]


def read_delivery(delivery: Delivery) -> Delivery:
    """Return a delivery with the properties and the body of its message, taken out of any envelope.

    Raises:
        Unreadable: Its properties are damaged, its headers have no names, or its envelope is incomplete or contradicts itself.

    Example:
        >>> plain = Delivery("billing", {"type": "shop.Pay", "message_id": "7"}, b"{}")
        >>> read_delivery(plain) is plain
        True
        >>> event = {"headers": {"ce-specversion": "1.0", "ce-id": "7", "ce-source": "/shop", "ce-type": "shop.Pay"}}
        >>> read_delivery(Delivery("billing", event, b"{}")).properties["type"]
        'shop.Pay'
    """
    if UNREADABLE in delivery.properties:
        raise Unreadable("some of its properties cannot be read, so neither its type nor its id is sure")
    headers = delivery.properties.get("headers")
    if headers and not (isinstance(headers, Mapping) and {str}.issuperset(map(type, headers))):
        raise Unreadable("the headers are not a mapping of names")
    return read_event(delivery)
