"""Handlers: a function, its message class and its policy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import UnionType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from pydantic import AliasChoices, AliasPath, BaseModel, ValidationError

from idemp.context import FINGERPRINT, AsyncContext, BaseContext, Context
from idemp.errors import ConfigurationError, HandlerError, Unreadable
from idemp.events import log
from idemp.identity import Identify, Key, fingerprint, made_at
from idemp.messages import BOM, ORDINARY, Delivery, Output, check_media, check_text, parse, type_name
from idemp.policy import Idempotent, Policy, Previous, configured, seconds
from idemp.ports import Claim, Identity

__all__ = ["AnyMessage", "Handler", "function_name"]

MARK: Final = BOM.encode()
LISTS: Final = re.compile(r"(?:typing\.|collections\.abc\.)?(?:list|List|Sequence)\[")
NO_KEYS: Final = (float, bytes, list, dict, set, tuple, frozenset)


class AnyMessage(BaseModel, extra="allow"):
    """A message of which only its key is of interest.

    Example:
        >>> AnyMessage.model_validate_json('{"id": 7}')
        AnyMessage(id=7)
    """


class Handler:
    """One message type of a consumer.

    Attributes:
        type: Type name of its messages.
        opted_in: Whether its messages are claimed.
        identity: What is stored of its key, and compared at start; None if it is not opted in.
        batch: Messages that share a transaction at most.
        takes_list: Whether the function takes a list of messages, and one of their contexts.
        is_async: Whether the function is `async def`.
        parks_late: Whether a message that is older becomes a dead letter.
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
        if not (inspect.isclass(model) and issubclass(model, BaseModel)):
            raise ConfigurationError(f"{model!r} is no pydantic model: a handler names the class of its messages")
        self.consumer, self.model, self.function, self.policy, self.replies = consumer, model, function, policy, replies
        self.type = check_text(type, "type") if type is not None else type_name(model)
        self.seconds = float("inf")
        self._doubted = False
        self._validate = model.model_validate_json
        self.is_async = _is_async(function)
        self.context = AsyncContext if self.is_async else Context
        self._takes_context, self.takes_list = _signature(function, self.context)
        self.opted_in = isinstance(policy, Idempotent)
        self._identify: Identify | None = None
        self._identify_former: Identify | None = None
        self.identity: Identity | None = None
        self.batch, self.parks_late = 1, False
        if isinstance(policy, Idempotent):
            key = Key.of(policy.key)
            if key.kind == "body":
                for name in key.names:
                    _check_field(model, name.split("."), f"{self.type}: key {name!r}")
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
        """Return what is decided for its messages, as text, numbers and booleans."""
        retry, identity = self.policy.retry, self.identity
        said: dict[str, Any] = {"type": self.type, "opted_in": self.opted_in, "key": identity.descriptor if identity else None}
        if identity and isinstance(self.policy, Idempotent):
            former = identity.former
            said |= {"previous": f"{former.consumer} {former.type} {former.descriptor}" if former else None}
            said |= {"retention": identity.retention, "batch": self.batch, "fingerprint": self.policy.fingerprint}
            said |= {name: getattr(self.policy, name) for name in ("on_conflict", "redispatch", "late")}
        else:
            said |= dict.fromkeys(("previous", "retention", "batch", "fingerprint", "on_conflict", "redispatch", "late"), None)
        delays = [seconds(each) for each in retry.delays]
        return said | {"attempts": retry.attempts, "delays": delays, "handler": function_name(self.function)}

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
                f"{'.'.join(map(str, each['loc'])) or 'body'}: {each['msg']}" for each in error.errors(include_input=False)
            )
            raise Unreadable(f"the body is no {self.type}: {fields}") from None

    def identify(self, delivery: Delivery) -> Claim | None:
        """Return the claim of a message, without its class; None for a type that is not opted in.

        Raises:
            Unreadable: The message has no usable body or id.
        """
        properties = delivery.properties
        headers: Any = properties.get("headers") or {}
        if not isinstance(headers, Mapping):
            raise Unreadable("the headers are no mapping")
        if headers.get("compression"):
            raise Unreadable("the body is compressed: send JSON text in UTF-8")
        if properties.get("content_type") not in ORDINARY or properties.get("content_encoding") is not None:
            check_media(properties, delivery.body)
        document = parse(delivery.body)
        claim = None
        if self._identify is not None:
            compared = self._compares and headers.get(FINGERPRINT) != "none"
            again = delivery.redelivered or delivery.row is not None
            made, stamp = made_at(properties), properties.get("timestamp")
            if made is None and stamp is not None and not self._doubted:
                self._doubted = True
                log("message.undated", type=self.type, id=properties.get("message_id"), timestamp=stamp)
            rest: tuple[Any, ...] = (
                fingerprint(document) if compared else None,
                made,
                self._skips,
                "always" if self._always else "pending" if again else "grace",
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
        """Take a run into the moving average of run times."""
        self.seconds = took if self.seconds == float("inf") else self.seconds + (took - self.seconds) / 8

    def call(self, messages: Sequence[Any], contexts: Sequence[BaseContext]) -> list[list[Output]]:
        """Run the function for one message, or for a list; return the outputs of each. What it returns is emitted, too."""
        result = self._run(messages, contexts)
        if result is not None:
            if inspect.isawaitable(result) or inspect.isasyncgen(result):
                raise HandlerError(
                    f"{function_name(self.function)} returned an awaitable, so nothing ran: write the handler as async def"
                )
            self._emit_all(result, contexts)
        return [contexts[0].outputs()] if len(contexts) == 1 else [context.outputs() for context in contexts]

    async def call_async(self, messages: Sequence[Any], contexts: Sequence[BaseContext]) -> list[list[Output]]:
        """Do the same for an `async def` function."""
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
    called = function if inspect.isroutine(function) or isinstance(function, partial) else getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called)


def _signature(function: Callable[..., Any], context: type[BaseContext]) -> tuple[bool, bool]:
    """Return whether a function takes a context, and whether it takes lists."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each for each in inspect.signature(function).parameters.values() if each.kind in kinds]
    if not 1 <= len(needed) <= 2:
        raise ConfigurationError(f"{function_name(function)} has to take a message, and a context if it needs one")
    try:
        hints = get_type_hints(function)
    except Exception:  # noqa: BLE001 - a name that is not known here
        return len(needed) == 2, isinstance(needed[0].annotation, str) and bool(LISTS.match(needed[0].annotation))
    said = hints.get(needed[-1].name)
    if len(needed) == 2 and any(each in (Context, AsyncContext) and each is not context for each in (said, *get_args(said))):
        kind = "async def" if context is AsyncContext else "a plain function"
        raise ConfigurationError(f"{function_name(function)} is {kind}, so its context is {context.__name__}, not {said}")
    return len(needed) == 2, _is_list(function, hints.get(needed[0].name, Any))


def _is_list(function: Callable[..., Any], said: Any) -> bool:
    """Return whether the first parameter is a list of messages; a message is no list, and a tuple is neither."""
    kind = get_origin(said) or said
    if kind in (list, Sequence):
        return True
    if isinstance(kind, type) and issubclass(kind, Iterable) and not issubclass(kind, BaseModel):
        raise ConfigurationError(
            f"{function_name(function)} takes {said}: a handler takes a message, or a list of them: list[Model]"
        )
    return False


def _check_field(model: type[BaseModel], path: list[str], where: str) -> None:
    """Refuse a key that names no field of the JSON text, or a field that cannot be an id."""
    fields = {name: field for key, field in model.model_fields.items() for name in _wire_names(key, field)}
    if path[0] not in fields:
        if model.model_config.get("extra") == "allow":
            return
        raise ConfigurationError(f"{where} is no field of {model.__name__} on the wire: it has {', '.join(sorted(fields))}")
    for option in _options(fields[path[0]].annotation):
        plain = get_origin(option) or option
        if isinstance(plain, type) and issubclass(plain, BaseModel):
            if len(path) > 1:
                _check_field(plain, path[1:], where)
                continue
            raise ConfigurationError(f"{where} is an object: name a field in it, such as '{path[0]}.id'")
        if isinstance(plain, type) and issubclass(plain, NO_KEYS) and not (plain is dict and len(path) > 1):
            raise ConfigurationError(f"{where} may be {plain.__name__}, which is no usable id: text, integers and booleans are")


def _wire_names(name: str, field: Any) -> set[str]:
    names = set()
    for alias in (field.validation_alias, field.alias):
        for each in alias.choices if isinstance(alias, AliasChoices) else (alias,):
            first = each.path[0] if isinstance(each, AliasPath) else each
            if isinstance(first, str):
                names.add(first)
    return names or {name}


def _options(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [option for each in get_args(annotation) for option in _options(each)]
    return [annotation]
