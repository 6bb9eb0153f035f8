"""HTTP `Idempotency-Key`: a key, the changes of its endpoint and the answer are committed together, before the answer is sent."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from http import HTTPStatus
from inspect import iscoroutinefunction, isfunction
from typing import Any, Final
from uuid import UUID
from weakref import WeakValueDictionary

from sqlalchemy import exc
from sqlalchemy.orm import Session

from idemp.context import BaseContext
from idemp.errors import (
    BlockEnded,
    ConfigurationError,
    Conflict,
    InFlight,
    Late,
    TransactionEnded,
    Unreadable,
    UnusableOutput,
    describe_error,
    needs,
)
from idemp.inbox import AsyncInbox, Inbox
from idemp.integrations._capture import capturing
from idemp.messages import MAX_BODY_BYTES
from idemp.policy import Duration, Idempotent
from idemp.ports import Kind

with needs("asgi"):
    from anyio import CancelScope, CapacityLimiter, to_thread
    from starlette.requests import HTTPConnection  # FastAPI reads the annotations of `session` and `unit`
    from starlette.routing import compile_path

__all__ = ["RESPONSES", "Idempotency", "Refused", "Route", "is_final", "session", "unit"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY: Final = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])+)"|([\x20\x21\x23-\x2b\x2d-\x7e]+)')
"""A string of RFC 9651, or bare text without a comma, by which proxies join two headers."""
LONGEST_KEY: Final = 255  # characters
LONGEST_ANSWER: Final = MAX_BODY_BYTES - 100_000  # bytes, without status and headers
LONGEST_WAIT: Final = 3600.0  # seconds
PASSING: Final = frozenset({401, 403, 408, 409, 425, 429})
UNSTORED: Final = frozenset(
    b"connection date keep-alive proxy-authenticate set-cookie te trailer transfer-encoding upgrade".split()
)
AGAIN: Final = (b"retry-after", b"1")  # seconds
BUSY: Final = (HTTPStatus.CONFLICT, "a request with this key is being handled", AGAIN)
AWAY: Final = (
    HTTPStatus.SERVICE_UNAVAILABLE,
    "the database has not confirmed this request: send it again with the same key",
    AGAIN,
)
ANSWERS: Final[Mapping[type[Exception], tuple[Any, ...]]] = {
    InFlight: BUSY,
    Conflict: (HTTPStatus.UNPROCESSABLE_ENTITY, "this key was used with another request"),
    Late: (HTTPStatus.GONE, ""),
    Unreadable: (HTTPStatus.BAD_REQUEST, ""),
    BlockEnded: (HTTPStatus.INTERNAL_SERVER_ERROR, "the endpoint has ended its transaction; what it has done is not known"),
    Exception: (HTTPStatus.INTERNAL_SERVER_ERROR, "this request failed, and nothing was done"),
}
"""Answers to errors before and behind the endpoint, by the first class that fits; without a text, the error's own."""
_KINDS: Final = ("application/problem+json", "application/json")  # ours, and those of errors that FastAPI finds
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    status: {"description": HTTPStatus(status).phrase, "content": {kind: {"schema": {"type": "object"}} for kind in _KINDS}}
    for status in (400, 401, 409, 410, 413, 422, 500, 503)
}
"""What may be answered beside the endpoint's own answers, for `responses=` of FastAPI."""


def is_final(status: int) -> bool:
    """Return whether an answer is stored and replayed, and its changes are committed: below 500, but not what may pass.

    What may pass: 401, 403, 408, 409, 425, 429. Then everything is rolled back, and the same key runs the endpoint again.

    Example:
        >>> is_final(201), is_final(404), is_final(429), is_final(503)
        (True, True, False, False)
    """
    return status < 500 and status not in PASSING


@dataclass(frozen=True)
class Route:
    """Requests whose keys are claimed.

    Attributes:
        method: Such as `POST`.
        path: As Starlette and FastAPI have it.
        name: Of the operation. It is stored for good, so it has no ids in it, and outlives a change of the path.
        required: Whether a request without a key is refused; else it runs, in a transaction, each time.
        key: Returns the key of a request from its headers and its body, as webhooks have it, or raises `Unreadable`. Such a key is
            that of no client, and bodies under it are not compared.

    Example:
        >>> Route("POST", "/orders/{order_id}/refund", "shop.refund").required
        True
    """

    method: str
    path: str
    name: str
    required: bool = True
    key: Callable[[HTTPConnection, bytes], str] | None = None


class Idempotency:
    """Middleware that runs the endpoint once for each key of a client, and answers later requests as it has answered the first one.

    Args:
        app: What it is put around: `api.add_middleware(Idempotency, inbox=…)` passes it.
        inbox: `AsyncInbox` for `async def` endpoints, `Inbox` for plain ones, on the database that they change.
        routes: Which requests have keys. All others pass.
        client: Returns who sends a request, as text, a number or a UUID that stays the same: two clients may use one key, and a
            token that is renewed would make two of one. None refuses the request by 401.
        consumer: Scope of the names.
        retention: How long keys and answers are kept.
        wait: Seconds that a second request waits for the first one, before it is answered by 409.
        limit: Bytes that a request or an answer may have; an answer at most 16 MiB.
        final: Whether an answer of this status is stored, and its changes committed; else all is rolled back. A webhook's is final
            from 200 to 299.

    Raises:
        ConfigurationError: An argument does not fit; at the start of the server also, if the tables are missing.

    Example:
        >>> from sqlalchemy.ext.asyncio import create_async_engine
        >>> from starlette.applications import Starlette
        >>> api = Starlette()
        >>> api.add_middleware(
        ...     Idempotency,
        ...     inbox=AsyncInbox(create_async_engine("sqlite+aiosqlite:///shop.db")),
        ...     routes=[Route("POST", "/orders", "shop.place_order")],
        ...     client=lambda request: request.headers.get("x-api-key"),
        ... )
    """

    def __init__(
        self,
        app: App,
        *,
        inbox: AsyncInbox | Inbox,
        routes: Sequence[Route],
        client: Callable[[HTTPConnection], str | int | UUID | None],
        consumer: str = "http",
        retention: Duration = "1d",
        wait: float = 2.0,
        limit: int = 1_000_000,
        final: Callable[[int], bool] = is_final,
    ) -> None:
        self.app, self.inbox, self.client, self.wait, self.limit, self.final = app, inbox, client, wait, limit, final
        self._routes = [(each.method.upper(), compile_path(each.path)[0], each) for each in routes]
        self._places: dict[str, dict[str, Any]] = {}
        for each in routes:
            policy = Idempotent(key="id", retention=retention, fingerprint="none" if each.key else "body")
            self._places[each.name] = {"consumer": consumer, "type": each.name, "policy": policy}
        if found := [*self._faults()]:
            raise ConfigurationError("; ".join(found))
        self._running = WeakValueDictionary[tuple[str, str], asyncio.Lock]()
        self._claiming = CapacityLimiter(40)  # threads; among those of the endpoints, claims would wait for each other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle what a server passes (ASGI 3)."""
        if scope["type"] == "lifespan":
            return await self._live(scope, receive, send)
        method, path, root = scope.get("method"), scope.get("path", ""), scope.get("root_path", "").rstrip("/")
        path = path[len(root) :] if path.startswith(f"{root}/") else path  # as routers do
        route = next((route for each, pattern, route in self._routes if each == method and pattern.match(path)), None)
        if route is None:
            return await self.app(scope, receive, send)
        try:
            body, message = await self._read(route, scope, receive)
        except Unreadable as error:
            return await _refuse(send, getattr(error, "status", HTTPStatus.BAD_REQUEST), str(error))
        except ConnectionError:  # the client has gone
            return None
        # Copies in one process wait for each other without a connection.
        running = self._running.setdefault((route.name, message["id"]), asyncio.Lock())
        try:
            async with asyncio.timeout(self.wait):
                await running.acquire()
        except TimeoutError:
            return await _refuse(send, *BUSY)
        place = {**self._places[route.name], "wait": self.wait, "grace": 0.0}
        exchange = _Exchange(self, route, message, place, running.release, send)
        # Nothing that the client does cuts the endpoint short: half an answer would be stored.
        return await exchange.run(scope, _given({"type": "http.request", "body": body}, receive, exchange.ended))

    def _faults(self) -> Iterator[str]:
        if len(self._places) < len(self._routes):
            yield f"two routes have one name: {', '.join(route.name for *_, route in self._routes)}"
        yield from (f"{route} matches nothing: its path begins with /" for *_, route in self._routes if route.path[:1] != "/")
        yield from (f"{route} has no method of HTTP" for method, _, route in self._routes if not method.isalpha())
        if not 0 < self.wait <= LONGEST_WAIT or self.limit <= 0:
            yield f"wait={self.wait} has to be more than 0 and at most {LONGEST_WAIT:g} seconds, and limit={self.limit} 1 byte or more"
        if iscoroutinefunction(self.client):
            yield "client is async def: pass a plain function, and let a middleware outside of this one find out who it is"

    async def _read(self, route: Route, scope: Scope, receive: Receive) -> tuple[bytes, dict[str, str]]:
        """Return the body of a request, and what is claimed for it."""
        request, chunks, size, more = HTTPConnection(scope), list[bytes](), 0, True
        key, who = ("", "") if route.key else (_key(request, required=route.required), self.client(request))
        if who is None:
            raise Refused(HTTPStatus.UNAUTHORIZED, "it is not known who sends this request; nothing was done")
        while more:
            said = await receive()
            if said["type"] == "http.disconnect":
                raise ConnectionError
            chunks.append(said.get("body", b""))
            size, more = size + len(chunks[-1]), said.get("more_body", False)
            if size > self.limit:
                text = f"the body has more than {self.limit:,} bytes; nothing was done"
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
        body = b"".join(chunks)
        head = json.dumps([scope["method"], scope["path"], scope.get("query_string", b"").decode("latin-1")]).encode() + b"\n"
        if route.key:
            id = route.key(request, body)
        else:
            owner = sha256(str(who).encode()).hexdigest()[:32]
            id = f"{owner}:{key}" if len(key) <= 220 else f"{owner}#{sha256(key.encode()).hexdigest()}"  # an id has 255 bytes
        return body, {"id": id, "request": sha256(head + body).hexdigest()}

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and register before the app starts, and end the relay behind it."""
        starting = await receive()
        try:
            relay = self.inbox.relay()
            for place in self._places.values():
                await self.do(partial(self.inbox.prepare, **place))
            if self.inbox.has_broker:
                await asyncio.to_thread(relay.start)
        except Exception as error:  # a server would go on if it were only raised
            await send({"type": "lifespan.startup.failed", "message": describe_error(error)})
            raise
        try:
            await self.app(scope, _given(starting, receive), send)
        finally:
            await asyncio.to_thread(relay.stop)

    def is_away(self, error: Exception) -> bool:
        """Return whether the database takes no work, or has not said what became of a transaction."""
        from idemp.sql.engine import dialect_of

        engine = self.inbox.engine.sync_engine if isinstance(self.inbox, AsyncInbox) else self.inbox.engine
        if isinstance(error, InFlight):  # SQLite has one writer, whatever its key
            return engine.dialect.name == "sqlite"
        return isinstance(error, OSError) or dialect_of(engine).classify(error) in (Kind.LOST, Kind.TRANSIENT)

    async def do(self, function: Callable[..., Any], *arguments: Any, begins: bool = False) -> Any:
        """Await a method of an asynchronous inbox or session, or run one of a plain one in a thread."""
        if isinstance(self.inbox, AsyncInbox):
            return await function(*arguments)
        limiter = self._claiming if begins else CapacityLimiter(1)
        ended = asyncio.ensure_future(to_thread.run_sync(partial(function, *arguments), limiter=limiter))
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:  # no other thread may use the session meanwhile
            with CancelScope(shield=True):
                await asyncio.wait([ended])
            raise


class _Exchange:
    """A request and its answer, which is kept back until the transaction has ended."""

    def __init__(
        self,
        owner: Idempotency,
        route: Route,
        message: Mapping[str, str],
        place: Mapping[str, Any],
        release: Callable[[], None],
        send: Send,
    ) -> None:
        self.owner, self._route, self._release, self._send, inbox = owner, route, release, send, owner.inbox
        self.ended = asyncio.Event()
        self._start: dict[str, Any] = {}
        self._chunks, self._size = list[bytes](), 0
        self._over = self._failed = self._committing = False
        mode: dict[str, Any] = {"expire_on_commit": False, "close_resets_only": False}  # what is closed stays so
        self.unit: Any = None
        if isinstance(inbox, AsyncInbox):
            from sqlalchemy.ext.asyncio import AsyncSession

            self.session: Any = AsyncSession(inbox.engine, **mode)
            block: Any = inbox.claim(self.session, message, **place)
            self._methods = block.__aenter__, block.__aexit__, self.session.commit, self.session.__aexit__
        else:
            self.session = Session(inbox.engine, **mode)
            block = inbox.claim(self.session, message, **place)
            self._methods = self._enter, block.__exit__, self.session.commit, self.session.__exit__
        self._block = block

    async def run(self, scope: Scope, receive: Receive) -> None:
        """Claim the key, then run the endpoint, or answer as it has answered."""
        enter, *_ = self._methods
        try:
            self.unit = await self.owner.do(enter, begins=True)
            if self.unit.duplicate:
                await self._end()
        except BaseException as error:  # noqa: BLE001 - `_fail` raises it
            await self._end(error)
            return await self._fail(error)
        if self.unit.duplicate:
            return await self._replay()
        theirs = {name: said for name, said in (scope.get("extensions") or {}).items() if not name.startswith("http.response")}
        scope.update(extensions=theirs, idemp=self)  # no outer middleware would see the endpoint in a copy
        try:
            with capturing(self.unit, self.owner.inbox.broker):
                await self.owner.app(scope, receive, self._take)
        except BaseException as error:
            await self._end(error)
            raise
        return await self._end(ConnectionError("the app has not finished its answer"))

    def _enter(self) -> Any:
        self.unit = self._block.__enter__()  # here, because a task that is cancelled does not get what its thread returns
        return self.unit

    async def _end(self, error: BaseException | None = None) -> None:
        """Commit; or roll back, if there is an error. It does nothing if the transaction has ended."""
        if self._over:
            return
        self._over, (_, leave, commit, close), do = True, self._methods, self.owner.do
        with CancelScope(shield=True):  # other middleware cancels what it has called when a client goes away, again and again
            try:
                if self.unit is not None:
                    await do(leave, error and type(error), error, None)
                if error is None:
                    self._committing = True
                    await do(commit)
            except Exception:
                if error is None:
                    raise
            finally:
                try:
                    await do(close, None, None, None)
                finally:
                    self._release()
                    self.ended.set()

    async def _take(self, message: MutableMapping[str, Any]) -> None:
        """Take a part of the answer."""
        if self._over:
            return None if self._failed else await self._send(message)
        if message["type"] == "http.response.start":
            self._start = {**message, "headers": [*message.get("headers", ())]}
        if message["type"] == "http.response.body":
            self._chunks.append(message.get("body", b""))
            self._size += len(self._chunks[-1])
            if self._size > min(self.owner.limit, LONGEST_ANSWER):
                error = UnusableOutput(f"the answer has more than {self.owner.limit:,} bytes: answer with less, or raise limit=")
                await self._end(error)
                await self._fail(error)
            if not message.get("more_body"):
                await self._finish(self._start["status"], b"".join(self._chunks))
        return None

    async def _finish(self, status: int, body: bytes) -> None:
        if not (200 <= status < 300 if self._route.key else self.owner.final(status)):
            await self._end(ConnectionError(f"the answer is {status}"))
        else:
            kept = [pair for pair in self._start["headers"] if pair[0].lower() not in UNSTORED]
            head = [status, [[name.decode("latin-1"), value.decode("latin-1")] for name, value in kept]]
            self.unit.result = json.dumps(head).encode() + b"\n" + body
            try:
                await self.owner.do(self.session.flush)  # else COMMIT would do it, whose errors say less
                await self._end()
            except Exception as error:  # noqa: BLE001 - it is raised again, so that no background task runs
                await self._end(error)
                if status < HTTPStatus.BAD_REQUEST or not isinstance(error, TransactionEnded | exc.PendingRollbackError):
                    return await self._fail(error)
                # The endpoint says itself that it has failed, and was rolled back.
            if self.unit.stored:  # no answer waits for the broker
                asyncio.get_running_loop().run_in_executor(None, self.owner.inbox.relay().wake)
        await self._send(self._start)
        return await self._send({"type": "http.response.body", "body": body})

    async def _replay(self) -> None:
        if not self.unit.result:
            return await _refuse(self._send, HTTPStatus.GONE, "this request was handled, and its answer was erased")
        head, _, body = self.unit.result.partition(b"\n")
        status, kept = json.loads(head)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in [*kept, ("idempotent-replayed", "true")]]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        return await self._send({"type": "http.response.body", "body": body})

    async def _fail(self, error: BaseException) -> None:
        """Answer instead of the endpoint. What is not the client's fault is raised, so that the server logs it."""
        self._failed = True
        if not isinstance(error, Exception):
            raise error
        if isinstance(error, exc.StatementError):
            error.hide_parameters = True  # the answer is among them
        said = next(answer for kind, answer in ANSWERS.items() if isinstance(error, kind))
        # An error of COMMIT tells that nothing was done only if it is a constraint.
        unsure = self._committing and not isinstance(error, exc.IntegrityError)
        status, text, *headers = AWAY if unsure or self.owner.is_away(error) else said
        await _refuse(self._send, status, text or str(error), *headers)
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise error


def session(request: HTTPConnection) -> Any:
    """Return the session of the claim, which the middleware commits: `Annotated[AsyncSession, Depends(session)]`, or `Session`.

    Raises:
        ConfigurationError: The request has no declared route, or a plain `def` endpoint would get an asynchronous session.

    Example:
        >>> async def endpoint(request: HTTPConnection) -> None:
        ...     await session(request).execute(...)
    """
    exchange, endpoint = _exchange(request), request.scope.get("endpoint")
    if isinstance(exchange.owner.inbox, AsyncInbox) and isfunction(endpoint) and not iscoroutinefunction(endpoint):
        raise ConfigurationError(f"{endpoint.__name__} is a plain def, and its session is asynchronous: give its route an Inbox")
    return exchange.session


def unit(request: HTTPConnection) -> BaseContext:
    """Return the unit of the claim: `send`, `publish` and `forward` store messages, which go out after COMMIT.

    Raises:
        ConfigurationError: The request has no declared route.

    Example:
        >>> def endpoint(request: HTTPConnection) -> None:
        ...     unit(request).send({"order_id": 7}, to="stock", type="shop.Reserve")
    """
    found: BaseContext = _exchange(request).unit
    return found


def _exchange(request: HTTPConnection) -> _Exchange:
    found: _Exchange | None = request.scope.get("idemp")
    if found is None:
        raise ConfigurationError(f"{request.scope['path']} has no Route in the middleware Idempotency, so it has no claim")
    return found


class Refused(Unreadable):
    """A request that is answered before anything is claimed.

    Attributes:
        status: Of the answer.

    Example:
        >>> Refused(HTTPStatus.UNAUTHORIZED, "no signature fits").status.phrase
        'Unauthorized'
    """

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


def _key(request: HTTPConnection, *, required: bool) -> str:
    given = request.headers.getlist("idempotency-key")
    if not given and not required:
        return secrets.token_hex(16)
    match = KEY.fullmatch(given[0].strip()) if len(given) == 1 else None
    key = match and (match[2] or re.sub(r"\\(.)", r"\1", match[1]))
    if not key or len(key) > LONGEST_KEY:
        raise Unreadable(f"this request needs one Idempotency-Key of 1 to {LONGEST_KEY} visible characters; nothing was done")
    return key


def _given(first: MutableMapping[str, Any], receive: Receive, ended: asyncio.Event | None = None) -> Receive:
    """Return a function that receives a first message again, and then the others, but not before something has ended."""
    messages = [first]

    async def again() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        if ended is not None:
            await ended.wait()
        return await receive()

    return again


async def _refuse(send: Send, status: HTTPStatus, text: str, *headers: tuple[bytes, bytes]) -> None:
    """Answer as RFC 9457 has it."""
    body = json.dumps({"type": "about:blank", "title": status.phrase, "status": status, "detail": text}).encode()
    said = [(b"content-type", b"application/problem+json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": int(status), "headers": said})
    await send({"type": "http.response.body", "body": body})
