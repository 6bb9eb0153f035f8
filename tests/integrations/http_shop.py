"""The web service of the tests of HTTP. `python -m tests.integrations.http_shop` runs a server for each line of its input.

Servers are forked, so that they have imported everything; they share a socket, whose port is printed first, then each pid.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

import uvicorn
from fastapi import BackgroundTasks, Depends, FastAPI, Header, HTTPException, Request, Response
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Mapped, Session, declarative_base, mapped_column
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import StreamingResponse

from idemp import AsyncInbox, Inbox
from idemp.context import BaseContext
from idemp.integrations._capture import current
from idemp.integrations.asgi import RESPONSES, Idempotency, Route, session, unit
from idemp.integrations.webhooks import github, standard, stripe, webhook
from tests.servers.databases import query
from tests.world import SINK, asynchronous_url

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TABLES = (
    "CREATE TABLE placed (sku VARCHAR(50), receipt VARCHAR(50))",
    "CREATE TABLE once (sku VARCHAR(50) UNIQUE DEFERRABLE INITIALLY DEFERRED)",
)
INSERT = text("INSERT INTO placed VALUES (:sku, :receipt)")
WAIT = text("SELECT pg_advisory_xact_lock_shared(:lock)")


class Once(declarative_base()):  # type: ignore[misc]
    __tablename__ = "once"
    sku: Mapped[str] = mapped_column(primary_key=True)


class Order(BaseModel):
    """An order, and what is to happen to it."""

    sku: str
    lock: int = 0
    status: int = 201
    fault: str = ""
    long: int = 0


Key = Annotated[str, Header(alias="Idempotency-Key", max_length=255, pattern="^[ -~]+$")]
Claim = Annotated[AsyncSession, Depends(session)]
PlainClaim = Annotated[Session, Depends(session)]
Unit = Annotated[BaseContext, Depends(unit)]
passed: list[str] = []
"""What background tasks have seen."""


def make(url: str, *, limit: int = 100_000, wait: float = 1.5, inner: bool = False, **pool: Any) -> FastAPI:
    """Return a service on a database: `async def` endpoints, and a plain one; perhaps with a middleware in between."""
    inbox, plain = AsyncInbox(create_async_engine(asynchronous_url(url), **pool)), Inbox(create_engine(url, **pool))
    api = FastAPI()
    api.state.inboxes = inbox, plain
    options: dict[str, Any] = {"client": lambda request: request.headers.get("authorization"), "limit": limit, "wait": wait}
    routes = [Route("POST", f"/{name}", f"shop.{name}") for name in ("orders", "stream", "later", "wrong")]
    routes += [Route("PATCH", "/orders/{sku}", "shop.change", required=False)]
    routes += [Route("POST", "/v1/payment_intents", "shop.pay"), Route("POST", "/accounts", "shop.open_account")]
    routes += [webhook(f"/hooks/{each.__name__}", f"shop.{each.__name__}", each(SECRET)) for each in (github, standard, stripe)]
    if inner:
        api.add_middleware(BaseHTTPMiddleware, dispatch=lambda request, call_next: call_next(request))
    api.add_middleware(Idempotency, inbox=inbox, routes=routes, **options)
    api.add_middleware(Idempotency, inbox=plain, routes=[Route("POST", "/plain", "shop.plain")], **options)

    def place(order: Order, unit: BaseContext, response: Response) -> tuple[str, list[Any]]:
        """Send a message, and return a receipt and the statements of an order."""
        unit.send({"sku": order.sku}, to=SINK, type="shop.Placed")
        receipt = secrets.token_hex(8)
        response.status_code = order.status
        response.set_cookie("seen", receipt)
        response.headers["location"] = f"/orders/{order.sku}"
        return receipt, [(INSERT, {"sku": order.sku, "receipt": receipt})] + [(WAIT, {"lock": order.lock})] * bool(order.lock)

    def fail(order: Order) -> None:
        if order.fault == "raise":
            raise HTTPException(order.status, "raised")
        if order.fault == "error":
            raise RuntimeError("of the endpoint")

    @api.post("/orders", status_code=201, responses=RESPONSES)
    async def place_order(
        order: Order, claim: Claim, unit: Unit, response: Response, key: Key, x_kill: Annotated[str, Header()] = ""
    ) -> dict[str, str]:
        receipt, statements = place(order, unit, response)
        for statement, values in statements:
            await claim.execute(statement, values)
        if x_kill == "endpoint":
            os.kill(os.getpid(), signal.SIGKILL)
        fail(order)
        if order.fault == "commit":
            await claim.commit()
        if order.fault == "gone":
            pid = await claim.scalar(text("SELECT pg_backend_pid()"))
            query(url, "SELECT pg_terminate_backend(%s, 5000)", pid)
        if order.fault == "conflict":
            try:
                await claim.execute(text("SELECT * FROM nowhere"))
            except DBAPIError as error:
                await claim.rollback()
                raise HTTPException(order.status, "no such order") from error
        if order.fault == "caught":
            with suppress(DBAPIError):
                await claim.execute(text("SELECT * FROM nowhere"))
        return {"receipt": receipt, "more": "." * order.long}

    @api.post("/plain", status_code=201, responses=RESPONSES)
    def place_plain(order: Order, claim: PlainClaim, unit: Unit, response: Response, key: Key) -> dict[str, str]:
        receipt, statements = place(order, unit, response)
        for statement, values in statements:
            claim.execute(statement, values)
        fail(order)
        return {"receipt": receipt}

    @api.patch("/orders/{sku}", responses=RESPONSES)
    async def change_order(sku: str, claim: Claim) -> dict[str, str]:
        await claim.execute(INSERT, {"sku": sku, "receipt": "changed"})
        return {"sku": sku}

    @api.post("/stream", responses=RESPONSES)
    async def stream(order: Order, claim: Claim, request: Request) -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            for part in "abc":
                if await request.is_disconnected():
                    return
                await claim.execute(INSERT, {"sku": order.sku, "receipt": part})
                yield part
                fail(order)

        return StreamingResponse(parts(), media_type="text/plain")

    @api.post("/later", status_code=201, responses=RESPONSES)
    async def later(order: Order, claim: Claim, unit: Unit, background: BackgroundTasks, response: Response) -> None:
        await claim.execute(INSERT, {"sku": order.sku, "receipt": "later"})
        if order.fault == "deferred":
            await claim.execute(text("INSERT INTO once VALUES ('taken'), ('taken')"))
        if order.fault == "unflushed":
            claim.add(Once(sku="longer than the column" * 3))
        response.status_code = order.status
        background.add_task(look, claim, unit)

    @api.post("/wrong")
    def wrong(claim: PlainClaim) -> None:
        raise AssertionError(claim)

    @api.post("/undeclared")
    async def undeclared(claim: Claim) -> None:
        raise AssertionError(claim)

    @api.post("/v1/payment_intents")
    @api.post("/accounts")
    async def of_provider(request: Request, claim: Claim) -> dict[str, str]:
        receipt = secrets.token_hex(8)
        await claim.execute(INSERT, {"sku": (await request.body()).decode()[:50], "receipt": receipt})
        return {"id": receipt, "object": "payment_intent", "type": "account"}

    @api.post("/hooks/{provider}")
    async def hook(provider: str, request: Request, claim: Claim) -> dict[str, str]:
        await claim.execute(INSERT, {"sku": provider, "receipt": str(len(await request.body()))})
        if len(await request.body()) > 1000:
            raise HTTPException(422)
        return {"from": provider}

    return api


async def look(claim: AsyncSession, unit: BaseContext) -> None:
    """Try in a background task what is over."""
    passed.append(str(current()))
    for attempt in (claim.sync_session.connection, lambda: unit.send({}, to=SINK, type="shop.Late")):
        try:
            attempt()
        except Exception as error:
            passed.append(type(error).__name__)


def killing(api: FastAPI) -> Any:
    """Put around a service what ends its process: between COMMIT and send, or between COMMIT and the answer.

    A header says so, or a file, which is deleted, for clients that repeat their headers.
    """
    inbox, killed, mark = api.state.inboxes[0], list[bool](), os.environ["KILL"]
    relay = inbox.relay()
    wake = relay.wake

    def waking() -> None:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        wake()

    relay.wake = waking

    async def app(scope: Any, receive: Any, send: Any) -> None:
        where = dict(scope.get("headers", ())).get(b"x-kill")
        if scope["type"] == "http":
            with suppress(FileNotFoundError):
                os.unlink(mark)  # noqa: PTH108 - of no other process, and at once
                where = b"answer"
        if where == b"send":
            killed.append(True)

        async def sending(message: Any) -> None:
            if where == b"answer":
                os.kill(os.getpid(), signal.SIGKILL)
            if where != b"send":  # then the thread that wakes the relay is the end
                await send(message)

        await api(scope, receive, sending)
        if where == b"send":  # a duplicate sends nothing
            os.kill(os.getpid(), signal.SIGKILL)

    return app


def main() -> None:
    shared = socket.create_server(("127.0.0.1", 0), backlog=512)
    print(shared.getsockname()[1], flush=True)
    for _ in sys.stdin:
        if (pid := os.fork()) == 0:
            app = killing(make(os.environ["IDEMP_DATABASE_URL"], wait=float(os.environ.get("WAIT", "1.5"))))
            uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="warning")).run(sockets=[shared])
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
