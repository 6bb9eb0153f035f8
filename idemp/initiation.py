"""Initiations: changes and messages in one transaction, outside of a handler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from idemp.context import AsyncContext, Context
from idemp.errors import ConfigurationError, Conflict, HandlerError, InFlight, Unavailable
from idemp.handling import Handling
from idemp.identity import key_scope, message_key, typed_id, uuid7
from idemp.messages import Delivery, check_text
from idemp.ports import AsyncStore, Claim, Handled, Store, Verdict

if TYPE_CHECKING:
    from types import TracebackType

    from sqlalchemy.ext.asyncio import AsyncSession
    from sqlalchemy.orm import Session

__all__ = ["INITIATION", "INITIATION_KEY", "Initiating"]

INITIATION = "idemp.Initiation"
INITIATION_KEY = "id:"


class Initiating:
    """Block of `App.initiate`, for `with` or `async with`.

    Args:
        consumer: Scope of the id.
        id: Of the initiation; None for one that is never repeated.
        store: Returns the store of a plain block.
        async_store: Returns the store of an `async with` block.
        dispatch: Sends what was emitted.
        session: Session of the caller's, whose transaction is joined.
        join: Opens what joins it, and returns what makes a block of a session and a claim.

    Example:
        >>> from idemp import App
        >>> async def place(app: App) -> None:
        ...     async with app.initiate() as unit:
        ...         unit.send({"order_id": 7}, to="orders", type="shop.PlaceOrder")
    """

    def __init__(
        self,
        consumer: str,
        id: str | None,
        store: Callable[[], Store[Any]],
        async_store: Callable[[], AsyncStore[Any]],
        dispatch: Callable[[Handling], object],
        session: Session | AsyncSession | None = None,
        join: Callable[[], Callable[..., AbstractContextManager[Any]]] | None = None,
    ) -> None:
        self._session, self._open_join = session, join
        self._work, self._begun = Handling(Delivery(consumer, {}, b"")), False
        self._id = check_text(id, "id") if id is not None else uuid7()
        self._open, self._open_async, self._dispatch = store, async_store, dispatch

    def __enter__(self) -> Context:
        if self._session is None:
            self._block = self._begin(self._transaction, self._open(), Context)
        else:
            session = self._checked(self._session, asynchronous=False)
            self._block = self._begin(self._joined, session)
        unit: Context = self._block.__enter__()
        return unit

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._block.__exit__(kind, error, trace)
        if kind is None and self._session is None:
            self._dispatch(self._work)

    async def __aenter__(self) -> AsyncContext:
        if self._session is None:
            store = await asyncio.to_thread(self._open_async)
            await store.run(store.check)
            self._run = store.run
            self._block = self._begin(self._transaction, store, AsyncContext)
        else:
            session = self._checked(self._session, asynchronous=True)
            assert self._open_join is not None
            await asyncio.to_thread(self._open_join)
            self._run = lambda function, *arguments: session.run_sync(lambda _: function(*arguments))
            self._block = await self._run(self._begin, self._joined, session)  # which takes a connection
        unit: AsyncContext = await self._run(self._block.__enter__)
        return unit

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._run(self._block.__exit__, kind, error, trace)
        if kind is None and self._session is None:
            await asyncio.to_thread(self._dispatch, self._work)

    def _checked(self, session: Any, *, asynchronous: bool) -> Any:
        session = session.registry() if hasattr(session, "registry") else session  # a scoped session
        if not hasattr(session, "get_transaction"):
            raise ConfigurationError(f"{session!r} is not a session of SQLAlchemy")
        if hasattr(session, "sync_session") != asynchronous:
            raise ConfigurationError(f"{session!r} is {'not ' * asynchronous}an AsyncSession, which is for `async with`")
        return session

    def _begin(self, block: Callable[..., AbstractContextManager[Any]], *arguments: Any) -> AbstractContextManager[Any]:
        if self._begun:  # it would be a duplicate of itself, and its changes rolled back
            raise HandlerError("this initiation was begun before, and nothing was done now: call app.initiate() for each block")
        self._begun = True
        original, self._text = typed_id(self._id, "id")
        key = message_key(original, self._text, key_scope(INITIATION, INITIATION_KEY))
        self._claim = self._work.claim = Claim(self._work.delivery.queue, INITIATION, key, original, resends="pending")
        return block(*arguments)

    def _joined(self, session: Any) -> AbstractContextManager[Any]:
        assert self._open_join is not None
        return self._open_join()(session, self._claim)

    @contextmanager
    def _transaction(self, store: Store[Any], kind: type[Any]) -> Iterator[Any]:
        consumer, claim, text = self._work.delivery.queue, self._claim, self._text
        with store.connect() as tx:
            answer = store.claim(tx, [claim])[0]
            if answer.verdict is Verdict.IN_FLIGHT:
                raise InFlight(f"another transaction initiates {text!r}")
            if answer.verdict is Verdict.CONFLICT:
                raise Conflict(f"the id {text!r} was taken by another message")
            unit = kind(consumer, {}, tx, claim)
            unit.duplicate, unit.result = answer.verdict is Verdict.DUPLICATE, answer.result
            yield unit
            self._work.outputs = unit.outputs()
            if unit.duplicate:
                self._work.outputs = answer.outputs
            else:
                store.finish(tx, [Handled(consumer, claim, self._work.outputs)])
        if unit.duplicate and not all(store.read_back([claim])):
            raise Unavailable(f"the database has lost its latest commits, so nothing was initiated under {text!r}: do it again")
