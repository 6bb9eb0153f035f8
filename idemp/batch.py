"""Many deliveries in one transaction: claimed at once, handled one after the other, committed together.

```
deliveries ── distinct ids ── BEGIN; claim all ──┬── DUPLICATE, CONFLICT: as for one alone
                                                 ├── IN_FLIGHT: apart; the others begin anew
                                                 └── CLAIMED: handler, handler, … ── store all outputs ── COMMIT
                                                              │ one fails
                                                              └── ROLLBACK; those before it, those after it, itself alone
```

There are no savepoints. What fails is found by running the others again without it, in batches of their own; what stays
alone runs as every delivery does, by the protocol, which knows what each failure means. So a batch decides nothing that a
single delivery would have to decide otherwise, and only handlers whose effects are all in the database may share one.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from idemp.errors import LateMessage, PayloadConflict, StoreUnavailable, TransactionEnded, TransientStoreError
from idemp.inbox.port import Verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from idemp.dispatch import Shipment
    from idemp.handling import CameTo, Member
    from idemp.inbox.port import Claimed, UnitOfWork
    from idemp.messages import Output
    from idemp.outcome import Outcome
    from idemp.protocol import Protocol
    from idemp.work import Work

log = logging.getLogger("idemp.protocol")

CLAIM_WAIT: Final = timedelta(milliseconds=100)
"""How long a batch waits for somebody who holds one of its ids, before it goes on without that one."""

_MANY: Final = 8
_Group = list[int]  # places in the batch


def may_share(work: Work) -> bool:
    """Whether a delivery may share a transaction with others.

    One that looks for former identities as well runs alone: where such a one was handled, its present id must stay free.
    """
    return work.policy.batch > 1 and len(work.claims) == 1


class Batch:
    """Deliveries that share transactions as far as they can.

    Args:
        protocol: of this thread.
        members: each of which `may_share`.

    Attributes:
        running: the places of those whose handler runs, or was the last to run.
    """

    def __init__(self, protocol: Protocol, members: Sequence[Member]) -> None:
        self._protocol = protocol
        self._members = members
        self._came_to: list[CameTo] = [None] * len(members)
        self._groups = self._distinct()
        self._ran: _Group = []  # in the present transaction
        self.running: _Group = []

    def run(self) -> list[CameTo]:
        """What became of each; `None` for those that are to run alone.

        Raises:
            StoreUnavailable: the database is away, or takes no writes: call it again later, it goes on where it stopped.
        """
        with suppress(TransientStoreError), self._protocol.suspects.company():
            while self._groups:
                self._groups[:1] = self._left_by(self._groups[0])
        return self._came_to

    def _distinct(self) -> list[_Group]:
        """An id that comes twice is a duplicate the second time, once the first is committed."""
        groups: list[_Group] = []
        seen: dict[object, int] = {}
        for place, member in enumerate(self._members):
            claim = member.work.claims[0]
            key = (claim.consumer, claim.id.key)
            seen[key] = times = seen.get(key, -1) + 1
            if times == len(groups):
                groups.append([])
            groups[times].append(place)
        return groups

    def _left_by(self, group: _Group) -> list[_Group]:
        """Run a group; which groups are to be run instead of it, or after it."""
        if len(group) < 2:  # noqa: PLR2004 - one alone
            return []
        try:
            return self._protocol.repeated(
                lambda: self._in_one_transaction(group), [self._members[place].watch for place in group]
            )
        except _Failed as failed:
            return _around(group, failed.places)
        except TransactionEnded as error:
            if error.committed == "no":
                return _around(group, self.running)
            # A handler ended the transaction that all of them share: what ran before may be committed, claims are not.
            for place in self._ran:
                self._came_to[place] = error
            return [[place for place in group if place not in self._ran]]
        except StoreUnavailable as error:
            if not self._protocol.writable():
                raise
            # The database is there: it is something of theirs, a handler's statement or their sheer size.
            _tell(group, error)
            return [] if error.in_handler else _halves(group)
        except TransientStoreError as error:
            _tell(group, error)
            return []  # they lost against others time and again, and hold less when they run alone
        except Exception as error:  # noqa: BLE001 - COMMIT failed, of a deferred constraint, say
            _tell(group, error)
            return _halves(group)

    def _in_one_transaction(self, group: _Group) -> list[_Group]:
        members = [self._members[place] for place in group]
        claims = [member.work.claims[0] for member in members]
        self._ran, self.running = [], []
        with ExitStack() as transaction:
            for member in members:
                transaction.enter_context(member.watch.transaction())
            unit = transaction.enter_context(self._protocol.store.begin(claims))
            wait = min(CLAIM_WAIT, *(claim.wait for claim in claims))
            claimed = dict(zip(group, unit.claim_all(claims, wait), strict=True))
            fresh = [place for place in group if claimed[place].verdict is Verdict.CLAIMED]
            held = [place for place in group if claimed[place].verdict is Verdict.IN_FLIGHT]
            if len(held) == len(group):
                return _halves(group)  # perhaps the store can't tell which one it is
            if apart := {*held, *filter(self._stays_alone, fresh)}:
                return [[place for place in group if place not in apart]]
            outputs = self._handled(unit, fresh)
            if fresh:
                stored = [(self._members[place].work.claims[0], outputs[place]) for place in fresh]
                unit.store_all(stored, self._protocol.consumer.relay_after)
                self._check_alive(fresh)
                unit.commit()
        for place in group:
            self._came_to[place] = self._end(place, claimed[place], outputs.get(place, ()))
        return []

    def _stays_alone(self, place: int) -> bool:
        """Whether it may have ended a process, or is late, so that its claim must not be kept."""
        member = self._members[place]
        if self._protocol.suspects.counts(member.work, redelivered=member.redelivered):
            return True
        try:
            self._protocol.check_age(member.work)
        except LateMessage:
            return True
        return False

    def _handled(self, unit: UnitOfWork, fresh: _Group) -> dict[int, Sequence[Output]]:
        outputs: dict[int, Sequence[Output]] = {}
        for places in self._by_handler(fresh):
            members = [self._members[place] for place in places]
            with self._blaming(places):
                if members[0].work.registration.batch_handler is not None:
                    outputs.update(zip(places, self._protocol.run_batch_handler(unit, members), strict=True))
                else:
                    with self._protocol.turn_of(members[0]):
                        outputs[places[0]] = self._protocol.run_handler(unit, members[0].work)
                unit.forget()
        return outputs

    def _by_handler(self, fresh: _Group) -> Iterable[_Group]:
        """Each by itself, but for those of a handler that takes several: they go with the first of their type."""
        groups: dict[int | str, _Group] = {}  # by place or by type
        for place in fresh:
            registration = self._members[place].work.registration
            groups.setdefault(registration.message_type if registration.batch_handler else place, []).append(place)
        return groups.values()

    def _check_alive(self, fresh: _Group) -> None:
        """They came over one connection, so that what is true of one is true of all."""
        if not self._members[fresh[0]].work.alive():
            for place in fresh:
                self._protocol.check_alive(self._members[place].work)

    def _end(self, place: int, claimed: Claimed, outputs: Sequence[Output]) -> Outcome | Shipment | Exception:
        work = self._members[place].work
        with self._protocol.turn_of(self._members[place]):
            if claimed.verdict is Verdict.CLAIMED:
                return self._protocol.shipped(work, outputs)
            try:
                return self._protocol.not_claimed(work, claimed)
            except PayloadConflict as conflict:
                return conflict

    @contextmanager
    def _blaming(self, places: _Group) -> Iterator[None]:
        """What is raised in here is the fault of these."""
        self.running = places
        self._ran += places
        try:
            yield
        except (TransientStoreError, StoreUnavailable):
            raise
        except Exception as error:
            if isinstance(error, TransactionEnded) and error.committed != "no":
                raise
            raise _Failed(places) from error


class _Failed(Exception):
    """Handlers raised; nothing of their transaction is left."""

    def __init__(self, places: _Group) -> None:
        super().__init__(places)
        self.places = places


def _tell(group: _Group, error: Exception) -> None:
    """No handler is known to have raised it; if it is one delivery's fault, that one tells when it runs alone."""
    log.warning(
        "a batch of %d is taken apart: %s",
        len(group),
        error,
        extra={"event": "batch_taken_apart", "deliveries": len(group), "error": type(error).__name__},
    )


def _around(group: _Group, failed: _Group) -> list[_Group]:
    """Those before, the failed ones by halves, those after; who fails alone is in none of them, and runs alone.

    If many fail, those after fail as well: by halves there are fewer claims that are taken back.
    """
    first = group.index(failed[0])
    after = [place for place in group[first:] if place not in failed]
    return [
        group[:first],
        *(_halves(failed) if len(failed) > 1 else ()),
        *(_halves(after) if len(after) > _MANY else [after]),
    ]


def _halves(group: _Group) -> list[_Group]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]]
