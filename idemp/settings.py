"""Settings: what differs between the places where an app runs. Read from environment variables `IDEMP_…`."""

from __future__ import annotations

import difflib
import os
import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from idemp.errors import ConfigurationError
from idemp.policy import seconds

__all__ = ["Settings"]

# Kubernetes sets these for a service of the name idemp; tests have names of their own.
FOREIGN: Final = re.compile(r"IDEMP_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?|TEST_\w+)", re.ASCII)

Seconds = Annotated[float, BeforeValidator(lambda value: seconds(value, "duration"))]


def _whole(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("has to be a whole number")  # noqa: TRY004 - pydantic reports ValueErrors
    return value


Whole = Annotated[int, BeforeValidator(_whole)]


class Settings(BaseSettings):
    """Settings of a process. Arguments come before environment variables, which come before defaults.

    Attributes:
        database_url: SQLAlchemy's URL of the database. On SQLite, queues have a file of their own.
        broker_url: `sql://` keeps queues in the database.
        table_prefix: Begins the name of each table.
        group: Deliveries that are received, sent and acknowledged together.
        lease: Time for which a leased message is a worker's; a worker that died gives up its messages after it.
        publish_timeout: Time to wait for the broker's confirms; shorter than the 15 s for which other workers leave outputs alone.
        grace: Time that running handlers are given at the end of a worker.

    Raises:
        ConfigurationError: A setting is unknown or of no use.

    Example:
        >>> Settings(lease="10s").lease, Settings().broker_url
        (10.0, 'sql://')
    """

    model_config = SettingsConfigDict(env_prefix="IDEMP_", extra="forbid", frozen=True, hide_input_in_errors=True)

    database_url: str = "sqlite:///idemp.db"
    broker_url: str = "sql://"
    table_prefix: str = Field("idemp_", pattern=r"^[a-z][a-z0-9_]{0,20}$")
    group: Whole = Field(20, ge=1, le=1000)
    lease: Seconds = Field(30.0, ge=1, le=3600)
    publish_timeout: Seconds = Field(10.0, gt=0, lt=15)
    grace: Seconds = Field(30.0, ge=0)

    def __init__(self, **values: Any) -> None:
        known = {f"IDEMP_{name.upper()}" for name in type(self).model_fields}
        for name in os.environ:
            if name.startswith("IDEMP_") and name not in known and not FOREIGN.fullmatch(name):
                nearest = difflib.get_close_matches(name, known, 1)
                meant = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(sorted(known))}"
                raise ConfigurationError(f"{name} is no setting: {meant}")
        try:
            super().__init__(**values)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, each['loc']))} ({each['msg']})" for each in error.errors(include_input=False))
            raise ConfigurationError(f"settings, or IDEMP_… variables, of no use: {'; '.join(problems)}") from None
