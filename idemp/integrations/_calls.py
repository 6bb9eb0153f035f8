"""Calls of functions that a task queue makes: what is claimed, and what becomes of a call whose handling raised an error."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any, Final
from uuid import UUID

from sqlalchemy.exc import InterfaceError, OperationalError

from idemp.context import BaseContext
from idemp.errors import ConfigurationError, DispatchIncomplete
from idemp.integrations._capture import capturing
from idemp.integrations._settling import Fate, fate
from idemp.messages import Output
from idemp.ports import Outlet

__all__ = ["Call", "Sender", "check_call"]

OPEN: Final = (DispatchIncomplete, InterfaceError, OperationalError)
"""Errors after the body that leave open what was committed, or whether what it has sent goes out: another run finds out."""


def check_call(function: Callable[..., Any], key: str | None, *, is_async: bool = False) -> None:
    """Check that a function is of the kind that its inbox calls, and has the argument that identifies its work.

    Raises:
        ConfigurationError: It has not.

    Example:
        >>> check_call(lambda order_id: None, "order")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: <lambda> has no argument 'order', which is its key
    """
    if inspect.iscoroutinefunction(function) is not is_async:
        kinds = ("an async def function", "a plain one")
        raise ConfigurationError(f"{function.__name__} has to be {kinds[not is_async]}, as its inbox calls it")
    if key is not None and key not in inspect.signature(function).parameters:
        raise ConfigurationError(f"{function.__name__} has no argument {key!r}, which is its key")


class Sender:
    """A broker that has no connections of its own: it sends in any thread."""

    def publisher(self) -> Any:
        """Return this object."""
        return self

    def send(self, outputs: Sequence[Output]) -> None:
        """Leave all to `publish`."""

    def close(self) -> None:
        """Leave the connections to the queue's own library."""


class Call:
    """One delivery of a call: how far it has come in this process.

    Args:
        id: Id that the queue has given to the call.
        function: The function that is called.
        args: Positional arguments.
        kwargs: Arguments by name.
        key: Argument that identifies the work; None for the id.
        injected: Class of defaults in whose place the queue passes something of the worker's.

    Attributes:
        claimed: The key, and a digest of all arguments by name, as the function gets them.
        handled: Whether what follows on success is stored under the claim, because this very call was the first one.

    Example:
        >>> def pay(order_id, cents=100): ...
        >>> one, other = Call("1", pay, (7,), {}), Call("2", pay, (), {"order_id": 7}, key="order_id")
        >>> one.claimed["id"], other.claimed["id"], one.claimed["arguments"] == other.claimed["arguments"]
        ('1', 7, True)
    """

    def __init__(
        self,
        id: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        key: str | None = None,
        injected: type | tuple[()] = (),
    ) -> None:
        bound = inspect.signature(function).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        arguments = {name: value for name, value in bound.arguments.items() if not isinstance(value, injected)}
        found = arguments.get(key or "", id)
        digest = sha256(json.dumps(arguments, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
        self.claimed = {"id": str(found) if isinstance(found, UUID) else found, "arguments": digest.hexdigest()}
        self.id, self.handled = id, False
        self._error: Exception | None = None
        self._returned = False

    @contextmanager
    def body(self, context: BaseContext, broker: Outlet) -> Iterator[None]:
        """Capture what the body sends, and remember how it ends."""
        self._error, self._returned = None, False
        try:
            with capturing(context, broker):
                yield
        except Exception as error:
            self._error = error
            raise
        self._returned = True

    def store(self, context: BaseContext, value: Any) -> None:
        """Store what the body returned.

        Raises:
            TypeError: It is no JSON.
        """
        context.result = json.dumps([self.id, value]).encode()

    def read(self, result: bytes | None) -> Any:
        """Return the value that the first call has returned; None if it was erased."""
        first, value = json.loads(result) if result else (self.id, None)
        self.handled = first == self.id
        return value

    def waits(self, error: Exception) -> bool:
        """Return whether the call has to run again, and is not to blame: it must neither be acknowledged nor count as failed."""
        return error is not self._error and (fate(error) is Fate.HOLD or (self._returned and isinstance(error, OPEN)))

    def is_dead(self, error: Exception) -> bool:
        """Return whether no retry can succeed."""
        return error is not self._error and fate(error) is Fate.DEAD
