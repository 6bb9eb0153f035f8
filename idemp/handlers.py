"""Handlers and their registry: which function takes which message type, under which policy."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol, get_args, get_type_hints
from weakref import WeakSet

from idemp.codecs import Types, is_message_class, type_name
from idemp.context import BatchContext, Context
from idemp.effects.declared import encode_effect
from idemp.errors import ConfigurationError, UnknownMessageType
from idemp.findings import nearest
from idemp.identity import MAX_ID_BYTES
from idemp.key_types import check_key_types
from idemp.overrides import check_override, merged_policy
from idemp.policy import Policy
from idemp.work import Registration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from idemp.effects.declared import Effect
    from idemp.messages import Message

DEFAULT_BATCH: Final = 100
"""Messages that a batch handler gets at most, where its policy does not say it."""
_MESSAGE_AND_CONTEXT = 2
_NEAR_MISS = 0.85


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A handler as it was declared in code, before file and environment had their say."""

    message_type: str
    cls: type[Any]
    function: Callable[..., Any]
    policy: Policy | None = None
    aliases: tuple[str, ...] = ()
    replies: bool = False
    takes_batches: bool = False


class _Declarer(Protocol):
    @property
    def registry(self) -> Registry: ...


_DECLARERS: Final[WeakSet[_Declarer]] = WeakSet()


def remember_declarer(declarer: _Declarer) -> None:
    """Let `declarations_of` find the handlers of an app, or of a wrapped consumer, for as long as it exists."""
    _DECLARERS.add(declarer)


def declarations_of(function: Callable[..., Any]) -> list[tuple[Any, Declared]]:
    """Return the apps and wrapped consumers that declare a function as their handler, with the declarations.

    Example:
        >>> from idemp import App, Idempotent
        >>> app = App("orders")
        >>> @app.handler(dict, type="orders.Place", policy=Idempotent(key="id"))
        ... def place(message: dict[str, int]) -> None: ...
        >>> [(declarer is app, declared.policy.key.name) for declarer, declared in declarations_of(place)]
        [(True, 'field:id')]
    """
    return [
        (declarer, declared)
        for declarer in list(_DECLARERS)
        for declared in declarer.registry.declared.values()
        if declared.function == function
    ]


@dataclass
class Registry:
    """The handlers of one consumer.

    Attributes:
        default_type: the type of messages that come without one, `None` to park them.

    Example:
        >>> registry = Registry()
        >>> registry.add(Declared(message_type="a.B", cls=dict, function=lambda message: None))
        >>> registry.find_by_name("a.B").message_type
        'a.B'
    """

    default_type: str | None = None
    types: Types = field(default_factory=Types)
    declared: dict[str, Declared] = field(default_factory=dict)
    overrides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    effects: dict[str, Effect] = field(default_factory=dict)
    _built: dict[str, Registration] = field(default_factory=dict)
    _has_taken: bool = False  # a message that arrived

    def add(self, handler: Declared) -> None:
        """Register a handler.

        Raises:
            ConfigurationError: its type, or an alias, has a handler already; the function can't be a handler.
        """
        check_callable(handler.function)
        for name in (handler.message_type, *handler.aliases):
            _check_type_name(name)
            other = self._declared_for(name)
            if other is not None:
                raise ConfigurationError(
                    f"Message type {name!r} has two handlers: {_name(other.function)} and {_name(handler.function)}.",
                    fix="A consumer handles each type once; give the second one an App (a consumer) of its own.",
                )
        self.types.register(handler.cls, handler.message_type)
        self.declared[handler.message_type] = handler
        self._built = {}

    def add_effect(self, effect: Effect) -> None:
        """Register an effect.

        Raises:
            ConfigurationError: another function is registered under its name.
        """
        if effect.name in self.effects:
            raise ConfigurationError(
                f"Two functions are registered for the effect {effect.name!r}.", fix="Give each a name of its own."
            )
        self.effects[effect.name] = effect

    def encode_effect(self, name: str, value: Any) -> bytes:
        """The stored form of an effect's value.

        Raises:
            OutputError: no such effect is registered, or it takes something else.
        """
        return encode_effect(self.effects, name, value)

    def build(self, overrides: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """Merge policies and check them against the message classes.

        Raises:
            ConfigurationError: an override for a type without a handler, or a wrong option.
        """
        if self._built and overrides in (None, self.overrides):
            return
        if overrides is not None:
            self.overrides = overrides
        for name, options in self.overrides.items():
            check_override(name, options, "the settings")  # another app's, too: a name may be one that TOML took apart
            if self._declared_for(name) is None and difflib.get_close_matches(name, self.declared, cutoff=_NEAR_MISS):
                # A name like no other is some other app's: one file may serve several.
                raise ConfigurationError(
                    f"The settings have a policy for message type {name!r}, which has no handler here. "
                    f"{nearest(name, self.declared)}"
                )
        built: dict[str, Registration] = {}
        for handler in self.declared.values():
            registration = self._registration(handler)
            for name in (handler.message_type, *handler.aliases):
                built[name] = registration
        self._built = built  # at once: other threads are looking for handlers meanwhile

    def find(self, message: Message) -> Registration:
        """The registration for a message that has arrived.

        Raises:
            UnknownMessageType: there is none; says whether there was one for any message before.
        """
        try:
            found = self.find_by_name(message.type or self.default_type)
        except UnknownMessageType as error:
            error.queue_is_ours = self._has_taken
            raise
        self._has_taken = True
        return found

    def find_by_name(self, name: str | None) -> Registration:
        """The registration of a type or alias.

        Raises:
            UnknownMessageType: there is none.
        """
        if not self._built and self.declared:
            self.build()
        found = self._built.get(name) if name is not None else None
        if found is not None:
            return found
        if name is None:
            raise UnknownMessageType(
                "The message has no type, and its queue has no default type.",
                fix='Have the producer set the type property, or say default_type="…" for the queue.',
            )
        raise UnknownMessageType(
            f"No handler here takes messages of type {name!r}. {nearest(name, self._built) if self._built else ''}",
            fix="Deploy a handler, or list the name among a handler's aliases; then replay the dead letter.",
        )

    def registrations(self) -> list[Registration]:
        """All registrations, one per canonical type."""
        if not self._built and self.declared:
            self.build()
        return [self._built[name] for name in self.declared]

    def claim_former_headers(self) -> bool:
        """Have ids of headers claimed as earlier releases derived them, too; return whether that changes anything.

        Example:
            >>> from idemp.policy import Idempotent
            >>> registry = Registry()
            >>> policy = Idempotent(key={"header": "x-id"})
            >>> registry.add(Declared(message_type="a.B", cls=dict, function=lambda message: None, policy=policy))
            >>> registry.claim_former_headers(), registry.claim_former_headers()
            (True, False)
        """
        changed = False
        for registration in self.registrations():
            policy = registration.policy.with_former_headers()
            if policy is not registration.policy:
                changed, replaced = True, replace(registration, policy=policy)
                self._built = {name: replaced if each is registration else each for name, each in self._built.items()}
        return changed

    def unused(self) -> list[str]:
        """The entries of the settings that no handler here uses: another app's, or a mistake."""
        return sorted(name for name in self.overrides if self._declared_for(name) is None)

    def _declared_for(self, name: str) -> Declared | None:
        for handler in self.declared.values():
            if name == handler.message_type or name in handler.aliases:
                return handler
        return None

    def _registration(self, handler: Declared) -> Registration:
        codec = self.types.codec(handler.cls)
        overrides = [
            self.overrides[name] for name in (*handler.aliases, handler.message_type) if name in self.overrides
        ]
        policy = merged_policy(handler.message_type, handler.policy, *overrides)
        (codec.check_key if policy.idempotent else codec.check_fields)(policy.key.fields)
        for other in (policy.ordered_by, policy.entity, policy.dated_by):
            if other is not None:
                codec.check_fields(other.fields)
                if other is not policy.dated_by:  # a datetime is no id, and need not be one
                    check_key_types(handler.cls, other.fields)
        called: Callable[[Any, Any], Any] = _with_context(handler.function)
        if handler.takes_batches:
            policy = _policy_of_batches(handler, policy)
        return Registration(
            message_type=handler.message_type,
            handler=one_at_a_time(called) if handler.takes_batches else called,
            codec=codec,
            policy=policy,
            aliases=handler.aliases,
            replies=handler.replies,
            batch_handler=called if handler.takes_batches else None,
        )


def _policy_of_batches(handler: Declared, policy: Policy) -> Policy:
    if not policy.idempotent:
        raise ConfigurationError(
            f"{_name(handler.function)} takes batches, and {handler.message_type!r} is not opted in.",
            fix="Say policy=Idempotent(…): duplicates have to be taken out of a batch before its handler sees it.",
        )
    if "batch" in policy.model_fields_set:
        return policy
    return Policy(**{**{name: getattr(policy, name) for name in policy.model_fields_set}, "batch": DEFAULT_BATCH})


def one_at_a_time(function: Callable[[Any, Any], Any]) -> Callable[[Any, Context], Any]:
    """A batch handler for a message that runs alone."""

    def with_one(message: Any, ctx: Context) -> Any:
        together = BatchContext([ctx])
        (own,) = together.split(function([message], together))
        return own

    return with_one


def declare(
    function: Callable[..., Any],
    cls: type[Any] | None,
    *,
    type: str | None = None,
    policy: Policy | None = None,
    aliases: Iterable[str] = (),
    replies: bool = False,
    takes_batches: bool = False,
) -> Declared:
    """A handler from a function and what was said about it; the message class is read from its annotation if need be.

    Raises:
        ConfigurationError: no message class can be found, or it needs a type name and has none.

    Example:
        >>> def reserve(message: dict[str, object]) -> None: ...
        >>> declare(reserve, None, type="stock.Reserve").cls
        <class 'dict'>
    """
    cls = cls or _annotated_class(function, takes_batches=takes_batches)
    if cls is dict and type is None:
        raise ConfigurationError(
            f"{_name(function)} takes plain dicts, which carry no type name.", fix='Say type="package.Name".'
        )
    return Declared(
        message_type=type if type is not None else type_name(cls),
        cls=cls,
        function=function,
        policy=policy,
        aliases=tuple(aliases),
        replies=replies,
        takes_batches=takes_batches,
    )


def check_callable(function: Callable[..., Any]) -> None:
    """See that a function can be a handler.

    Raises:
        ConfigurationError: it is asynchronous, or takes neither `(message)` nor `(message, ctx)`.
    """
    called = (function, type(function).__call__)  # an object may be callable by an asynchronous method
    if any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in called):
        raise ConfigurationError(
            f"{_name(function)} is asynchronous.", fix="Handlers are plain functions; use threads for concurrency."
        )
    if _positional_parameters(function) not in {1, _MESSAGE_AND_CONTEXT}:
        raise ConfigurationError(
            f"{_name(function)} can't be a handler.", fix="A handler takes (message) or (message, ctx)."
        )


def _with_context(function: Callable[..., Any]) -> Callable[[Any, Context], Any]:
    if _positional_parameters(function) == _MESSAGE_AND_CONTEXT:
        return function

    def without_context(message: Any, _: Context) -> Any:
        return function(message)

    return without_context


def _positional_parameters(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"The signature of {function!r} can't be read: {error}.") from error
    positional = [item for item in parameters if item.kind in {item.POSITIONAL_ONLY, item.POSITIONAL_OR_KEYWORD}]
    if any(item.kind is item.KEYWORD_ONLY and item.default is item.empty for item in parameters):
        return -1
    required = [item for item in positional if item.default is item.empty]
    # A second parameter with a default is taken for the context only if it is named so; further ones keep their defaults.
    if len(required) <= 1 < len(positional):
        return _MESSAGE_AND_CONTEXT if positional[1].name in {"ctx", "context"} else 1
    return len(required) or len(positional)


def _annotated_class(function: Callable[..., Any], *, takes_batches: bool) -> Any:
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ConfigurationError(
            f"The annotations of {_name(function)} can't be read: {error}.",
            fix="Name the message class: @app.handler(TheMessage).",
        ) from error
    parameters = list(inspect.signature(function).parameters)
    annotated = hints.get(parameters[0]) if parameters else None
    if takes_batches:
        annotated = next(iter(get_args(annotated)), None)
    cls: Any = getattr(annotated, "__origin__", annotated)
    if not is_message_class(cls):
        raise ConfigurationError(
            f"{_name(function)} does not say which messages it takes.",
            fix="Annotate its first parameter with a message class (a batch handler's with a list of it), or name it: "
            "@app.handler(TheMessage).",
        )
    return cls


def _check_type_name(name: str) -> None:
    if not name or name != name.strip() or len(name.encode("utf-8")) > MAX_ID_BYTES or "\x00" in name:
        raise ConfigurationError(
            f"{name!r} can't be a message type name.", fix=f"Use 1 to {MAX_ID_BYTES} bytes without blanks around them."
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
