"""Checks at start: what can be known before the first message is said before the first message."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

from idemp.errors import ConfigurationError, GuaranteeError, IdentityChanged
from idemp.inbox.identities import OFF, described
from idemp.inbox.port import DEFAULT_BROKER, Identity
from idemp.ordering import ORDERED_PREFETCH
from idemp.showing import logger
from idemp.work import former_codec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from idemp.app import App
    from idemp.broker.port import Broker, Guarantees
    from idemp.handlers import Registry
    from idemp.inbox.port import InboxStore
    from idemp.lateness import LateGuard
    from idemp.twophase import Coordinator
    from idemp.work import Registration

log = logger("idemp.worker")


def check_handlers(app: App) -> None:
    """Refuse to consume for an app without handlers, to which every message of its queue would be unknown.

    One with effects or prepared messages runs those, and its queue is left alone.

    Raises:
        ConfigurationError: it has nothing to run.
    """
    if app.registry.declared:
        return
    if not app.registry.effects and app.prepared is None:
        raise ConfigurationError(
            f"App {app.name!r} has no handlers; its queue {app.queue!r} was not touched.",
            fix="Import the modules that hold them where the app is made, or name the module that does: "
            "`idemp worker MODULE:APP`.",
        )
    log.warning(
        "%s has no handlers: its queue %s is not consumed",
        app.name,
        app.queue,
        extra={"event": "queue_not_consumed", "consumer": app.name, "queue": app.queue},
    )


def check_guarantees(guarantees: Guarantees, *, allow_at_most_once: bool) -> None:
    """Refuse a transport that loses messages when a worker dies.

    Raises:
        GuaranteeError: it does, and nobody said that this is fine.
    """
    if not guarantees.at_least_once and not allow_at_most_once:
        raise GuaranteeError(
            f"The transport {guarantees.name!r} may lose messages: {guarantees.remarks or 'it says so itself'}.",
            fix="Use RabbitMQ (pyamqp://) or local://, or accept the loss: IDEMP_ALLOW_AT_MOST_ONCE=true, or in idemp.toml.",
        )


def check_order(guarantees: Guarantees, registrations: Sequence[Registration]) -> None:
    """Refuse to promise an order where several consumers may have messages of a queue in hand.

    Raises:
        GuaranteeError: a type keeps one, and the transport hands them to whoever asks.
    """
    ordered = [item.message_type for item in registrations if item.policy.ordered_by is not None]
    if ordered and not guarantees.single_active:
        raise GuaranteeError(
            f"{', '.join(map(repr, ordered))} keep an order (ordered_by), which the transport {guarantees.name!r} can't: "
            "it hands messages of a queue to several consumers at once.",
            fix="Use RabbitMQ (pyamqp://), or leave out ordered_by and let handlers refuse what comes too early.",
        )


def check_entities(store: InboxStore, registrations: Sequence[Registration]) -> None:
    """Refuse types whose messages can't be handled by a store that keeps one document or one stream for each entity.

    Raises:
        ConfigurationError: one does not say what its messages are about, or wants several of them in one transaction.
    """
    if not store.per_entity:
        return
    for name, policy in ((item.message_type, item.policy) for item in registrations if item.policy.idempotent):
        if policy.entity is None:
            raise ConfigurationError(
                f"{name!r} does not say which entity its messages are about, and this store keeps a claim with its entity.",
                fix='Say it in the policy, as in Idempotent(entity="order_id").',
            )
        if policy.batch > 1:
            raise ConfigurationError(
                f"{name!r} has batch={policy.batch}, and no transaction of this store covers several messages.",
                fix="Leave out batch (a batch handler: say batch=1).",
            )


def check_not_per_entity(store: InboxStore, what: str, instead: str) -> None:
    """Refuse what a store can't do that keeps one document or one stream for each entity.

    Args:
        store: the app's.
        what: the beginning of a sentence.
        instead: what to do.

    Raises:
        ConfigurationError: this one does.
    """
    if store.per_entity:
        raise ConfigurationError(
            f"{what} can't be had on a {type(store).__name__}, which keeps a claim with its entity; nothing was done.",
            fix=instead,
        )


def check_effects(store: InboxStore, effects: Collection[str]) -> None:
    """Refuse effects where nobody can lease them.

    Raises:
        ConfigurationError: there are some, and the store keeps a claim with its entity.
    """
    if effects:
        check_not_per_entity(store, "Effects", "Send a message to a consumer on a SQL store, which does it.")


def check_databases(coordinator: Coordinator | None, registrations: Sequence[Registration]) -> None:
    """Refuse types whose handlers write to databases that nobody has named.

    Raises:
        ConfigurationError: a policy names one.
    """
    known = coordinator.names if coordinator is not None else ()
    for item in registrations:
        for name in item.policy.databases:
            if name not in known:
                raise ConfigurationError(
                    f"The policy of {item.message_type!r} names the database {name!r}, which is not registered.",
                    fix=f'Say App(…, databases={{"{name}": "postgresql://…"}}), or databases.{name} in idemp.toml.',
                )


def check_replaceable(store: InboxStore | None, fix: str) -> None:
    """Refuse to put a database in the place of a store that keeps claims with entities.

    Args:
        store: the one that the code names, if it does.
        fix: what to do.

    Raises:
        ConfigurationError: nobody would know there what was handled, and handlers would not find what they write.
    """
    if store is not None and store.per_entity:
        raise ConfigurationError(
            f"No database can take the place of this {type(store).__name__}: claims are with its entities.", fix=fix
        )


def check_guard(guard: LateGuard | None, registrations: Sequence[Registration]) -> None:
    """Refuse types that ask a guard where there is none. Its file may still be missing: then late messages are parked.

    Raises:
        ConfigurationError: nobody said where it is.
    """
    asking = [item.message_type for item in registrations if item.policy.late == "guard"]
    if asking and guard is None:
        raise ConfigurationError(
            f"{', '.join(map(repr, asking))} ask a guard of late messages (late='guard'), and no file is named.",
            fix="Set IDEMP_GUARD, or guard in idemp.toml, to what `idemp pipeline archive --guard FILE` writes.",
        )


def check_partitions(apps: Sequence[App]) -> None:
    """Refuse several queues of one consumer that keep an order and all get what is published.

    Raises:
        ConfigurationError: there are; each message would come by all of them, and be overtaken in one by those of another.
    """
    queues: dict[str, set[str]] = {}
    for app in apps:
        app.registry.build(app.settings.messages)
        if app.keeps_order and app.topology().bindings:
            queues.setdefault(app.name, set()).add(app.queue)
    for name, subscribed in queues.items():
        if len(subscribed) > 1:
            raise ConfigurationError(
                f"{name!r} keeps an order (ordered_by), and what is published comes to several of its queues: "
                f"{', '.join(map(repr, sorted(subscribed)))}. Nothing was declared or consumed.",
                fix="Say App(…, subscribe=False) for all of them, and send each message to one queue by its name.",
            )


def tell_fixed_prefetch(consumer: str, prefetch: int) -> None:
    """Log that the setting is not heeded where a type keeps an order."""
    log.warning(
        "%s: prefetch=%d is not heeded: it keeps an order (ordered_by), and always has up to %d messages in hand",
        consumer,
        prefetch,
        ORDERED_PREFETCH,
        extra={"event": "prefetch_fixed", "consumer": consumer, "prefetch": ORDERED_PREFETCH},
    )


def check_horizon(guarantees: Guarantees, horizon: timedelta | None, retentions: Mapping[str, timedelta]) -> None:
    """Refuse a retention window shorter than the time in which the broker may still redeliver.

    Raises:
        ConfigurationError: one is.
    """
    horizon = horizon or timedelta(seconds=guarantees.horizon_seconds)
    for message_type, retention in retentions.items():
        if retention < horizon:
            raise ConfigurationError(
                f"The retention window of {message_type!r} ({retention}) is shorter than the redelivery horizon of "
                f"{guarantees.name!r} ({horizon}): a late redelivery would be handled twice.",
                fix="Raise retention, or set redelivery_horizon if yours is shorter.",
            )


def check_broker_name(store: InboxStore, name: str | None) -> None:
    """Refuse a broker name that a store of the app's own does not use for its outputs.

    Raises:
        ConfigurationError: the store's outputs go to a broker of another name.
    """
    own = getattr(store, "broker_name", DEFAULT_BROKER)
    if name is not None and name != own:
        raise ConfigurationError(
            f"The broker is named {name!r}, and outputs of the {type(store).__name__} go to the broker {own!r}.",
            fix=f"Give the store the name: SqlStore(…, broker={name!r}).",
        )


def agree_broker(store: InboxStore, broker: Broker) -> None:
    """Refuse a broker that outputs in the database do not belong to; see `Broker.identity`.

    Raises:
        BrokerChanged: outputs of this name belong to another broker.
        BrokerUnavailable: the broker can't be reached.
    """
    identity = broker.identity()
    if identity is not None:
        store.upkeep.agree_broker(identity)


def agree_identities(store: InboxStore, consumer: str, queue: str, registry: Registry) -> None:
    """Refuse a deploy that silently changes what makes two messages the same while old claims still count.

    Raises:
        IdentityChanged: it does, and no `previous=` covers it.
    """
    compare_identities(partial(store.upkeep.agree_identities, consumer, queue), registry)


def unhandled_types(store: InboxStore, consumer: str, registry: Registry) -> Sequence[str]:
    """The types of which claims still count, and which no handler takes any more, by its name, an alias or `previous=`.

    Such a type may be gone, or renamed: then what was handled under its former name is handled again under the new one,
    and nothing but its name would tell. Stores outside of SQL don't say.

    Example:
        >>> from idemp.handlers import Registry
        >>> from idemp.inbox.memory import InMemoryStore
        >>> unhandled_types(InMemoryStore(), "orders", Registry())
        []
    """
    look = getattr(store.upkeep, "unhandled_types", None)
    return look(consumer, *identities_of(registry.registrations())) if look is not None else []


def tell_unhandled_types(consumer: str, types: Sequence[str]) -> None:
    """Log the types that `unhandled_types` found, if there are any."""
    if types:
        log.warning(
            "%s: claims of %s still count, and no handler takes such messages any more. If a type was renamed, its messages "
            "are handled again: name the former type by previous= (docs/how-to/change-an-identity.md)",
            consumer,
            ", ".join(types),
            extra={"event": "types_unhandled", "consumer": consumer, "message_types": list(types)},
        )


def compare_identities(compare: Callable[..., None], registry: Registry) -> None:
    """Compare the identities of a registry's types, those of earlier releases included where that is needed.

    Earlier releases derived one id from a header for all message types. While such claims count, they are made as well.

    Raises:
        IdentityChanged: one changed, and no `previous=` covers it.
    """
    try:
        compare(*identities_of(registry.registrations()))
    except IdentityChanged:
        if not registry.claim_former_headers():
            raise
        compare(*identities_of(registry.registrations()))


def identities_of(
    registrations: Sequence[Registration],
) -> tuple[list[Identity], dict[str, list[Identity]], dict[str, timedelta]]:
    """What makes two messages the same, now and by `previous=`, and for how long; as `Upkeep.agree_identities` wants it."""
    current = []
    covered: dict[str, list[Identity]] = {}
    for item in registrations:
        policy = item.policy
        identity = Identity(
            item.message_type,
            policy.key.descriptor if policy.idempotent else OFF,
            aliases=item.aliases,
            scoped_by_type=policy.key.scope != "envelope",
            entity=policy.entity.name if policy.entity is not None else None,
        )
        current.append(
            identity
        )  # earlier releases compare this text; a later row with more in it is a successor to them
        if policy.idempotent and (encoding := item.codec.encoding(policy.key.fields)):
            current.append(replace(identity, descriptor=described(identity.descriptor, encoding)))
        covered[item.message_type] = [
            Identity(
                former.type or item.message_type,
                described(
                    (former.key or policy.key).descriptor,
                    (former_codec(former) or item.codec).encoding((former.key or policy.key).fields),
                )
                if former.opted_in
                else OFF,
                consumer=former.consumer,
                scoped_by_type=(former.key or policy.key).scope != "envelope",
                entity=about.name
                if (about := former.entity or policy.entity) is not None and former.opted_in
                else None,
            )
            for former in policy.previous
        ]
    retentions = {item.message_type: item.policy.retention for item in registrations}
    return current, covered, retentions
