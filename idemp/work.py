"""From a delivery to its work: which handler, which body, which id, what to claim."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from idemp.codecs import Codec
from idemp.deadletter import REPLAYS_HEADER, UNKNOWN_VERSION
from idemp.errors import MessageError, OversizedMessage, TooManyHops, UndecodableMessage, UnorderableMessage
from idemp.identity import made_at
from idemp.inbox.port import Claim
from idemp.messages import UNSTORED_HEADER, counter, parse_canonically, parse_json
from idemp.plurals import counted
from idemp.showing import described
from idemp.telemetry import SILENT, Telemetry

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from idemp.broker.port import Delivery
    from idemp.clock import Clock
    from idemp.codecs import Types
    from idemp.context import BatchContext, Context
    from idemp.identity import EffectiveId, Key
    from idemp.inbox.port import InboxStore
    from idemp.lateness import LateGuard
    from idemp.messages import Message, Output
    from idemp.policy import Policy, Previous
    from idemp.twophase import Coordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A handler and what is known about its message type.

    Attributes:
        message_type: canonical type name.
        handler: called with the decoded message and a context.
        batch_handler: called with several messages and their context, where it takes several; `handler` gives it one.
        most: messages that it gets at most; as many as the policy's `batch` where that is not said.
        codec: decodes the body.
        policy: how messages of this type are handled.
        aliases: other names of the type; they share its scope.
        replies: whether returned messages answer the sender, where there is a `reply_to`.
    """

    message_type: str
    handler: Callable[[Any, Context], Any]
    codec: Codec
    policy: Policy
    aliases: tuple[str, ...] = ()
    replies: bool = False
    batch_handler: Callable[[list[Any], BatchContext], Any] | None = None
    most: int | None = None

    @property
    def most_together(self) -> int:
        """Messages that a batch handler gets at most."""
        return self.most or self.policy.batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """What all deliveries of one consumer share.

    Attributes:
        name: the scope of the inbox key.
        store: keeps claims and outputs.
        find: the registration for a message; raises `UnknownMessageType`.
        types: names and codecs for outputs.
        clock: source of time.
        namespace: keeps output ids of unrelated systems apart.
        exchange: where published outputs go.
        max_body_bytes: larger bodies are parked, larger outputs refused.
        unwrap: first step of an arriving message, such as reading its CloudEvents form.
        wrap: last step of an outgoing one.
        relay_after: how long a stored output waits for its own dispatch before a relay takes it.
        app_version: the application's own version, for the story of dead letters.
        telemetry: what looks on.
        guard: knows ids beyond the retention window, where there is one.
        encode_effect: the stored form of an effect's value, by its name; `None` where nobody would run effects.
        coordinator: commits handlings in several databases, where there are others than the inbox's.
    """

    name: str
    store: InboxStore
    find: Callable[[Message], Registration]
    types: Types
    clock: Clock
    namespace: str = "idemp"
    exchange: str = "idemp"
    max_body_bytes: int = 8 * 1024 * 1024
    unwrap: Callable[[Message], Message] | None = None
    wrap: Callable[[Message], Message] | None = None
    relay_after: timedelta = timedelta(seconds=30)
    app_version: str = UNKNOWN_VERSION
    telemetry: Telemetry = SILENT
    guard: LateGuard | None = None
    encode_effect: Callable[[str, Any], bytes] | None = None
    coordinator: Coordinator | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One delivery, decoded: everything that a run of the handler needs, whichever run it is.

    Attributes:
        consumer: whose delivery it is.
        registration: the handler and its policy.
        message: as it arrived.
        body: decodes the body anew at each call, so that no run sees what another did to its message.
        attempt: 1 for the first run of the handler on this message.
        effective: the id that the inbox counts by; `None` where a type that is not opted in has none.
        alive: whether the connection that brought the delivery is still there, as far as one can see.
        claims: what to claim: the present id first, then former ones that still count.
        deaths: how many processes ended while its handler ran.
        order: what it has in common with those whose order it keeps; `None` if it keeps none.
        made_at: when the message was made; `None` if unknown, or if its type is not opted in.
    """

    consumer: str
    registration: Registration
    message: Message
    body: Callable[[], Any]
    attempt: int
    effective: EffectiveId | None
    alive: Callable[[], bool]
    claims: tuple[Claim, ...] = ()
    deaths: int = 0
    order: bytes | None = None
    made_at: datetime | None = None

    @property
    def policy(self) -> Policy:
        """The type's policy."""
        return self.registration.policy

    @property
    def log_fields(self) -> dict[str, Any]:
        """Which message it is about, as log events say it."""
        text = self.effective.text if self.effective is not None else self.message.message_id
        return {"consumer": self.consumer, "message_id": text, "message_type": self.registration.message_type}

    @property
    def key(self) -> UUID:
        """What a handler's starts are counted by: the effective id, else a digest of what arrived.

        Somebody who replays a dead letter has looked at it: each replay is counted by itself.
        """
        replays = counter(self.message.headers, REPLAYS_HEADER)
        if self.effective is not None and not replays:
            return self.effective.key
        return key_of(self.message, self.registration.message_type)


@dataclass(frozen=True, slots=True)
class Opened:
    """A delivery up to its place in the order, which is known before its key is.

    Attributes:
        message: as it arrived, out of its envelope.
        registration: the handler and its policy.
        payload: the body as JSON.
        canonical: the same in canonical form.
        body: decoded.
        order: what it has in common with those whose order it keeps; `None` if it keeps none.
    """

    message: Message
    registration: Registration
    payload: Any
    canonical: bytes
    body: Any
    order: bytes | None


def key_of(message: Message, message_type: str | None = None) -> UUID:
    """What starts are counted by of a message whose effective id is not known, or that was replayed."""
    replays = counter(message.headers, REPLAYS_HEADER)
    told = f"{message_type or message.type}\n{message.message_id}\n{replays}\n".encode()
    return UUID(bytes=hashlib.sha256(told + message.body).digest()[:16])


def announce(store: InboxStore, outputs: Sequence[Output]) -> None:
    """After a COMMIT that left outputs to others: wake relays where there are messages, who runs effects where there are."""
    effects = sum(output.is_effect for output in outputs)
    if effects:
        store.announce_effects()
    if len(outputs) > effects:
        store.announce_pending()


def decode(consumer: Consumer, delivery: Delivery) -> Work:
    """Everything up to the claim: size, envelope, type, body, order, key, fingerprint.

    Raises:
        MessageError: the message can't be handled, ever.
    """
    return work_of(consumer, delivery, opened(consumer, delivery))


def opened(consumer: Consumer, delivery: Delivery) -> Opened:
    """The first half of `decode`: size, envelope, type, body, order.

    Raises:
        MessageError: the message can't be handled, ever.
    """
    message = delivery.message
    if len(message.body) > consumer.max_body_bytes:
        raise OversizedMessage(
            f"The body has {len(message.body)} bytes; {consumer.max_body_bytes} is the limit.",
            fix="Raise max_body_bytes, or have the producer send a reference.",
        )
    if consumer.unwrap is not None:
        message = consumer.unwrap(message)
    registration = consumer.find(message)
    _check_hops(message, registration.policy)
    payload, canonical = parse_canonically(message)
    if registration.policy.ordered_by is None:
        body, order = registration.codec.decode(payload, canonical), None
    else:
        body, order = _in_order(registration, registration.policy.ordered_by, message, payload, canonical)
    return Opened(message, registration, payload, canonical, body, order)


def work_of(consumer: Consumer, delivery: Delivery, opened: Opened) -> Work:
    """The second half: key and fingerprint.

    Raises:
        MessageError: the message can't be handled, ever.
    """
    message, registration, body = opened.message, opened.registration, opened.body
    policy = registration.policy
    claims: tuple[Claim, ...] = ()
    effective: EffectiveId | None
    made: datetime | None = None
    if policy.idempotent:
        # Outputs of types that are not opted in may be worded differently each time: no conflict, whatever they say.
        fingerprint = (
            None if message.headers.get(UNSTORED_HEADER) else policy.fingerprint.of(opened.payload, opened.canonical)
        )
        claims = _claims(consumer, opened, fingerprint)
        effective = claims[0].id
        made = made_at(message, body, policy.dated_by)
    else:
        effective = _optional_id(registration, message, body)
    return Work(
        consumer=consumer.name,
        registration=registration,
        message=message,
        body=_once_given(body, lambda: registration.codec.decode(parse_json(message))),
        attempt=delivery.attempt,
        effective=effective,
        alive=delivery.alive,
        claims=claims,
        order=opened.order,
        made_at=made,
    )


def _in_order(
    registration: Registration, by: Key, message: Message, payload: Any, canonical: bytes
) -> tuple[Any, bytes]:
    """The body and its place. Without one the message can't be held back, and tried again it would come too late."""
    try:
        body = registration.codec.decode(payload, canonical)
        return body, by.order(message, body, registration.message_type)
    except (MessageError, MemoryError):
        raise
    except Exception as error:
        raise UnorderableMessage(
            f"What comes before and after the message of type {registration.message_type!r} ({by.name}) can't be said: "
            f"{described(error)}",
            fix="Mend what raised it, and replay the message; ordered_by and decoding may not depend on what can be away.",
        ) from error


def _check_hops(message: Message, policy: Policy) -> None:
    if policy.max_hops is not None and message.hops > policy.max_hops:
        raise TooManyHops(
            f"A chain of {counted(message.hops, 'message')}, each caused by the one before, led to this one; "
            f"its type allows {policy.max_hops}.",
            fix="Look for handlers that send to each other in a circle; raise max_hops if the chain is meant to be so long.",
        )


def former_codec(former: Previous) -> Codec | None:
    """Return the codec of a former message class; `None` where the present one still reads the key as it was read.

    Raises:
        ConfigurationError: it is no message class.
    """
    return None if former.message is None else _codec(former.message)  # type: ignore[arg-type]


@cache
def _codec(cls: type[Any]) -> Codec:
    return Codec(cls)


def _claims(consumer: Consumer, opened: Opened, fingerprint: bytes | None) -> tuple[Claim, ...]:
    message, registration, policy = opened.message, opened.registration, opened.registration.policy
    body = opened.body
    formers = (former.type for former in policy.previous if former.type is not None)
    current = Claim(
        consumer=consumer.name,
        id=policy.key.effective(message, body, registration.message_type),
        message_type=registration.message_type,
        fingerprint=fingerprint,
        wait=policy.claim_wait,
        aliases=(registration.message_type, *registration.aliases, *formers),
        entity=policy.entity.entity(message, body, registration.message_type) if policy.entity else None,
    )
    claims = {(current.consumer, current.id.key, current.entity): current}
    for former in policy.previous:
        if not former.opted_in:
            continue
        key, codec, read = former.key or policy.key, former_codec(former), body
        if codec is not None and key.scope == "body":
            try:
                read = codec.decode(opened.payload, opened.canonical)
            except UndecodableMessage:
                continue  # the former version parked it
        former_type = former.type or registration.message_type
        former_id = key.effective(message, read, former_type)
        claim = replace(current, consumer=former.consumer or current.consumer, id=former_id)
        if former.entity is not None and consumer.store.per_entity:
            entity = former.entity.entity(message, read, registration.message_type)
            claim = replace(claim, entity=entity, elsewhere=entity != current.entity)
        place = (claim.consumer, claim.id.key, claim.entity)
        if place not in claims:  # claimed twice, the second time it would be its own duplicate
            claims[place] = claim
        elif former.type is None or former.type != message.type:
            continue
        if former.type is not None and not consumer.store.per_entity:
            # A worker of the former release knows no other name of the type: the claim would be a conflict to it.
            claims[place] = replace(claims[place], message_type=former_type)
    return tuple(claims.values())


def _optional_id(registration: Registration, message: Message, body: Any) -> EffectiveId | None:
    try:
        return registration.policy.key.effective(message, body, registration.message_type)
    except MessageError:
        return None


def _once_given(first: Any, again: Callable[[], Any]) -> Callable[[], Any]:
    """Answers `first` at the first call, and decodes anew at each later one: a run may have changed its message."""
    given: list[Any] = [first]
    return lambda: given.pop() if given else again()
