"""idemp: effects exactly once in your database, outputs at least once under one id, without two-phase commit.

>>> from idemp import App, Context, Idempotent
>>> app = App("orders", database="sqlite://", broker="local://orders.db")
>>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="order_id"))
... def place(message: dict[str, str], ctx: Context) -> None:
...     ctx.send({"sku": message["sku"]}, to="stock", type="stock.Reserve")
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from idemp.app import App
from idemp.context import BatchContext, Context
from idemp.errors import (
    AlreadyHandled,
    BranchUnavailable,
    BranchUnfinished,
    BrokerChanged,
    BrokerError,
    BrokerReplaced,
    BrokerUnavailable,
    CommitUnknown,
    ConfigurationError,
    DispatchIncomplete,
    IdempError,
    IdentityChanged,
    IdInFlight,
    LostAfterCommit,
    LostBeforeCommit,
    MessageError,
    Refuse,
    SchemaError,
    StoreError,
    StoreReplaced,
    StoreUnavailable,
    TransactionEnded,
    WorkerDied,
)
from idemp.fingerprint import Fingerprint
from idemp.identity import Key
from idemp.initiation import Initiation
from idemp.messages import Message, Output
from idemp.outcome import Outcome
from idemp.policy import Idempotent, Policy, Previous, TwoPhase
from idemp.retries import exponential
from idemp.settings import Settings
from idemp.wrap import Inbox, Wrapped

if TYPE_CHECKING:
    from idemp.broker.kombu import ConfirmingPublisher

__all__ = [
    "AlreadyHandled",
    "App",
    "BatchContext",
    "BranchUnavailable",
    "BranchUnfinished",
    "BrokerChanged",
    "BrokerError",
    "BrokerReplaced",
    "BrokerUnavailable",
    "CommitUnknown",
    "ConfigurationError",
    "ConfirmingPublisher",
    "Context",
    "DispatchIncomplete",
    "Fingerprint",
    "IdInFlight",
    "IdempError",
    "Idempotent",
    "IdentityChanged",
    "Inbox",
    "Initiation",
    "Key",
    "LostAfterCommit",
    "LostBeforeCommit",
    "Message",
    "MessageError",
    "Outcome",
    "Output",
    "Policy",
    "Previous",
    "Refuse",
    "SchemaError",
    "Settings",
    "StoreError",
    "StoreReplaced",
    "StoreUnavailable",
    "TransactionEnded",
    "TwoPhase",
    "WorkerDied",
    "Wrapped",
    "exponential",
]


def __getattr__(name: str) -> Any:
    """`ConfirmingPublisher` brings kombu along, so it is imported only when somebody asks for it."""
    if name == "ConfirmingPublisher":
        from idemp.broker.kombu import ConfirmingPublisher

        return ConfirmingPublisher
    raise AttributeError(f"module 'idemp' has no attribute {name!r}")
