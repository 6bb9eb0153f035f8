"""How handlers are declared: the decorators of an `App`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, overload

from idemp.effects.declared import DEFAULT_ATTEMPTS, DEFAULT_TIMEOUT, declare_effect
from idemp.handlers import Declared, Registry, declare, remember_declarer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from idemp.durations import DurationLike
    from idemp.policy import Policy
    from idemp.prepared import PreparedMessages
    from idemp.retries import DelaysLike

M = TypeVar("M")
R = TypeVar("R")
P = ParamSpec("P")
F = TypeVar("F", bound="Callable[..., Any]")

_class = type


class Declaring:
    """Registers functions as handlers.

    Attributes:
        registry: where they are kept.
        prepared: the app's prepared messages, where it has some (see `idemp.prepared`).
    """

    registry: Registry
    prepared: PreparedMessages | None = None

    @overload
    def handler(
        self,
        message: type[M],
        /,
        *,
        policy: Policy | None = None,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
    ) -> Callable[[Callable[Concatenate[M, P], R]], Callable[Concatenate[M, P], R]]: ...

    @overload
    def handler(self, function: F, /) -> F: ...

    @overload
    def handler(
        self,
        /,
        *,
        policy: Policy | None = None,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
    ) -> Callable[[F], F]: ...

    def handler(
        self,
        message: Any = None,
        /,
        *,
        policy: Policy | None = None,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
    ) -> Any:
        """Register a function as the handler of a message type; the function stays as it is.

        Use it as `@app.handler(PlaceOrder, policy=…)`, or as `@app.handler` where the annotation names the message class.

        Args:
            message: pydantic model, dataclass or `dict`.
            policy: `Idempotent(…)` opts in; without it the handler runs on each delivery.
            type: type name on the wire; default `__message_type__` of the class, else `package.Class` with a warning.
            aliases: other names of the type.
            replies: whether returned messages answer the sender, where there is a `reply_to`.

        Raises:
            ConfigurationError: the type has a handler already, or the function can't be one.
        """
        options: dict[str, Any] = {"policy": policy, "type": type, "aliases": aliases, "replies": replies}
        if message is not None and not isinstance(message, _class):
            self._add(declare(message, None, **options))
            return message

        def decorate(function: F) -> F:
            self._add(declare(function, message, **options))
            return function

        return decorate

    @overload
    def batch_handler(
        self,
        message: type[M],
        /,
        *,
        policy: Policy,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
    ) -> Callable[[Callable[Concatenate[list[M], P], R]], Callable[Concatenate[list[M], P], R]]: ...

    @overload
    def batch_handler(
        self,
        /,
        *,
        policy: Policy,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
    ) -> Callable[[F], F]: ...

    def batch_handler(
        self,
        message: Any = None,
        /,
        *,
        policy: Policy,
        type: str | None = None,
        aliases: Iterable[str] = (),
        replies: bool = False,
    ) -> Any:
        """Register a function that takes several messages of a type at once: new ones only, in one transaction.

        It gets a list of messages, and a `BatchContext` if it has a second parameter. It returns nothing, or a list with
        one entry for each message: what a handler of one message would return. If it raises, its messages are handled
        again by halves, until it is known which one fails. Duplicates, and what runs alone, it never gets beside others.

        Args:
            message: as in `handler`.
            policy: `Idempotent(batch=…)`; without `batch` it gets 100 messages at most.
            type: as in `handler`.
            aliases: as in `handler`.
            replies: as in `handler`.

        Raises:
            ConfigurationError: the type has a handler already, is not opted in, or the function can't be one.

        Example:
            >>> from idemp import App, BatchContext, Idempotent
            >>> app = App("stock", database="sqlite://", broker="local://stock.db")
            >>> @app.batch_handler(dict, type="stock.Count", policy=Idempotent(batch=200))
            ... def count(messages: list[dict[str, object]], ctx: BatchContext) -> list[object]:
            ...     return [None for _ in messages]
        """
        options: dict[str, Any] = {"policy": policy, "type": type, "aliases": aliases, "replies": replies}

        def decorate(function: F) -> F:
            self._add(declare(function, message, takes_batches=True, **options))
            return function

        return decorate

    def effect(
        self,
        name: str,
        value: Any = None,
        /,
        *,
        retry: DelaysLike | None = None,
        max_attempts: int = DEFAULT_ATTEMPTS,
        timeout: DurationLike = DEFAULT_TIMEOUT,
    ) -> Callable[[F], F]:
        """Register the function that does what handlers declare by `ctx.effect(name, value)`; workers run it after COMMIT.

        It takes the value, and an `EffectRun` if it has a second parameter. It runs at least once: again after an
        exception, and after a process died between its end and the record of it, each time under the same `run.id`. What
        raises `EffectRefused`, or fails `max_attempts` times, is quarantined: `idemp inbox list --quarantined`.

        Args:
            name: stored with each effect: keep it when the function moves.
            value: the class of what it takes; default the annotation of its first parameter.
            retry: pauses between attempts, as in a policy's `delays`; default from 1 s up to an hour, doubling.
            max_attempts: runs after which it is quarantined.
            timeout: how long a run may take. Python can't cut it short: keep to `run.timeout`, or another run may begin
                beside it.

        Raises:
            ConfigurationError: another function has the name, the function can't be one, or an option makes no sense.

        Example:
            >>> from idemp import App
            >>> app = App("orders", database="sqlite://", broker="local://orders.db")
            >>> @app.effect("label.print", max_attempts=5, timeout="10s")
            ... def print_label(value: dict[str, str]) -> None: ...
            >>> sorted(app.registry.effects)
            ['label.print']
        """

        def decorate(function: F) -> F:
            self.registry.add_effect(
                declare_effect(name, function, value, retry=retry, max_attempts=max_attempts, timeout=timeout)
            )
            return function

        return decorate

    def _add(self, declared: Declared) -> None:
        self.registry.add(declared)
        remember_declarer(self)
