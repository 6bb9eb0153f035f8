"""The app under test: what a harness takes from it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from sqlalchemy.orm import Session, sessionmaker

from idemp.app import App
from idemp.errors import ConfigurationError
from idemp.settings import Settings
from idemp.startup import check_replaceable
from idemp.wrap import Wrapped

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from idemp.handlers import Declared, Registry


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


def declared_by_its_app(handler: Any) -> Declared | None:
    """How the one app of a loaded module that registered a function did so; `None` where none or several did."""
    apps = {
        id(value): value
        for module in list(sys.modules.values())
        for value in list(getattr(module, "__dict__", {}).values())
        if type(value) is App
    }
    found = [each for app in apps.values() for each in app.registry.declared.values() if each.function is handler]
    return found[0] if len(found) == 1 else None


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
