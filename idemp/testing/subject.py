"""The app under test: what a harness takes from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session, sessionmaker

from idemp.app import App
from idemp.errors import ConfigurationError
from idemp.handlers import declarations_of, declare
from idemp.settings import Settings
from idemp.startup import check_replaceable
from idemp.wrap import Wrapped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Engine

    from idemp.effects.declared import Effect
    from idemp.handlers import Declared, Registry
    from idemp.policy import Policy


def told(app: App | Wrapped) -> tuple[str, str, Registry]:
    """Its name, its queue and its handlers."""
    if isinstance(app, App):
        app.registry.build(app.settings.messages)
        return app.name, app.queue, app.registry
    if isinstance(app, Wrapped):
        return app.consumer, app.queue, app.registry
    raise ConfigurationError(
        f"{app!r} is neither an App nor what Inbox.wrap answered.",
        fix="Give the App; for a bare function use assert_idempotent(function, message).",
    )


def declaration_of(
    handler: Callable[..., Any], message: type | None = None, name: str | None = None, policy: Policy | None = None
) -> tuple[Declared, str, Settings | None]:
    """How a handler is declared: what the arguments give, else what its app or its wrapped consumer declared.

    Returns:
        The declaration, the words for who made it, and the settings of the app that made it.

    Raises:
        ConfigurationError: nothing declares a policy for it, or several declarations differ.
    """
    found = [each for each in declarations_of(handler) if _fits(each[1], message, name)]
    if policy is not None:
        if len({(each.message_type, each.cls, each.takes_batches) for _, each in found}) == 1:
            return replace(found[0][1], policy=policy), "as the test declares it", None
        return declare(handler, message, type=name, policy=policy), "as the test declares it", None
    distinct = list({(id(declarer), each.message_type): (declarer, each) for declarer, each in found}.values())
    if len(distinct) != 1:
        why, fix = _why_undeclared(handler, distinct)
        raise ConfigurationError(why, fix=fix)
    ((declarer, declared),) = distinct
    if isinstance(declarer, App):
        return declared, f"as app {declarer.name!r} declares it", declarer.settings
    return declared, f"as Inbox.wrap(consumer={declarer.consumer!r}) declares it", None


def effects_of(handler: Callable[..., Any]) -> dict[str, Effect]:
    """What the apps that declare a handler do for it after COMMIT, by name."""
    apps = [declarer for declarer, _ in declarations_of(handler) if isinstance(declarer, App)]
    return {name: effect for app in apps for name, effect in app.registry.effects.items()}


def _fits(declared: Declared, message: type | None, name: str | None) -> bool:
    return (message is None or declared.cls is message) and (
        name is None or name == declared.message_type or name in declared.aliases
    )


def policy_in_words(policy: Policy) -> str:
    """A policy as code declares it: the key, and what differs from the defaults.

    Example:
        >>> from idemp import Idempotent
        >>> policy_in_words(Idempotent(key=["tenant", "id"], claim="late"))
        "Idempotent(key='field:tenant,id', claim='late')"
    """
    if not policy.idempotent:
        return "Policy(idempotent=False): not opted in"
    options = {"key": policy.key.name} | {
        name: getattr(policy, name)
        for name in type(policy).model_fields
        if name in policy.model_fields_set - {"idempotent", "key"}
    }
    return f"Idempotent({', '.join(f'{name}={value!r}' for name, value in options.items())})"


def settings_of(app: App | Wrapped) -> Settings:
    """Its settings; those of `Inbox.wrap` are the default ones."""
    return app.settings if isinstance(app, App) else Settings()


def rebound(app: App | Wrapped, engine: Engine) -> sessionmaker[Any]:
    """The user's own kind of session, on another engine.

    Raises:
        ConfigurationError: its handlers write no database.
    """
    check_replaceable(
        app.given_store, "Use redelivery_machine, or a Harness, with store=, which makes one of that kind."
    )
    given = app.session_factory
    if given is None:
        return sessionmaker(bind=engine, class_=Session)
    options = {name: value for name, value in given.kw.items() if name not in {"bind", "binds"}}
    return sessionmaker(bind=engine, class_=given.class_, **options)


def _why_undeclared(handler: Callable[..., Any], found: Sequence[tuple[Any, Declared]]) -> tuple[str, str]:
    name = getattr(handler, "__qualname__", repr(handler))
    if not found:
        fix = (
            "Give the function that @app.handler(…) registered, or declare the policy in the test: "
            "assert_idempotent(…, type='orders.Place', policy=Idempotent(key='id'))."
        )
        return f"No app declares a policy for {name}, so a test could only guess its key.", fix
    types = ", ".join(sorted({repr(declared.message_type) for _, declared in found}))
    return (
        f"{name} is declared {len(found)} times (types {types}), perhaps with different policies.",
        "Say which one the test is about: assert_idempotent(…, type=…), or policy=….",
    )
