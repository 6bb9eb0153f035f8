"""What users say about a source in `.option(…)`. Secrets are never options: plans show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from idemp.errors import ConfigurationError
from idemp.findings import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

STARTING: Final = "startingOffsets"
PER_BATCH: Final = "maxOffsetsPerTrigger"
PER_TASK: Final = "maxRecordsPerPartition"
COMMON: Final = (STARTING, PER_BATCH, PER_TASK)


class Options:
    """The options of one source; names count without regard to case, as everywhere in Spark.

    Args:
        source: the source's format, for errors.
        given: what the user said.
        known: the source's own options, beside `COMMON`.

    Raises:
        ConfigurationError: an unknown option; the nearest known one is named.

    Example:
        >>> Options("idemp-spool", {"queue": "orders", "maxoffsetspertrigger": "100"}, ["queue"]).number(PER_BATCH)
        100
        >>> Options("idemp-spool", {"queues": "orders"}, ["queue"])
        Traceback (most recent call last):
        ...
        idemp.errors.ConfigurationError: idemp-spool: unknown option 'queues'. Did you mean 'queue'?
    """

    def __init__(self, source: str, given: Mapping[str, object], known: tuple[str, ...] | list[str]) -> None:
        self._source = source
        names = {name.lower(): name for name in (*known, *COMMON)}
        unknown = next((name for name in given if name.lower() not in names), None)
        if unknown is not None:
            raise ConfigurationError(
                f"{source}: unknown option {unknown!r}. {nearest(unknown, names.values())}",
                fix="" if "url" not in unknown.lower() else "Addresses and passwords go to `sources.register`.",
            )
        self._given = {names[name.lower()]: str(value) for name, value in given.items()}

    def text(self, name: str, default: str | None = None) -> str:
        """An option as text.

        Raises:
            ConfigurationError: it is missing, and has no default.
        """
        value = self._given.get(name, default)
        if not value:
            raise ConfigurationError(f"{self._source} needs the option {name!r}.", fix=f'Say .option("{name}", …).')
        return value

    def texts(self, name: str) -> list[str]:
        """An option that lists several, with commas between.

        Raises:
            ConfigurationError: it is missing, or one stands there twice.

        Example:
            >>> Options("idemp-stream", {"queues": "orders, returns"}, ["queues"]).texts("queues")
            ['orders', 'returns']
        """
        found = [each for part in self.text(name).split(",") if (each := part.strip())]
        if not found or len(set(found)) < len(found):
            raise ConfigurationError(f"{self._source}: {name}={self.text(name)!r} names none, or one twice.")
        return found

    def number(self, name: str) -> int | None:
        """An option that is a whole number above 0, `None` where nothing is said.

        Raises:
            ConfigurationError: it is none.
        """
        value = self._given.get(name)
        if value is None:
            return None
        if not value.isdecimal() or int(value) < 1:
            raise ConfigurationError(f"{self._source}: {name}={value!r} is no whole number above 0.")
        return int(value)
