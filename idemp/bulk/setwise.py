"""A chunk without an object per row: on PostgreSQL, for types whose new rows are handled by SQL, or by nobody.

```
table ── by type ── decode, sort by key ──┬── first of each id ── stage, claim, effects, outputs, COMMIT ── counted
                                          └── its repeats: the next round         │ fails
                                                                                  └── by halves, down to a few rows
```

Whatever is not plain (conflicts, late rows, the few rows among which one fails) is left to the steps that deliveries take,
row by row: they know what each failure means, and say it in their own words.
"""

from __future__ import annotations

import logging
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.compute as pc

from idemp.bulk.arrow import as_columns
from idemp.bulk.batch import CLAIM_WAIT
from idemp.bulk.keys import as_mask, in_order
from idemp.bulk.report import Came
from idemp.bulk.staging import Staged, staged
from idemp.columns import PROPERTIES
from idemp.errors import MessageError, StoreUnavailable, TransactionEnded
from idemp.messages import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    from idemp.bulk.sets import SqlSet
    from idemp.steps import Steps
    from idemp.work import Registration

log = logging.getLogger("idemp.bulk")

FEW: Final = 64
"""Rows that are handled as deliveries are: it takes no longer, and finds the one that fails."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROPERTIES: Final = f'"({"|".join(PROPERTIES)})"'
"""Headers that stand for properties, by which outputs differ: of such messages each is looked at."""


class _NotHere(Exception):
    """What the set emits asks for an object per row."""


class Setwise:
    """One chunk, as far as it can be handled set by set.

    Args:
        steps: of this thread.
        sets: what handles all new rows of a type at once, by type; `None` for every type where nothing runs.
        adopt: whether nothing runs.
        dry_run: whether nothing is claimed.

    Attributes:
        counts: rows, by what became of them.
        errors: what rows are to be parked with, by their places.
        outputs: how many were stored.
        left: the places of the rows that are to be handled as deliveries are.
    """

    def __init__(self, steps: Steps, sets: dict[str, SqlSet], *, adopt: bool, dry_run: bool) -> None:
        self._steps = steps
        self._consumer = steps.consumer
        self._sets = sets
        self._adopt = adopt
        self._dry_run = dry_run
        self.counts: Counter[Came] = Counter()
        self.errors: dict[int, Exception] = {}
        self.outputs = 0
        self.left: list[int] = []

    def run(self, chunk: pa.Table) -> None:
        """Handle what can be handled so.

        Raises:
            StoreError: the database is away.
        """
        columns = as_columns(chunk)
        types = dict(_by_type(columns["type"]))
        # What would be new twice is known from the first one, which a dry run leaves no trace of.
        if not self._server_takes_sets() or (self._dry_run and len(types) > 1):
            self._leave(np.arange(chunk.num_rows))
            return
        told = as_mask(pc.fill_null(pc.match_substring_regex(columns["headers"], _PROPERTIES), False))
        self._leave(np.flatnonzero(told))
        for name, of_type in types.items():
            places = of_type[~told[of_type]]
            try:
                registration = self._consumer.find(Message(body=b"", type=name))
            except MessageError:
                self._leave(places)
                continue
            if self._takes(registration):
                self._of_type(registration, columns, places)
            else:
                self._leave(places)

    def _takes(self, registration: Registration) -> bool:
        policy = registration.policy
        plain = policy.idempotent and not any(each.opted_in for each in policy.previous)
        handled = self._adopt or self._dry_run or registration.message_type in self._sets
        return plain and handled and (self._consumer.wrap is None or self._adopt)

    def _server_takes_sets(self) -> bool:
        takes: Callable[[str], bool] | None = getattr(self._steps.store, "takes_sets", None)
        return takes is not None and takes(self._consumer.name)

    def _of_type(self, registration: Registration, columns: dict[str, Any], places: NDArray[np.int64]) -> None:
        rows, errors = staged(self._consumer, registration, columns, places, adopt=self._adopt)
        self.errors |= errors
        if self._dry_run:
            rows = self._single(rows)
        late = self._late(registration, rows)
        self._leave(rows.places[late])
        rows = rows.take(np.flatnonzero(~late))
        while len(rows):
            order, first = in_order(rows.octets)
            try:
                self._run(registration, rows.take(order[first]))
            except _NotHere:
                self._leave(rows.places)
                return
            rows = rows.take(np.sort(order[~first]))
            if len(rows) < FEW:
                self._leave(rows.places)
                return

    def _single(self, rows: Staged) -> Staged:
        """Those whose ids come once."""
        order, first = in_order(rows.octets)
        once = first & np.append(first[1:], True)
        self._leave(rows.places[order[~once]])
        return rows.take(np.sort(order[once]))

    def _late(self, registration: Registration, rows: Staged) -> NDArray[np.bool_]:
        """Those that may be older than what is kept: most of them are not new, and each is looked at."""
        horizon = self._steps.store.late_before(self._consumer.name, registration.policy.retention)
        reached = (horizon - _EPOCH) // timedelta(milliseconds=1)
        late: NDArray[np.bool_] = (rows.moments >= 0) & (rows.moments < reached)
        if self._adopt:
            late[:] = False
        elif registration.policy.late == "handle":
            _tell_late(self._consumer.name, registration.message_type, int(late.sum()))
            late[:] = False
        return late

    def _run(self, registration: Registration, rows: Staged) -> None:
        """Rows with different keys, in their order; by halves if it fails."""
        if len(rows) < FEW:
            self._leave(rows.places)
            return
        try:
            self._steps.repeated(lambda: self._in_one_transaction(registration, rows), [])
        except _NotHere:
            raise
        except TransactionEnded as error:
            if error.committed == "no":
                self._run_halves(registration, rows, error)
            else:  # nobody knows what of its effects is committed; the claims are withdrawn
                self.errors |= dict.fromkeys(rows.places.tolist(), error)
        except StoreUnavailable as error:
            if not self._steps.writable():
                raise
            self._run_halves(registration, rows, error)
        except Exception as error:  # noqa: BLE001 - a statement of the user's may fail in any way
            self._run_halves(registration, rows, error)

    def _run_halves(self, registration: Registration, rows: Staged, error: Exception) -> None:
        log.warning(
            "a set of %d is taken apart: %s",
            len(rows),
            error,
            extra={"event": "batch_taken_apart", "deliveries": len(rows), "error": type(error).__name__},
        )
        middle = len(rows) // 2
        for part in (np.arange(middle), np.arange(middle, len(rows))):
            self._run(registration, rows.take(part))

    def _in_one_transaction(self, registration: Registration, rows: Staged) -> None:
        outputs = 0
        store: Any = self._steps.store
        with store.begin_set(self._consumer.name, registration.message_type) as unit:
            unit.stage(rows.payload(), rows.octets.tobytes(), rows.places.tolist())
            handler = None if self._adopt or self._dry_run else self._sets[registration.message_type]
            if handler is not None and not handler.fits(unit):
                raise _NotHere
            if self._dry_run:
                found = unit.look_staged()
            else:
                found = unit.claim_staged(min(CLAIM_WAIT, registration.policy.claim_wait))
                if found.new:
                    outputs = self._handle(unit, handler) if handler is not None else 0
                    unit.commit()
        self.counts.update({
            Came.NEW: found.new, Came.REPLAY: found.replays, Came.DUPLICATE: found.duplicates,
        })  # fmt: skip
        self._leave(np.array(found.conflicts, dtype=np.int64))
        self.outputs += outputs

    def _handle(self, unit: Any, handler: SqlSet) -> int:
        try:
            return handler.handle_staged(unit, self._consumer, self._due())
        except Exception as error:
            raise self._steps.meaning(error, unit) from error

    def _due(self) -> datetime | None:
        after = self._steps.relay_after
        return None if after is None else self._consumer.clock.now() + after

    def _leave(self, places: NDArray[np.int64]) -> None:
        self.left += places.tolist()


def _by_type(column: Any) -> Iterator[tuple[str | None, NDArray[np.int64]]]:
    """The places of each type's rows."""
    for value in pc.unique(column):
        mask: Any = column.is_null() if value.as_py() is None else pc.fill_null(pc.equal(column, value), False)
        yield value.as_py(), np.flatnonzero(as_mask(mask))


def _tell_late(consumer: str, message_type: str, rows: int) -> None:
    if rows:
        log.warning(
            "%d rows of type %s are handled, though claims of their time may have been purged",
            rows,
            message_type,
            extra={"event": "late_rows_handled", "consumer": consumer, "message_type": message_type, "rows": rows},
        )
