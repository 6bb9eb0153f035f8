"""A chunk without an object per row: on PostgreSQL, for types whose new rows are handled by a set handler, or by nobody.

```
table ── by type, in pieces ── decode, sort by key ──┬── first of each id ── stage, claim, effects, outputs, COMMIT
                                ▲                    └── its repeats: next     │      │ fails
                                └────── the next piece, while the server claims       └── by halves, down to a few rows
```

Whatever is not plain (conflicts, late rows, the few rows among which one fails) is left to the steps that deliveries take,
row by row: they know what each failure means, and say it in their own words.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.compute as pc

from idemp.bulk.arrow import as_columns
from idemp.bulk.batch import CLAIM_WAIT
from idemp.bulk.emitting import RowByRow
from idemp.bulk.keys import as_mask, in_order
from idemp.bulk.report import Came
from idemp.bulk.staging import Staged, staged
from idemp.columns import PROPERTIES
from idemp.errors import MessageError, StoreUnavailable, TransactionEnded
from idemp.messages import Message
from idemp.plurals import counted
from idemp.showing import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa
    from numpy.typing import NDArray

    from idemp.bulk.sets import ArrowSet, SqlSet
    from idemp.steps import Steps
    from idemp.work import Registration

log = logger("idemp.bulk")

PIECE: Final = 10_000
"""Rows of a transaction. Claims of many rows take less time each, since keys in their order share pages of the index; but
decoding the next ones must not take longer than claiming these."""
ADOPTED: Final = 25_000
"""The same of rows that are only claimed: as many as a server sorts in its usual `work_mem`."""
_FIRST: Final = 2_500
_GROWTH: Final = 4
FEW: Final = 64
"""Rows that are handled as deliveries are: it takes no longer, and finds the one that fails."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_PROPERTIES: Final = f'"({"|".join(PROPERTIES)})"'
"""Headers that stand for properties, by which outputs differ: of such messages each is looked at."""


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

    def __init__(self, steps: Steps, sets: dict[str, SqlSet | ArrowSet], *, adopt: bool, dry_run: bool) -> None:
        self._steps = steps
        self._consumer = steps.consumer
        self._sets = sets
        self._adopt = adopt
        self._dry_run = dry_run
        self.counts: Counter[Came] = Counter()
        self.errors: dict[int, Exception] = {}
        self.outputs = 0
        self.left: list[int] = []
        self._meanwhile: Callable[[], None] | None = None
        self._fits = True  # whether what the set emits can be stored as a set

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
        # Of a dry run nothing stays that a later piece could be judged by.
        cuts = [] if self._dry_run else list(_cuts(len(places), ADOPTED if self._adopt else PIECE))
        parts = np.split(places, cuts)
        pieces = _OneAhead(lambda part: self._decoded(registration, columns, part), parts)
        self._meanwhile, self._fits = pieces.prepare, True
        for piece in pieces:
            self.errors |= piece.errors
            self._leave(piece.left)
            self._run(registration, piece.distinct)
            rows = piece.repeats
            while len(rows):
                distinct, rows = _split(rows)
                self._run(registration, distinct)

    def _decoded(self, registration: Registration, columns: dict[str, Any], places: NDArray[np.int64]) -> _Piece:
        rows, errors = staged(self._consumer, registration, columns, places, adopt=self._adopt)
        if self._adopt or self._dry_run:
            rows = rows.claimed_only()
        late = self._late(registration, rows)
        left = rows.places[late]
        if len(left):
            rows = rows.take(np.flatnonzero(~late))
        if self._dry_run:
            rows, repeated = _single(rows)
            left = np.concatenate([left, repeated])
        distinct, repeats = _split(rows)
        if len(distinct) >= FEW:
            distinct.payload  # noqa: B018 - made now, while the server is at work
        return _Piece(distinct, repeats, left, errors)

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
        if len(rows) < FEW or not self._fits:
            self._leave(rows.places)
            return
        try:
            self._steps.repeated(lambda: self._in_one_transaction(registration, rows), [])
        except RowByRow:
            self._fits = False
            self._leave(rows.places)
        except TransactionEnded as error:
            if error.committed == "no":
                self._run_halves(registration, rows, error)
            else:  # nobody knows what of its effects is committed; the claims are withdrawn
                self.errors |= dict.fromkeys(rows.places.tolist(), error)
        except StoreUnavailable as error:
            if self._steps.obstacle() is not None:
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
            unit.stage(rows.payload, rows.copied, rows.octets.tobytes(), rows.places.tolist())
            handler = None if self._adopt or self._dry_run else self._sets[registration.message_type]
            if handler is not None and not handler.fits(unit):
                raise RowByRow
            if self._dry_run:
                found = unit.look_staged()
            else:
                found = unit.claim_staged(min(CLAIM_WAIT, registration.policy.claim_wait), self._meanwhile)
                if found.new:
                    outputs = self._handle(unit, handler, rows, found.others) if handler is not None else 0
                    unit.commit()
        self.counts.update({
            Came.NEW: found.new, Came.REPLAY: found.replays, Came.DUPLICATE: found.duplicates,
        })  # fmt: skip
        self._leave(np.array(found.conflicts, dtype=np.int64))
        self.outputs += outputs

    def _handle(self, unit: Any, handler: SqlSet | ArrowSet, rows: Staged, others: Sequence[int]) -> int:
        def fresh() -> pa.Table:
            return rows.take(np.flatnonzero(~np.isin(rows.places, others))).shown()

        try:
            unit.leave_fresh()
            outputs = handler.handle_staged(unit, self._consumer, self._due(), fresh)
            unit.flush()
        except RowByRow:
            raise
        except Exception as error:
            raise self._steps.meaning(error, unit) from error
        return outputs

    def _due(self) -> datetime | None:
        after = self._steps.relay_after
        return None if after is None else self._consumer.clock.now() + after

    def _leave(self, places: NDArray[np.int64]) -> None:
        self.left += places.tolist()


@dataclass(frozen=True)
class _Piece:
    """A part of a chunk's rows of one type.

    Attributes:
        distinct: the first of each id, in the order of their keys.
        repeats: the others.
        left: the places of those that are to be handled as deliveries are.
        errors: what is wrong with a row, by its place.
    """

    distinct: Staged
    repeats: Staged
    left: NDArray[np.int64]
    errors: dict[int, Exception]


class _OneAhead:
    """Pieces, each decoded while the server is at work on the one before.

    Args:
        decode: makes one of places.
        parts: the places of each.
    """

    def __init__(self, decode: Callable[[NDArray[np.int64]], _Piece], parts: Iterable[NDArray[np.int64]]) -> None:
        self._decoding = map(decode, parts)
        self._ready: _Piece | Exception | None = None

    def prepare(self) -> None:
        """Have the next one ready; what is wrong with it is no matter of the one before."""
        if self._ready is None:
            try:
                self._ready = next(self._decoding, None)
            except Exception as error:  # noqa: BLE001 - raised in its turn
                self._ready = error

    def __iter__(self) -> Iterator[_Piece]:
        while True:
            self.prepare()
            ready, self._ready = self._ready, None
            if ready is None:
                return
            if isinstance(ready, Exception):
                raise ready
            yield ready


def _cuts(rows: int, most: int) -> Iterator[int]:
    """Where a chunk is cut: the first piece is short, since the server has nothing to do until it is decoded.

    Example:
        >>> list(_cuts(50_000, 25_000)), list(_cuts(25_000, 10_000)), list(_cuts(4_000, 10_000))
        ([2500, 12500, 37500], [2500, 12500, 22500], [])
    """
    first = size = cut = min(_FIRST, most)
    while cut + first <= rows:
        yield cut
        size = min(size * _GROWTH, most)
        cut += size


def _split(rows: Staged) -> tuple[Staged, Staged]:
    """The first of each id, in the order of their keys, and the others as they come."""
    order, first = in_order(rows.octets)
    return rows.take(order[first]), rows.take(np.sort(order[~first]))


def _single(rows: Staged) -> tuple[Staged, NDArray[np.int64]]:
    """Those whose ids come once, and the places of the others."""
    order, first = in_order(rows.octets)
    once = first & np.append(first[1:], True)
    return rows.take(np.sort(order[once])), rows.places[order[~once]]


def _by_type(column: Any) -> Iterator[tuple[str | None, NDArray[np.int64]]]:
    """The places of each type's rows."""
    for value in pc.unique(column):
        mask: Any = column.is_null() if value.as_py() is None else pc.fill_null(pc.equal(column, value), False)
        yield value.as_py(), np.flatnonzero(as_mask(mask))


def _tell_late(consumer: str, message_type: str, rows: int) -> None:
    if rows:
        log.warning(
            "handled %s of type %s, though claims of their time may have been purged",
            counted(rows, "row"),
            message_type,
            extra={"event": "late_rows_handled", "consumer": consumer, "message_type": message_type, "rows": rows},
        )
