# ruff: noqa: S101 - this module is made of assertions
"""What every home of prepared messages, and every barrier, must do, as pytest classes: subclass them, and give them one.

```python
class TestMyHome(PreparedHomeConformance):
    @pytest.fixture
    def home(self):
        return MyHome("my://localhost")

    def reopen(self, home):
        return MyHome("my://localhost")
```
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import UUID, uuid4

import pytest

from idemp.errors import (
    AlreadyPassed,
    OppositeDecision,
    PreparedConflict,
    RolledBack,
    TransientStoreError,
    UnknownPrepared,
)
from idemp.messages import CAUSATION_HEADER, Message, Output, OutputKind
from idemp.prepared.port import Answer, Decision, Prepared, State
from idemp.testing.store_bench import Background

if TYPE_CHECKING:
    from collections.abc import Callable

    from idemp.prepared.port import Barrier, Home, Taken

__all__ = ["BarrierConformance", "DecidingHomeConformance", "PreparedHomeConformance", "make_prepared"]

LATER = timedelta(hours=1)
_NOW = timedelta(0)
_PAUSE = 0.02


def make_prepared(id: UUID | None = None, *, sku: str = "A-1", to: str = "stock", key: str | None = None) -> Prepared:
    """A prepared message to a queue; without an id it has a new one.

    Example:
        >>> make_prepared(sku="B-2").message.body
        b'{"sku":"B-2"}'
    """
    named = id or uuid4()
    headers = {"tenant": "é", **({CAUSATION_HEADER: key} if key else {})}
    body = b'{"sku":"%s"}' % sku.encode()
    message = Message(body=body, type="stock.Reserve", message_id=str(named), headers=headers, correlation_id=key)
    return Prepared.of(
        Output(id=named, ordinal=0, kind=OutputKind.SEND, exchange="", routing_key=to, message=message, mandatory=False)
    )


class PreparedHomeConformance:
    """The cases of the home port that a broker can keep, too. A subclass gives the fixture `home`, empty or not.

    Attributes:
        soon: a `check_after` after which a message is due at once, or soon.
        later: one after which nothing is due while a test runs.
        lease: of what is taken and must not come back while a test runs.
        short_lease: of what is taken and must come back.
        patience: seconds after which something that is due was taken, at the latest.

    Example:
        >>> [case for case in dir(PreparedHomeConformance) if "park" in case]
        ['test_parked_stays_until_it_is_resumed']
    """

    soon: ClassVar[timedelta] = _NOW
    later: ClassVar[timedelta] = LATER
    lease: ClassVar[timedelta] = LATER
    short_lease: ClassVar[timedelta] = _NOW
    patience: ClassVar[float] = 10.0

    def reopen(self, home: Any) -> Any:
        """Another object on the same home, as another process has one; the same where there is none."""
        return home

    def taken(self, home: Home, id: UUID, lease: timedelta | None = None) -> Taken:
        """This message as soon as it is due; fails after `patience`. Others that are due are left as they are."""
        deadline = time.monotonic() + self.patience
        while True:
            found = [each for each in home.take(100, self.lease if lease is None else lease) if each.id == id]
            if found:
                return found[0]
            assert time.monotonic() < deadline, f"{id} was not due within {self.patience} s"
            time.sleep(_PAUSE)

    def is_due(self, home: Home, id: UUID) -> bool:
        """Whether it can be taken right now."""
        return id in [each.id for each in home.take(100, self.lease)]

    def test_prepared_is_taken_as_it_was(self, home: Home) -> None:
        """Destination, properties and bytes, from any process."""
        prepared = make_prepared(sku="ä", key="order-7")
        home.prepare(prepared, self.soon)
        taken = self.taken(self.reopen(home), prepared.id)
        assert taken.output == prepared.output
        assert taken.fingerprint == prepared.fingerprint
        assert (taken.state, taken.checks, taken.attempts, taken.key) == (State.PREPARED, 0, 0, "order-7")

    def test_nothing_is_due_before_its_time(self, home: Home) -> None:
        """A check waits for as long as the producer says."""
        prepared = make_prepared()
        home.prepare(prepared, self.later)
        assert not self.is_due(home, prepared.id)

    def test_leased_to_one(self, home: Home) -> None:
        """Nobody else gets what one checker has."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        self.taken(home, prepared.id)
        assert not self.is_due(self.reopen(home), prepared.id)

    def test_prepared_twice_is_harmless(self, home: Home) -> None:
        """However many copies there are: once it was published nothing is left."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        home.prepare(prepared, self.soon)
        taken = self.taken(home, prepared.id)
        home.decide(taken, Decision.COMMIT, self.lease)
        home.published(taken)
        for copy in home.take(100, self.lease):
            if copy.id == prepared.id:  # of a broker
                home.published(copy)
        assert not self.is_due(home, prepared.id)

    def test_committed_and_published_is_done(self, home: Home) -> None:
        """Neither is it taken again, nor does anybody have to publish it."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        taken = self.taken(home, prepared.id)
        assert home.decide(taken, Decision.COMMIT, self.lease) is True
        home.published(taken)
        assert not self.is_due(home, prepared.id)

    def test_rolled_back_is_done(self, home: Home) -> None:
        """It is not taken again."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        taken = self.taken(home, prepared.id)
        assert home.decide(taken, Decision.ROLLBACK, self.lease) is False
        assert not self.is_due(home, prepared.id)

    def test_unknown_comes_again_and_is_counted(self, home: Home) -> None:
        """Each check that did not know counts, and nothing else does."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        for checks in range(3):
            taken = self.taken(home, prepared.id)
            assert taken.checks == checks
            home.postpone(taken, "nobody knows", self.soon, checked=True)
        taken = self.taken(home, prepared.id)
        home.postpone(taken, "the database is away", self.soon, checked=False)
        again = self.taken(self.reopen(home), prepared.id)
        assert again.checks == 3  # noqa: PLR2004
        assert again.output == prepared.output

    def test_a_dead_checkers_comes_back(self, home: Home) -> None:
        """What nobody ended is due again; a crash is no check."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        other = self.reopen(home)
        self.taken(other, prepared.id, self.short_lease)
        if other is not home:
            other.close()
        assert self.taken(home, prepared.id).checks == 0

    def test_parked_stays_until_it_is_resumed(self, home: Home) -> None:
        """Neither dropped nor taken; afterwards its checks begin anew."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        home.postpone(self.taken(home, prepared.id), "nobody knows", self.soon, checked=True)
        assert home.park(self.taken(home, prepared.id), "checked too often") is True
        assert not self.is_due(home, prepared.id)
        found = home.find(prepared.id)
        assert found is not None
        assert (found.state, found.reason) == (State.PARKED, "checked too often")
        assert found.prepared.output == prepared.output
        assert prepared.id in {record.prepared.id for record in home.browse(State.PARKED, 1000)}
        assert home.resume(prepared.id) is True
        assert self.taken(home, prepared.id).checks == 0
        assert home.resume(prepared.id) is False, "it is not parked any more"

    def test_looking_takes_nothing(self, home: Home) -> None:
        """People see what waits, and it still comes to the checker."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        found = home.find(prepared.id)
        assert found is not None
        assert (found.state, found.prepared.output) == (State.PREPARED, prepared.output)
        assert prepared.id in {record.prepared.id for record in home.browse(None, 1000)}
        assert self.taken(home, prepared.id).checks == 0
        assert home.find(uuid4()) is None
        assert home.resume(uuid4()) is False


class DecidingHomeConformance(PreparedHomeConformance):
    """The cases of homes that compare and set, beside those of all homes.

    Example:
        >>> [case for case in dir(DecidingHomeConformance) if "opposite" in case]
        ['test_opposite_decisions_race', 'test_the_opposite_is_refused']
    """

    def state(self, home: Home, id: UUID) -> State | None:
        """Where it stands."""
        found = home.find(id)
        return found.state if found is not None else None

    def test_same_id_with_another_message(self, home: Home) -> None:
        """Nothing is stored, and the first one stays."""
        prepared = make_prepared()
        home.prepare(prepared, self.later)
        for other in (make_prepared(prepared.id, sku="B-2"), make_prepared(prepared.id, to="elsewhere")):
            with pytest.raises(PreparedConflict):
                home.prepare(other, self.later)
        found = home.find(prepared.id)
        assert found is not None
        assert found.prepared.output == prepared.output

    @pytest.mark.parametrize("decision", list(Decision))
    def test_repeated_decision_is_harmless(self, home: Home, decision: Decision) -> None:
        """Also after the message was published, and where it is prepared again."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        committed = decision is Decision.COMMIT
        for _ in range(3):
            assert home.decide(prepared, decision, self.lease) is committed
        home.published(prepared)
        home.published(prepared)
        home.prepare(prepared, self.soon)
        assert home.decide(prepared, decision, self.lease) is False
        assert self.state(home, prepared.id) is (State.PUBLISHED if committed else State.ROLLED_BACK)
        assert not self.is_due(home, prepared.id)

    @pytest.mark.parametrize("first", list(Decision))
    def test_the_opposite_is_refused(self, home: Home, first: Decision) -> None:
        """Loudly, and without effect; before the message was published and after it."""
        second = Decision.ROLLBACK if first is Decision.COMMIT else Decision.COMMIT
        prepared = make_prepared()
        home.prepare(prepared, self.later)
        home.decide(prepared, first, self.lease)
        for _ in range(2):
            before = self.state(home, prepared.id)
            with pytest.raises(OppositeDecision):
                home.decide(prepared, second, self.lease)
            assert self.state(home, prepared.id) is before
            home.published(prepared)

    @pytest.mark.parametrize("decision", list(Decision))
    def test_none_is_no_success(self, home: Home, decision: Decision) -> None:
        """A decision about what nobody prepared is an error, and prepares nothing."""
        prepared = make_prepared()
        with pytest.raises(UnknownPrepared):
            home.decide(prepared, decision, self.lease)
        assert home.find(prepared.id) is None

    def test_opposite_decisions_race(self, home: Home) -> None:
        """One of them wins, the other is told."""
        for _ in range(5):
            prepared = make_prepared()
            home.prepare(prepared, self.later)
            answers = _together(*(self._deciding(self.reopen(home), prepared, decision) for decision in Decision))
            assert sorted(map(str, answers)) in (["False", "refused"], ["True", "refused"])
            state = self.state(home, prepared.id)
            assert state is (State.COMMITTED if True in answers else State.ROLLED_BACK)

    def test_committed_is_taken_to_be_published(self, home: Home) -> None:
        """After the lease of whoever decided it; a refusal by the broker counts as an attempt, not as a check."""
        prepared = make_prepared()
        home.prepare(prepared, self.later)
        home.decide(prepared, Decision.COMMIT, self.lease)
        assert not self.is_due(home, prepared.id), "whoever decided it publishes it"
        other = make_prepared()
        home.prepare(other, self.later)
        home.decide(other, Decision.COMMIT, self.short_lease)
        taken = self.taken(home, other.id)
        assert taken.state is State.COMMITTED
        home.postpone(taken, "returned", self.soon, checked=False)
        taken = self.taken(home, other.id)
        assert (taken.state, taken.checks, taken.attempts) == (State.COMMITTED, 0, 1)
        assert home.park(taken, "no") is False, "what is committed is published, not parked"
        home.published(taken)
        assert not self.is_due(home, other.id)

    def test_checkers_share_the_work(self, home: Home) -> None:
        """Each message is taken by one of them."""
        ids = {self._prepared(home).id for _ in range(30)}

        def taking(instance: Home) -> Callable[[], list[UUID]]:
            def take() -> list[UUID]:
                taken: list[UUID] = []
                while found := instance.take(4, self.lease):
                    taken += [each.id for each in found]
                return taken

            return take

        answers = _together(*(taking(instance) for instance in (home, self.reopen(home), home)))
        taken = [id_ for answer in answers for id_ in answer if id_ in ids]
        assert len(taken) == len(set(taken)), "one was taken twice"
        left = [each.id for each in home.take(100, self.lease)]  # what all of them passed over at once
        assert set(taken) | set(left) >= ids

    def test_a_decision_ends_what_was_taken(self, home: Home) -> None:
        """A checker that comes late with its "unknown" changes nothing."""
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        taken = self.taken(home, prepared.id)
        home.decide(prepared, Decision.ROLLBACK, self.lease)
        home.postpone(taken, "nobody knows", self.soon, checked=True)
        assert home.park(taken, "checked too often") is False
        assert self.state(home, prepared.id) is State.ROLLED_BACK
        assert not self.is_due(home, prepared.id)

    @pytest.mark.parametrize("decision", list(Decision))
    def test_parked_can_be_decided(self, home: Home, decision: Decision) -> None:
        """The producer itself may come late."""
        prepared = make_prepared()
        home.prepare(prepared, self.later)
        home.park(prepared, "by hand")
        assert home.decide(prepared, decision, self.lease) is (decision is Decision.COMMIT)
        assert home.resume(prepared.id) is False

    def test_only_final_ones_are_forgotten(self, home: Home) -> None:
        """After the retention; what waits or is parked stays, however old it is."""
        made = {state: make_prepared() for state in State}
        for prepared in made.values():
            home.prepare(prepared, self.later)
        home.decide(made[State.COMMITTED], Decision.COMMIT, self.lease)
        home.decide(made[State.PUBLISHED], Decision.COMMIT, self.lease)
        home.published(made[State.PUBLISHED])
        home.decide(made[State.ROLLED_BACK], Decision.ROLLBACK, self.lease)
        home.park(made[State.PARKED], "by hand")
        ids = {prepared.id for prepared in made.values()}
        assert not ids.intersection(home.expired(self.later, 1000))
        final = {made[state].id for state in State if state.is_final}
        assert ids.intersection(home.expired(timedelta(0), 1000)) == final
        assert len(home.expired(timedelta(0), 1)) == 1
        home.forget(ids)
        assert {state for state in State if self.state(home, made[state].id) is None} == {
            State.PUBLISHED,
            State.ROLLED_BACK,
        }

    def _prepared(self, home: Home) -> Prepared:
        prepared = make_prepared()
        home.prepare(prepared, self.soon)
        return prepared

    @staticmethod
    def _deciding(home: Home, prepared: Prepared, decision: Decision) -> Callable[[], object]:
        def decide() -> object:
            while True:
                try:
                    return home.decide(prepared, decision, LATER)
                except OppositeDecision:
                    return "refused"
                except TransientStoreError:
                    continue

        return decide


class BarrierConformance:
    """The cases of the barrier port. A subclass gives the fixture `barrier`.

    Attributes:
        patience: seconds within which a probe gives up waiting, and all else ends.

    Example:
        >>> [case for case in dir(BarrierConformance) if "late" in case]
        ['test_late_work_is_refused']
    """

    patience: ClassVar[float] = 30.0

    def reopen(self, barrier: Any) -> Any:
        """Another object on the same barrier, as another process has one; the same where there is none."""
        return barrier

    def test_committed_work_passed(self, barrier: Barrier) -> None:
        """However often one asks, from any process."""
        id_ = uuid4()
        with barrier.begin() as work:
            barrier.pass_(work, id_)
        assert [each.probe(id_) for each in (barrier, self.reopen(barrier), barrier)] == [Answer.COMMIT] * 3

    def test_late_work_is_refused(self, barrier: Barrier) -> None:
        """Where the checker was first, no work commits any more."""
        id_ = uuid4()
        assert barrier.probe(id_) is Answer.ROLLBACK
        for _ in range(2):
            with pytest.raises(RolledBack), self.reopen(barrier).begin() as work:
                barrier.pass_(work, id_)
            assert barrier.probe(id_) is Answer.ROLLBACK

    def test_work_that_rolled_back_did_not_pass(self, barrier: Barrier) -> None:
        """Its row went with it."""
        id_ = uuid4()
        self._rolled_back(barrier, id_)
        assert barrier.probe(id_) is Answer.ROLLBACK

    def test_work_that_rolled_back_may_be_tried_again(self, barrier: Barrier) -> None:
        """As long as nobody probed."""
        id_ = uuid4()
        self._rolled_back(barrier, id_)
        with barrier.begin() as work:
            barrier.pass_(work, id_)
        assert barrier.probe(id_) is Answer.COMMIT

    def test_work_is_done_once(self, barrier: Barrier) -> None:
        """A producer that is run again is told."""
        id_ = uuid4()
        with barrier.begin() as work:
            barrier.pass_(work, id_)
        with pytest.raises(AlreadyPassed), barrier.begin() as work:
            barrier.pass_(work, id_)
        assert barrier.probe(id_) is Answer.COMMIT

    def test_work_in_flight_is_unknown(self, barrier: Barrier) -> None:
        """The probe waits, gives up, and has decided nothing: the work commits."""
        id_ = uuid4()
        with barrier.begin() as work:
            barrier.pass_(work, id_)
            probing = Background(lambda: self.reopen(barrier).probe(id_))
            assert probing.result(self.patience) is Answer.UNKNOWN
        assert barrier.probe(id_) is Answer.COMMIT

    def test_ids_do_not_wait_for_each_other(self, barrier: Barrier) -> None:
        """Another message's work in flight is nobody's business."""
        id_, other = sorted([uuid4(), uuid4()])
        with barrier.begin() as work:
            barrier.pass_(work, id_)
            with barrier.begin() as second:
                barrier.pass_(second, other)
        assert [barrier.probe(each) for each in (id_, other)] == [Answer.COMMIT] * 2

    def test_work_and_probe_race(self, barrier: Barrier) -> None:
        """Whoever is first wins, and both know."""
        for _ in range(5):
            id_ = uuid4()
            worked, answer = _together(self._working(barrier, id_), lambda id_=id_: self.reopen(barrier).probe(id_))  # type: ignore[misc]
            assert (worked, answer) in {
                ("committed", Answer.COMMIT),
                ("refused", Answer.ROLLBACK),
                ("committed", Answer.UNKNOWN),
            }
            assert barrier.probe(id_) is (Answer.COMMIT if worked == "committed" else Answer.ROLLBACK)

    def test_only_what_is_settled_goes(self, barrier: Barrier) -> None:
        """A row that still decides something stays for ever."""
        settled, other = uuid4(), uuid4()
        for id_ in (settled, other):
            with barrier.begin() as work:
                barrier.pass_(work, id_)
        assert not barrier.is_settled(settled)
        barrier.settle([settled])
        barrier.settle([settled])
        barrier.settle([])
        assert [barrier.is_settled(id_) for id_ in (settled, other, uuid4())] == [True, False, False]
        assert barrier.purge(LATER, 1000) == 0
        assert barrier.purge(timedelta(0), 1000) == 1
        assert barrier.probe(other) is Answer.COMMIT
        assert barrier.probe(settled) is Answer.ROLLBACK, "it is gone"

    @staticmethod
    def _rolled_back(barrier: Barrier, id: UUID) -> None:
        """Work that passed, and then failed."""
        with suppress(ZeroDivisionError), barrier.begin() as work:
            barrier.pass_(work, id)
            raise ZeroDivisionError

    @staticmethod
    def _working(barrier: Barrier, id: UUID) -> Callable[[], str]:
        def work() -> str:
            while True:
                try:
                    with barrier.begin() as unit:
                        barrier.pass_(unit, id)
                except RolledBack:
                    return "refused"
                except TransientStoreError:
                    continue
                return "committed"

        return work


def _together(*works: Callable[[], Any]) -> list[Any]:
    """What each answers; all begin at the same moment."""
    start = threading.Barrier(len(works))

    def beginning(work: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            start.wait(10)
            return work()

        return run

    runs = [Background(beginning(work)) for work in works]
    return [run.result(60) for run in runs]
