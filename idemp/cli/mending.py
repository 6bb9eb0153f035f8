"""The commands that a report names: for these very servers, without their passwords."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from idemp.diagnosis import BrokerCommands, Command, shell
from idemp.inbox.port import DEFAULT_BROKER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from idemp.app import App


@dataclass(frozen=True, slots=True)
class Mending:
    """What has to stand on a command line so that it finds the servers that the report is about.

    What the settings say is found by every command. What stood on the report's own command line is repeated, with `***`
    for a password, which whoever copies it fills in. A database that an app's code names is known to that app alone.

    Attributes:
        where: `MODULE:APP`, if there is one.
        app: what that is.
        options: the report's own: database, broker, schema, prefix.

    Example:
        >>> given = {"database": "postgresql://me:secret@db/shop?sslpassword=too", "schema": "idemp"}
        >>> Mending(None, None, given).upgrade().text
        "idemp db upgrade --database 'postgresql://me:***@db/shop?sslpassword=***' --schema idemp"
        >>> Mending("shop.orders:app", None, {"broker": "pyamqp://me:secret@mq/shop"}).declare().text
        "idemp broker declare shop.orders:app --broker 'pyamqp://me:***@mq/shop'"
        >>> Mending(None, None, {}).upgrade().text
        'idemp db upgrade'
    """

    where: str | None
    app: App | None
    options: Mapping[str, str | None]

    def upgrade(self) -> Command:
        """Makes or upgrades the tables."""
        return shell("idemp", "db", "upgrade", *self.of_database())

    def relay(self, name: str) -> Command:
        """Ships what waits for the broker of this name: the app's own, or another, whose URL whoever runs it fills in."""
        own = self.app.broker_name if self.app is not None else self.options.get("broker_name")
        if name == (own or DEFAULT_BROKER):
            where = (self.where,) if self.where is not None else ()
            return shell("idemp", "relay", *where, *self.of_app(), *self.of_broker())
        return shell("idemp", "relay", *self.of_database(), "--broker", "URL", "--broker-name", name)

    def adopt(self) -> Command:
        """Has the app's broker take the place of the one that is noted under its name."""
        return shell("idemp", "broker", "adopt", self.where or "MODULE:APP", *self.of_app(), *self.of_broker())

    def redispatch(self) -> str:
        """The beginning of the command that sends a message's outputs again, up to its id."""
        where = ("--app", self.where) if self.where is not None else ()
        return shell("idemp", "inbox", "redispatch", *where, *self.of_app(), *self.of_broker()).text

    def release(self) -> Command:
        """Gives all that is in quarantine back."""
        return shell("idemp", "inbox", "release", "--all", *self.of_database())

    def declare(self) -> Command:
        """Makes the app's queues."""
        return shell("idemp", "broker", "declare", self.where or "MODULE:APP", *self.of_broker())

    def recover(self) -> Command:
        """Ends what is in doubt in the app's other databases; the app itself knows its inbox."""
        return shell("idemp", "recover", self.where or "MODULE:APP", *self.of_app())

    def queues(self) -> BrokerCommands | None:
        """What mends the app's queues."""
        return BrokerCommands(self.where, self.of_broker()) if self.where is not None else None

    def of_app(self) -> tuple[str, ...]:
        """Options that name the database where `MODULE:APP` stands on the command line, too: the app knows its own."""
        return replace(self, app=None if self.where is not None else self.app).of_database()

    def of_database(self) -> tuple[str, ...]:
        """Options that name the database and its tables."""
        given = self.options.get("database")
        words: tuple[str, ...] = ()
        if given is not None:
            words = ("--database", _masked_database(given))
        elif self.app is not None and self.app.names_database:
            words = ("--database", _engine_url(self.app))
        for name in ("schema", "prefix"):
            if (value := self.options.get(name)) is not None:
                words = (*words, f"--{name}", value)
        return words

    def of_broker(self) -> tuple[str, ...]:
        """Options that name the broker."""
        given = self.options.get("broker")
        return () if given is None else ("--broker", ";".join(_masked_broker(single) for single in given.split(";")))


def _engine_url(app: App) -> str:
    store = getattr(app.store, "beside", app.store)  # streams in a database have their inbox there, too
    engine = getattr(store, "engine", None)
    return _masked_database(engine.url.render_as_string(hide_password=False)) if engine is not None else "URL"


def _masked_database(text: str) -> str:
    from sqlalchemy import make_url

    url = make_url(text)
    secrets = {name: "***" for name in url.query if "pass" in name.lower() or "secret" in name.lower()}
    return url.update_query_dict(secrets).render_as_string(hide_password=True).replace("%2A%2A%2A", "***")


def _masked_broker(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    secret, at, place = rest.rpartition("@")
    user, colon, _ = secret.partition(":")
    return f"{scheme}{separator}{user}{colon}{'***' if colon else ''}{at}{place}"
