"""What users say about the atomic sink in `.option(…)`: texts alone, since it works in several processes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, Literal, Self

from idemp.errors import ConfigurationError
from idemp.findings import nearest
from idemp.loading import load_app
from idemp.spark.reading.arrow import is_postgresql
from idemp.spark.reading.secret import settings_with
from idemp.spark.task import Job

if TYPE_CHECKING:
    from idemp.bulk import SetHandler
    from idemp.settings import Settings

_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
"""What a query hands to every sink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of the atomic sink; docs/reference/data-source.md says what they mean."""

    app: str
    parked: str
    sets: str | None = None
    dispatch: Literal["relay", "never"] = "relay"
    run: str | None = None
    rows: int = 50_000
    size: int = 64 * 2**20
    url_file: str | None = None
    schema: str | None = None
    prefix: str | None = None

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From what Spark hands over.

        Raises:
            ConfigurationError: an unknown option, a wrong value, or a needed one is missing.

        Example:
            >>> Options.read({"app": "shop:app", "parked": "parked", "rows": "1000"}).rows
            1000
            >>> Options.read({"app": "shop:app"})
            Traceback (most recent call last):
            ...
            idemp.errors.ConfigurationError: The sink needs the option 'parked'. Say .option("parked", …).
        """
        known = [each.name for each in fields(cls)]
        values: dict[str, Any] = {}
        for name, value in given.items():
            if name.lower() in _OF_SPARK:
                continue
            if name.lower() not in known:
                raise ConfigurationError(f"The sink has no option {name!r}. {nearest(name, known)}")
            values[name.lower()] = _number(name, str(value)) if name.lower() in {"rows", "size"} else str(value)
        for name in ("app", "parked"):
            if not values.get(name):
                raise ConfigurationError(f"The sink needs the option {name!r}.", fix=f'Say .option("{name}", …).')
        if values.get("dispatch", "relay") not in {"relay", "never"}:
            raise ConfigurationError(f"dispatch={values['dispatch']!r} is neither 'relay' nor 'never'.")
        return cls(**values)

    def settings(self) -> Settings:
        """The settings of this process, with the database that the options name.

        Raises:
            ConfigurationError: they are wrong, or the database is not PostgreSQL.
        """
        settings = settings_with(self.url_file, self.schema, self.prefix)
        if not is_postgresql(settings.database_url):
            raise ConfigurationError(
                "The atomic sink works on PostgreSQL alone.",
                fix="Use foreachBatch with `idemp.spark.sink`: it is as safe, chunk by chunk.",
            )
        return settings

    def job(self) -> Job:
        """What the driver runs.

        Raises:
            ConfigurationError: there is no such app or set, or as `settings` says.
        """
        place = self.settings()
        told = {
            "database_url": place.database_url,
            "schema_name": place.schema_name,
            "table_prefix": place.table_prefix,
        }
        settings = load_app(self.app).settings.model_copy(update=told)
        return Job(
            app=self.app,
            settings=settings,
            override=True,
            dispatch=self.dispatch,
            sets=_sets(self.sets) if self.sets else {},
            rows=self.rows,
            size=self.size,
        )


def _sets(where: str) -> Mapping[type | str, SetHandler]:
    """The handlers of sets that `MODULE:NAME` names."""
    module, _, name = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None) if module and name else None
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"sets={where!r} can't be imported: there is no {error.name!r}.") from error
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"sets={where!r} can't be imported: {type(error).__name__}: {error}.") from error
    if not isinstance(found, Mapping):
        raise ConfigurationError(
            f"sets={where!r} names no handlers of sets.", fix="Name a dictionary in a module, such as shop:SETS."
        )
    return found


def _number(name: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise ConfigurationError(f"The option {name!r} is no number above nought: {value!r}.")
    return int(value)
