"""A context for unit tests of handlers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload
from uuid import UUID

from idemp.context import AsyncContext, Context
from idemp.errors import ConfigurationError
from idemp.ports import Claim

if TYPE_CHECKING:
    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
    from sqlalchemy.orm import Session

__all__ = ["context"]


@overload
def context(session: AsyncSession, *, attempt: int = 1, **properties: Any) -> AsyncContext: ...
@overload
def context(session: Session | None = None, *, attempt: int = 1, **properties: Any) -> Context: ...
def context(session: Any = None, *, attempt: int = 1, **properties: Any) -> Any:
    """Return a context to call a handler with, in a unit test. What the handler emits is in its `outputs()`.

    The session is the test's own: it commits what the handler tells it to. `assert_idempotent` finds such a handler.

    Args:
        session: Session of the test; with an `AsyncSession`, the context is an `AsyncContext`.
        attempt: Number of the run.
        properties: Properties of the message, such as `message_id`, `reply_to` and `headers`.

    Example:
        >>> def place_order(command: dict[str, int], ctx: Context) -> None:
        ...     ctx.send({"order_id": command["order_id"]}, to="stock", type="shop.ReserveStock")
        >>> ctx = context(message_id="7")
        >>> place_order({"order_id": 7}, ctx)
        >>> [(output.routing_key, output.body) for output in ctx.outputs()]
        [('stock', b'{"order_id": 7}')]
    """
    kind = AsyncContext if hasattr(session, "sync_session") else Context
    claim = Claim("test", "test.Message", UUID(int=0), "test")
    return kind("test", properties, _Given(session), claim, attempt)


@dataclass(frozen=True)
class _Given:
    given: Any

    @property
    def session(self) -> Session:
        if self.given is None:
            raise ConfigurationError("the handler uses a session: make the context by context(session)")
        session: Session = self.given
        return session

    @property
    def connection(self) -> Connection:
        return self.session.connection()

    @property
    def async_session(self) -> AsyncSession:
        session: AsyncSession = self.given
        return session

    @property
    def async_connection(self) -> AsyncConnection:
        from idemp.sql.aio import AsyncCaller

        return AsyncCaller(self.given).async_connection
