"""Handlers: a function, its message class and its policy."""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, AliasPath, BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo

from idemp.cloudevents import is_event
from idemp.context import FINGERPRINT, AsyncContext, BaseContext, Context
from idemp.errors import ConfigurationError, HandlerError, TimedOut, UnknownType, Unreadable
from idemp.events import log
from idemp.identity import Identify, Key, fingerprint, made_at
from idemp.messages import BOM, ORDINARY, Delivery, Output, check_media, check_text, parse, type_name
from idemp.policy import Idempotent, Policy, Previous, Retry, configured, seconds
from idemp.ports import Claim, Identity

__all__ = ["AnyMessage", "Handler", "Handlers", "check_model", "function_name"]

MARK: Final = BOM.encode()
LISTS: Final = re.compile(r"(?:typing\.|collections\.abc\.)?(?:list|List|Sequence)\[")
NO_KEYS: Final = (float, bytes, list, dict, set, tuple, frozenset)
MEANT: Final = {"message_id": "id of the envelope", "digest": "digest of the body"}
"""Keys that are not fields, by the name that a user may write by mistake."""


class AnyMessage(BaseModel, extra="allow"):
    """A message of any type, for handlers that need no fields but the key.

    Example:
        >>> AnyMessage.model_validate_json('{"id": 7}')
        AnyMessage(id=7)
    """


class Handler:
    """One message type of a consumer.

    Attributes:
        type: Type name of its messages.
        opted_in: Whether its messages are claimed.
        identity: Key and retention as they are stored and compared at start; None if the type is not opted in.
        batch: Maximum number of messages in a transaction.
        takes_list: Whether the function takes a list of messages, and one of their contexts.
        is_async: Whether the function is `async def`.
        timeout: Seconds that a run may last; None sets no limit.
        parks_late: Whether a message that is older than its retention window becomes a dead letter.
        seconds: Moving average of its run time; infinite before the first run.

    Raises:
        ConfigurationError: The function cannot be a handler, or its key cannot be an id.

    Example:
        >>> class Pay(BaseModel):
        ...     __message_type__ = "shop.Pay"
        ...     id: int
        >>> handler = Handler("billing", Pay, lambda message: None, Idempotent(key="id"))
        >>> message, claim = handler.accept(Delivery("billing", {}, b'{"id": 7}'))
        >>> message.id, claim.original
        (7, 'i:7')
    """

    def __init__(
        self,
        consumer: str,
        model: type[BaseModel],
        function: Callable[..., Any],
        policy: Policy,
        *,
        type: str | None = None,
        replies: bool = False,
    ) -> None:
        check_model(model)
        if not isinstance(policy, Policy):
            raise ConfigurationError(f"policy={policy!r} is not a policy: write Idempotent(…) or Policy(…)")
        self.consumer, self.model, self.function, self.policy, self.replies = consumer, model, function, policy, replies
        self.type = check_text(type, "type") if type is not None else type_name(model)
        self.seconds = float("inf")
        self.timeout = None if policy.timeout is None else seconds(policy.timeout)
        self._doubted = False
        self._validate = model.model_validate_json
        self.is_async = _is_async(function)
        self.context = AsyncContext if self.is_async else Context
        self._takes_context, self.takes_list = _signature(function, model, self.context)
        self.opted_in = isinstance(policy, Idempotent)
        self._identify: Identify | None = None
        self._identify_former: Identify | None = None
        self.identity: Identity | None = None
        self.batch, self.parks_late = 1, False
        if isinstance(policy, Idempotent):
            key = Key.of(policy.key)
            if key.kind == "body":
                for name in key.names:
                    _check_value(model, name.split("."), self.type, name)
            self._identify = key.reader(self.type)
            self._compares, self._skips = policy.fingerprint == "body", policy.on_conflict == "skip"
            self.batch, self.parks_late = policy.batch, policy.late == "park"
            self._always = policy.redispatch == "always"
            window, former = seconds(policy.retention), None
            if isinstance(previous := policy.previous, Previous):
                former_key = Key.of(previous.key) if previous.key is not None else key
                place = (previous.consumer or consumer, previous.type or self.type)
                former = Identity(*place, former_key.descriptor, window)
                self._identify_former = former_key.reader(former.type)
            unrelated = policy.previous == "none"
            self.identity = Identity(consumer, self.type, key.descriptor, window, former, unrelated)

    def with_options(self, options: Mapping[str, Any]) -> Handler:
        """Return the handler with options of its policy replaced."""
        policy = configured(self.policy, options, self.type)
        return Handler(self.consumer, self.model, self.function, policy, type=self.type, replies=self.replies)

    @property
    def types(self) -> list[str]:
        """Type names of its messages: its own, and the former one."""
        former = self.identity.former if self.identity else None
        return [self.type] if former is None or former.type == self.type else [self.type, former.type]

    def describe(self) -> dict[str, Any]:
        """Return type, policy and name of the handler, as text, numbers and booleans."""
        retry, identity = self.policy.retry, self.identity
        described: dict[str, Any] = {"type": self.type, "opted_in": self.opted_in, "key": None, "previous": None}
        if identity and isinstance(self.policy, Idempotent):
            described["key"] = Key.described(identity.descriptor).option
            if former := identity.former:
                key = Key.described(former.descriptor).option
                described["previous"] = {"consumer": former.consumer, "type": former.type, "key": key}
            described |= {"retention": identity.retention, "batch": self.batch, "fingerprint": self.policy.fingerprint}
            described |= {name: getattr(self.policy, name) for name in ("on_conflict", "redispatch", "late")}
        else:
            described |= dict.fromkeys(("retention", "batch", "fingerprint", "on_conflict", "redispatch", "late"), None)
        delays = [seconds(delay) for delay in retry.delays]
        described |= {"timeout": self.timeout}
        return described | {"attempts": retry.attempts, "delays": delays, "handler": function_name(self.function)}

    def accept(self, delivery: Delivery) -> tuple[BaseModel, Claim | None]:
        """Decode a message and identify it.

        Raises:
            Unreadable: The message has no usable body or id.
        """
        claim = self.identify(delivery)
        return self.decode(delivery), claim

    def decode(self, delivery: Delivery) -> BaseModel:
        """Decode a message that was identified.

        Raises:
            Unreadable: The body does not fit the class.
        """
        try:
            return self._validate(delivery.body.removeprefix(MARK))
        except ValidationError as error:
            fields = "; ".join(
                f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
                for problem in error.errors(include_input=False)
            )
            raise Unreadable(f"the body is not a valid {self.type}: {fields}") from None

    def identify(self, delivery: Delivery) -> Claim | None:
        """Return the claim of a message, without its class; None for a type that is not opted in.

        Raises:
            Unreadable: The message has no usable body or id.
        """
        properties = delivery.properties
        headers: Any = properties.get("headers") or {}
        if not isinstance(headers, Mapping):
            raise Unreadable("the headers are not a mapping")
        if headers.get("compression"):
            raise Unreadable("the body is compressed: send JSON text in UTF-8")
        if properties.get("content_type") not in ORDINARY or properties.get("content_encoding") is not None:
            check_media(properties, delivery.body)
        document = parse(delivery.body)
        claim = None
        if self._identify is not None:
            compared = self._compares and headers.get(FINGERPRINT) != "none"
            # A second copy without the broker's flag leaves pending outputs to the worker that has just stored them.
            again = delivery.redelivered or delivery.row is not None
            made, stamp = made_at(properties), properties.get("timestamp")
            if made is None and stamp is not None and not self._doubted:
                self._doubted = True
                log("message.undated", type=self.type, id=properties.get("message_id"), timestamp=stamp)
            rest: tuple[Any, ...] = (
                fingerprint(document) if compared else None,
                made,
                self._skips,
                "always" if self._always else "pending" if again else "due",
            )
            if self._identify_former is None:
                original, key = self._identify(properties, document)
                claim = Claim(self.consumer, self.type, key, original, *rest)
            else:
                claim = self._claim_with_former(properties, document, rest)
        return claim

    def _claim_with_former(self, properties: Mapping[str, Any], document: Any, rest: tuple[Any, ...]) -> Claim:
        """Return a claim by the present and the former identity, or by the one that the message has a key for."""
        assert self._identify is not None
        assert self._identify_former is not None
        assert self.identity is not None
        assert self.identity.former is not None
        former = self.identity.former
        claims = []
        for consumer, type, identify in (
            (self.consumer, self.type, self._identify),
            (former.consumer, former.type, self._identify_former),
        ):
            with suppress(Unreadable):
                original, key = identify(properties, document)
                claims.append(Claim(consumer, type, key, original, *rest))
        if not claims:
            self._identify(properties, document)  # raises
        if len(claims) == 2 and claims[0].place == claims[1].place and properties.get("type") == former.type:
            claims.reverse()  # one claim, of the type that the message says: the former release knows it
        if len(claims) == 2:
            claims[0].former = claims[1]
        return claims[0]

    def ran(self, took: float) -> None:
        """Update the moving average of run times."""
        self.seconds = took if self.seconds == float("inf") else self.seconds + (took - self.seconds) / 8

    def call(self, messages: Sequence[Any], contexts: Sequence[BaseContext]) -> list[list[Output]]:
        """Run the function for one message, or for a list; return the outputs of each. Its return values are emitted, too."""
        result = self._run(messages, contexts)
        if result is not None:
            if inspect.isawaitable(result) or inspect.isasyncgen(result):
                raise HandlerError(
                    f"{function_name(self.function)} returned an awaitable, so nothing ran: write the handler as async def"
                )
            self._emit_all(result, contexts)
        return [contexts[0].outputs()] if len(contexts) == 1 else [context.outputs() for context in contexts]

    async def call_async(self, messages: Sequence[Any], contexts: Sequence[BaseContext]) -> list[list[Output]]:
        """Run an `async def` function as `call` runs a plain one, and cancel it when its time is over."""
        if self.timeout is None:
            return await self._call_async(messages, contexts)
        start = time.monotonic()
        try:
            async with asyncio.timeout(self.timeout) as limit:
                outputs = await self._call_async(messages, contexts)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimedOut(time.monotonic() - start, self.timeout) from error
        took = time.monotonic() - start
        if limit.expired() or took > self.timeout:  # and it has caught its cancellation, or computed without a wait
            raise TimedOut(took, self.timeout)
        return outputs

    async def _call_async(self, messages: Sequence[Any], contexts: Sequence[BaseContext]) -> list[list[Output]]:
        result = self._run(messages, contexts)
        if not inspect.isasyncgen(result):
            result = await result
        elif self.takes_list:
            result = [each async for each in result]
        else:
            async for each in result:
                self._emit(each, contexts[0])
            result = None
        if result is not None:
            self._emit_all(result, contexts)
        return [context.outputs() for context in contexts]

    def _run(self, messages: Sequence[Any], contexts: Sequence[BaseContext]) -> Any:
        if self.takes_list:
            return self.function(list(messages), list(contexts)) if self._takes_context else self.function(list(messages))
        return self.function(messages[0], contexts[0]) if self._takes_context else self.function(messages[0])

    def _emit_all(self, result: Any, contexts: Sequence[BaseContext]) -> None:
        """Emit what the function returned or yields: for one message any number of results, for a list one a message."""
        results = result if isinstance(result, Iterator | list | tuple) else (result,)
        if not self.takes_list:
            for each in results:
                self._emit(each, contexts[0])
            return
        results = list(results)
        if len(results) != len(contexts):
            raise HandlerError(f"a handler of lists returns one result a message, or None: {len(results)} for {len(contexts)}")
        for each, context in zip(results, contexts, strict=True):
            if each is not None:
                self._emit(each, context)

    def _emit(self, result: Any, context: BaseContext) -> None:
        if not isinstance(result, BaseModel):
            raise HandlerError(
                f"a handler returns or yields pydantic models, not {result.__class__.__name__}: use ctx.publish(…, type=…)"
            )
        if self.replies:
            context.reply(result)
        else:
            context.publish(result)


class Handlers(dict[str, Handler]):
    """The handlers of a consumer, by the type names of their messages.

    Attributes:
        default: Type of messages that do not say theirs; empty if there is none.

    Example:
        >>> Handlers().find(Delivery("billing", {"type": "shop.Pay"}, b"{}"))
        Traceback (most recent call last):
        idemp.errors.UnknownType: no handler takes messages of type 'shop.Pay'
    """

    default: str = ""

    def find(self, delivery: Delivery) -> Handler:
        """Return the handler of a delivery that was read by `read_delivery`.

        Raises:
            UnknownType: There is none.
        """
        said = delivery.properties.get("type")
        type = self.default if said is None or said == "" else said
        if isinstance(type, str) and (handler := self.get(type)) is not None:
            return handler
        raise UnknownType(f"no handler takes messages of type {said!r}" if said else "the message does not say its type")

    def map(self, change: Callable[[Handler], Handler]) -> Handlers:
        """Return the same types with other handlers."""
        found = Handlers({type: change(handler) for type, handler in self.items()})
        found.default = self.default
        return found

    def of_undecoded(self, delivery: Delivery) -> Handler | None:
        """Return the handler of a delivery as it came from the broker; None if that is not sure, as of a CloudEvent."""
        with suppress(UnknownType):
            return None if is_event(delivery.properties) else self.find(delivery)
        return None

    def most_attempts(self, delivery: Delivery) -> int:
        """Return the attempts of a delivery as it came from the broker, or the most of all types if its own is not sure."""
        handler = self.of_undecoded(delivery)
        handlers = self.values() if handler is None else (handler,)
        return max((each.policy.retry.attempts for each in handlers), default=Retry.attempts)


def check_model(model: object) -> None:
    """Refuse an object that is not a message class, such as the function below `@app.handler` without parentheses.

    Raises:
        ConfigurationError: The object is not a pydantic model.

    Example:
        >>> check_model(function_name)
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: function_name is not a pydantic model: write @app.handler(Model) with its message class
    """
    if not (inspect.isclass(model) and issubclass(model, BaseModel)):
        shown = function_name(model) if inspect.isroutine(model) else repr(model)
        raise ConfigurationError(f"{shown} is not a pydantic model: write @app.handler(Model) with its message class")


def function_name(function: Callable[..., Any]) -> str:
    """Return the name of a function; for a partial one that of its function, for an object that of its class.

    Example:
        >>> function_name(partial(function_name)), function_name(Handler.ran)
        ('function_name', 'Handler.ran')
    """
    function = function.func if isinstance(function, partial) else function
    name: str = getattr(function, "__qualname__", type(function).__qualname__)
    return name


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(_called(function)) or _is_async_generator(function)


def _is_async_generator(function: Callable[..., Any]) -> bool:
    return inspect.isasyncgenfunction(_called(function))


def _called(function: Callable[..., Any]) -> Any:
    return function if inspect.isroutine(function) or isinstance(function, partial) else getattr(function, "__call__", None)  # noqa: B004


def _signature(function: Callable[..., Any], model: type[BaseModel], context: type[BaseContext]) -> tuple[bool, bool]:
    """Return whether a function takes a context, and whether it takes lists; refuse types with which no message could be handled."""
    name, kinds = function_name(function), (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    needed = [parameter for parameter in signature.parameters.values() if parameter.kind in kinds]
    annotations = [_resolved(function, parameter.annotation) for parameter in needed]
    takes_list = bool(annotations) and _is_list(function, annotations[0])
    inner = [_item(annotation) if takes_list else annotation for annotation in annotations]
    if len(needed) == 2 and needed[1].default is not inspect.Parameter.empty and not _takes(inner[1], context):
        del needed[1]  # an option of its own
    if not 1 <= len(needed) <= 2:
        raise ConfigurationError(f"{name} has to take a message, and a context if it needs one")
    if not _takes(inner[0], model):
        raise ConfigurationError(
            f"{name} takes {_shown(inner[0])}, and is registered for {model.__name__}: name the class that it takes, as in "
            f"@app.handler({_shown(inner[0])})"
        )
    if len(needed) == 2 and not _takes(inner[1], context):
        kind = "async def" if context is AsyncContext else "a plain function"
        raise ConfigurationError(
            f"{name} is {kind}, so its second parameter is its {context.__name__}, not {_shown(annotations[1])}"
        )
    returned = _resolved(function, signature.return_annotation)
    if _is_async_generator(function):
        refused = _never_emitted(_item(returned), several=False, none=takes_list)
    else:
        refused = _never_emitted(returned, several=True, none=True, none_inside=takes_list)
    if refused is not None:
        raise ConfigurationError(
            f"{name} may return {_shown(refused)}, which cannot be published: return or yield pydantic models, or use "
            "ctx.publish(…, type=…) and return nothing"
        )
    return len(needed) == 2, takes_list


def _resolved(function: Callable[..., Any], annotation: Any) -> Any:
    """Return the type that an annotation means; as it is, if its names are not known here."""
    if annotation is inspect.Parameter.empty:
        return Any
    called: Any = function
    while isinstance(called, partial):
        called = called.func
    called = inspect.unwrap(called if inspect.isroutine(called) else type(called).__call__)
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), getattr(called, "__globals__", {}))["it"]
    except Exception:  # noqa: BLE001 - annotations may be anything
        return annotation


def _item(annotation: Any) -> Any:
    return next(iter(get_args(annotation)), Any)


def _shown(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) and not get_args(annotation) else str(annotation)


def _takes(annotation: Any, kind: type) -> bool:
    """Return whether a parameter takes objects of a class, as far as its type says."""
    return any(plain is None or _is_a(kind, plain) for plain in map(_class_of, _options(annotation)))


def _class_of(option: Any) -> type | None:
    """Return the class that a type annotation names; None if it restricts no classes."""
    plain = get_origin(option) or option
    if not isinstance(plain, type) or plain is Any or getattr(plain, "_is_protocol", False):
        return None
    generic = getattr(plain, "__pydantic_generic_metadata__", None) or {"origin": None, "args": ()}
    loose = any(each is Any or not isinstance(each, type) for each in generic["args"])  # Envelope[Any] is any Envelope
    return generic["origin"] if loose else plain


def _is_a(kind: type, plain: type) -> bool:
    try:
        return issubclass(kind, plain)
    except TypeError:  # a TypedDict, of which nothing is an instance
        return False


def _never_emitted(annotation: Any, *, several: bool, none: bool, none_inside: bool = False) -> Any:
    """Return the part of a return type that cannot be a message; None if there is none.

    Args:
        annotation: The type of returned or yielded objects.
        several: Whether a list, a tuple or an iterator of messages is taken.
        none: Whether None is taken.
        none_inside: Whether None is taken in a list.
    """
    for option in _options(annotation):
        plain = _class_of(option)
        if plain is None or _may_be_model(plain) or (none and plain is NoneType):
            continue
        if not several or not any(_is_a(each, plain) or _is_a(plain, each) for each in (Iterator, list, tuple)):
            return option
        inside: Sequence[Any] = get_args(option) if plain is tuple else get_args(option)[:1]
        for each in inside:
            if each is not ... and (refused := _never_emitted(each, several=False, none=none_inside)) is not None:
                return refused
    return None


def _may_be_model(plain: type) -> bool:
    """Return whether an object of a class can be a pydantic model: by its own class, or by one that is derived from it."""
    if _is_a(plain, BaseModel) or plain is object:
        return True
    derived: list[type] = type.__subclasses__(plain)
    return any(map(_may_be_model, derived))


def _is_list(function: Callable[..., Any], annotation: Any) -> bool:
    """Return whether the first parameter is a list of messages; a model that can be iterated is not, and a tuple is refused."""
    kind = get_origin(annotation) or annotation
    if kind in (list, Sequence) or (isinstance(annotation, str) and LISTS.match(annotation)):
        return True
    if isinstance(kind, type) and issubclass(kind, Iterable) and not issubclass(kind, BaseModel):
        raise ConfigurationError(
            f"{function_name(function)} takes {annotation}: a handler takes a message, or a list of them: list[Model]"
        )
    return False


def _check_field(model: type[BaseModel], path: list[str], type: str, key: str) -> None:
    """Refuse a key that names no field of the JSON text, or a field that cannot be an id."""
    where, found = f"{type}: key {key!r}", False
    model.model_rebuild(raise_errors=False)  # else an alias generator may not have run
    wires = [(wire, field) for name, field in model.model_fields.items() for wire in _wire_paths(model, name, field)]
    for wire, field in wires:
        if path[: len(wire)] == wire:
            _check_value(field.annotation, path[len(wire) :], type, key)
            found = True
        elif wire[: len(path)] == path:
            raise ConfigurationError(f"{where} is an object: name a field in it, such as '{'.'.join([key, *wire[len(path) :]])}'")
    if not found and model.model_config.get("extra") != "allow":
        meant = f"; write Key.{key}(), in a file {Key(key)}, for the {MEANT[key]}" if key in MEANT else ""
        known = ", ".join(sorted({".".join(wire) for wire, _ in wires}))
        raise ConfigurationError(f"{where} is not a field of {model.__name__} on the wire: it has {known}{meant}")


def _check_value(annotation: Any, path: list[str], type: str, key: str) -> None:
    """Refuse a value that cannot be an id, or, where a path leads on, has no fields."""
    where, options = f"{type}: key {key!r}", _options(annotation)
    for option in options:
        plain = get_origin(option) or option
        if not inspect.isclass(plain):
            continue
        if issubclass(plain, RootModel):
            _check_value(plain.model_fields["root"].annotation, path, type, key)
        elif issubclass(plain, BaseModel):
            if not path:
                raise ConfigurationError(f"{where} is an object: name a field in it, such as '{key}.id'")
            _check_field(plain, path, type, key)
        elif issubclass(plain, NO_KEYS) and not (path and issubclass(plain, dict)):
            raise ConfigurationError(
                f"{where} may be {plain.__name__}, which is not a usable id: text, integers and booleans are"
            )
    if path and all(option in (str, int, bool, NoneType) for option in options):
        raise ConfigurationError(f"{where} names a field of {_shown(options[0])}, which has none")


def _wire_paths(model: type[BaseModel], name: str, field: FieldInfo) -> list[list[str]]:
    """Return the places of a field in the JSON text, as the model's configuration reads it."""
    config, alias = model.model_config, field.validation_alias
    by_alias = config.get("validate_by_alias") is not False
    by_name = config.get("validate_by_name") or config.get("populate_by_name") or not by_alias
    aliases = alias.choices if isinstance(alias, AliasChoices) else [] if alias is None else [alias]
    paths: list[list[Any]] = [list(each.path) if isinstance(each, AliasPath) else [each] for each in aliases if by_alias]
    paths += [[name]] if by_name or not aliases else []
    return [
        path for path in paths if all(isinstance(step, str) and "." not in step for step in path)
    ]  # no key can name the others


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [option for each in get_args(annotation) for option in _options(each)]
    return [annotation]
