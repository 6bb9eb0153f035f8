"""Many messages in one transaction: claimed at once, handled one after the other, committed together.

```
messages   ── distinct ids ── BEGIN; claim all ──┬── DUPLICATE, CONFLICT: as for one alone
                                                 ├── IN_FLIGHT: apart; the others begin anew
                                                 └── CLAIMED: handler, handler, … ── store all outputs ── COMMIT
                                                              │ one fails
                                                              └── ROLLBACK; those before it, those after it, itself alone
```

There are no savepoints. What fails is found by running the others again without it, in batches of their own; what stays
alone is its caller's, which knows what each failure means: the worker runs it as every delivery runs, by the protocol, and
a chunk parks it if it fails again. So a batch decides nothing that a single message would have to decide otherwise, and
only handlers whose effects are all in the database may share one.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from idemp.classification import Phase, Phases, phase_of
from idemp.errors import LateMessage, StoreUnavailable, TransactionEnded, TransientStoreError
from idemp.inbox.port import Verdict
from idemp.showing import logger
from idemp.suspects import Suspects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from idemp.handling import Member
    from idemp.inbox.port import Claimed, UnitOfWork
    from idemp.messages import Output
    from idemp.steps import Steps
    from idemp.work import Work

log = logger("idemp.protocol")

CLAIM_WAIT: Final = timedelta(milliseconds=100)
"""How long a batch waits for somebody who holds one of its ids, before it goes on without that one."""

_MANY: Final = 8
_MANY_ALONE: Final = 1000  # as many as a worker's batch has
_Group = list[int]  # places in the batch

T = TypeVar("T")


def may_share(work: Work) -> bool:
    """Whether a delivery may share a transaction with others.

    One that looks for former identities as well runs alone: where such a one was handled, its present id must stay free.
    """
    return work.policy.batch > 1 and len(work.claims) == 1


class Batch(Generic[T]):
    """Messages that share transactions as far as they can.

    Args:
        steps: of this thread.
        members: each of which has one claim.
        ended: what each comes to, by what its claim answered and what it emitted; called after COMMIT.

    Attributes:
        running: the places of those whose handler runs, or was the last to run.
        came_to: what became of each so far: what `ended` said of it, or the error that it is to be parked with; `None`
            for those that are to run alone.
    """

    def __init__(
        self,
        steps: Steps,
        members: Sequence[Member],
        ended: Callable[[Member, Claimed, Sequence[Output]], T],
    ) -> None:
        self._steps = steps
        self._members = members
        self._ended = ended
        self.came_to: list[T | Exception | None] = [None] * len(members)
        self._groups = self._distinct()
        self._ran: set[int] = set()  # in the present transaction
        self.running: _Group = []

    def run(self) -> list[T | Exception | None]:
        """What became of each; see `came_to`.

        Raises:
            StoreUnavailable: the database is away, or takes no writes: call it again later, it goes on where it stopped.
        """
        while self._groups:
            self._groups[:1] = self._left_by(self._groups[0])
        return self.came_to

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
            return self._steps.repeated(
                lambda: self._in_one_transaction(group), [self._members[place].watch for place in group]
            )
        except _Failed as failed:
            return _around(group, failed.places)
        except TransactionEnded as error:
            if error.committed == "no":
                return _around(group, self.running)
            # A handler ended the transaction that all of them share: what ran before may be committed, claims are not.
            for place in self._ran:
                self.came_to[place] = error
            return [[place for place in group if place not in self._ran]]
        except StoreUnavailable as error:
            if self._steps.obstacle() is not None:
                raise
            # The database is there: it is something of theirs, a handler's statement or their sheer size.
            _tell(group, error)
            return [] if phase_of(error) is Phase.HANDLER else _halves(group)
        except TransientStoreError as error:
            _tell(group, error)
            # They lost against others time and again, and hold less when they are fewer.
            return _halves(group) if len(group) > _MANY_ALONE else []
        except Exception as error:  # noqa: BLE001 - COMMIT failed, of a deferred constraint, say
            self._steps.rule_for(error)  # raises where it is the store's
            _tell(group, error)
            return _halves(group)

    def _in_one_transaction(self, group: _Group) -> list[_Group]:
        members = [self._members[place] for place in group]
        claims = [member.work.claims[0] for member in members]
        self._ran, self.running = set(), []
        with ExitStack() as transaction:
            phases = transaction.enter_context(Phases())
            for member in members:
                transaction.enter_context(member.watch.transaction())
            unit = transaction.enter_context(self._steps.store.begin(claims))
            phases.now = Phase.CLAIM
            wait = min(CLAIM_WAIT, *{claim.wait for claim in claims})
            claimed = dict(zip(group, unit.claim_all(claims, wait), strict=True))
            fresh = [place for place in group if claimed[place].verdict is Verdict.CLAIMED]
            held = [place for place in group if claimed[place].verdict is Verdict.IN_FLIGHT]
            if len(held) == len(group):
                return _halves(group)  # perhaps the store can't tell which one it is
            if apart := {*held, *filter(self._stays_alone, fresh), *self._late(unit, fresh)}:
                return [[place for place in group if place not in apart]]
            phases.now = Phase.HANDLER
            outputs = self._handled(unit, fresh)
            if fresh:
                phases.now = Phase.STORE
                stored = [(self._members[place].work.claims[0], outputs[place]) for place in fresh]
                unit.store_all(stored, self._steps.relay_after)
                self._check_alive(fresh)
                phases.now = Phase.COMMIT
                unit.commit()
        for place in group:
            with self._steps.turn_of(self._members[place]):
                self.came_to[place] = self._ended(self._members[place], claimed[place], outputs.get(place, ()))
        return []

    def _stays_alone(self, place: int) -> bool:
        """Whether it may have ended a process."""
        return Suspects.counts(self._members[place].work, redelivered=self._members[place].redelivered)

    def _late(self, unit: UnitOfWork, fresh: _Group) -> _Group:
        """Those whose claims must not be kept: nobody has their ids, and nobody knows any more whether somebody had."""
        late = []
        for place in fresh:
            try:
                self._steps.check_age(self._members[place].work, unit)
            except LateMessage as error:
                self.came_to[place] = error
                late.append(place)
        return late

    def _handled(self, unit: UnitOfWork, fresh: _Group) -> dict[int, Sequence[Output]]:
        outputs: dict[int, Sequence[Output]] = {}
        for places in self._by_handler(fresh):
            members = [self._members[place] for place in places]
            with self._blaming(places):
                if members[0].work.registration.batch_handler is not None:
                    outputs.update(zip(places, self._steps.run_batch_handler(unit, members), strict=True))
                else:
                    with self._steps.turn_of(members[0]):
                        outputs[places[0]] = self._steps.run_handler(unit, members[0].work)
                settings_changed = unit.forget() is False
            if settings_changed and len(places) < len(fresh):
                raise _Failed(places)  # the others must not run under what it has set
        return outputs

    def _by_handler(self, fresh: _Group) -> Iterator[_Group]:
        """Each by itself, but for those of a handler that takes several: they go with the first of their type."""
        groups: dict[int | str, _Group] = {}  # by place or by type
        for place in fresh:
            registration = self._members[place].work.registration
            groups.setdefault(registration.message_type if registration.batch_handler else place, []).append(place)
        for places in groups.values():
            most = self._members[places[0]].work.registration.most_together
            yield from (places[start : start + most] for start in range(0, len(places), most))

    def _check_alive(self, fresh: _Group) -> None:
        """They came over one connection, so that what is true of one is true of all."""
        if not self._members[fresh[0]].work.alive():
            for place in fresh:
                self._steps.check_alive(self._members[place].work)

    @contextmanager
    def _blaming(self, places: _Group) -> Iterator[None]:
        """What is raised in here is the fault of these."""
        self.running = places
        self._ran.update(places)
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
    first, guilty = group.index(failed[0]), set(failed)
    after = [place for place in group[first:] if place not in guilty]
    return [
        group[:first],
        *(_halves(failed) if len(failed) > 1 else ()),
        *(_halves(after) if len(after) > _MANY else [after]),
    ]


def _halves(group: _Group) -> list[_Group]:
    middle = len(group) // 2
    return [group[:middle], group[middle:]]
