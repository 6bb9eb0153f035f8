"""idemp: idempotent consumers.

Effects happen exactly once in your database, and outputs are sent at least once under one id, without two-phase commit.

Example:
    >>> from pydantic import BaseModel
    >>> class PlaceOrder(BaseModel):
    ...     __message_type__ = "shop.PlaceOrder"
    ...     order_id: int
    >>> class OrderPlaced(BaseModel):
    ...     __message_type__ = "shop.OrderPlaced"
    ...     order_id: int
    >>> app = App("orders")
    >>> @app.handler(PlaceOrder, policy=Idempotent(key="order_id"))
    ... def place_order(command: PlaceOrder, ctx: Context) -> OrderPlaced:
    ...     return OrderPlaced(order_id=command.order_id)
"""

from idemp.app import App
from idemp.context import AsyncContext, Context
from idemp.errors import (
    ConfigurationError,
    Conflict,
    DispatchIncomplete,
    HandlerError,
    IdempError,
    InFlight,
    Refuse,
    TransactionEnded,
    Unreadable,
)
from idemp.hooks import Hooks
from idemp.identity import Key
from idemp.inbox import AsyncInbox, Inbox, Outcome
from idemp.policy import Idempotent, Policy, Previous, Retry
from idemp.ports import Verdict
from idemp.settings import Settings

__all__ = [
    "App",
    "AsyncContext",
    "AsyncInbox",
    "ConfigurationError",
    "Conflict",
    "Context",
    "DispatchIncomplete",
    "HandlerError",
    "Hooks",
    "IdempError",
    "Idempotent",
    "InFlight",
    "Inbox",
    "Key",
    "Outcome",
    "Policy",
    "Previous",
    "Refuse",
    "Retry",
    "Settings",
    "TransactionEnded",
    "Unreadable",
    "Verdict",
]
