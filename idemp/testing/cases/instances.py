# ruff: noqa: S101, PLR2004, PT012 - this module is made of assertions
"""Cases of the store port: other instances on the same data, at once and later, and COMMITs that fail."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from idemp.errors import IdentityChanged, StoreError
from idemp.inbox.port import Identity, Mark, Verdict
from idemp.testing.cases.store import StoreSuite
from idemp.testing.store_bench import LEASE, MESSAGE_TYPE, RELAY_AFTER, Background, Bench, make_outputs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from uuid import UUID

    from idemp.messages import Output


class InstanceCases(StoreSuite):
    """What instances that are open at once, or one after the other, owe each other."""

    def test_another_instance_sees_what_was_committed(self, bench: Bench) -> None:
        """Claim, outputs, confirms, starts and effects; one that was open before as well as one that is opened now."""
        claim, outputs = bench.claim(), make_outputs(3)
        with self.another(bench) as earlier:
            bench.handle(claim, outputs, effect="sale")
            bench.store.record([Mark(claim, (outputs[1].id,))])
            bench.store.note_start(bench.consumer, claim.id.key)
            with self.another(bench) as later:
                for starts, other in enumerate((earlier, later), 1):
                    found = other.look(claim)
                    assert (found.verdict, [stored.output for stored in found.outputs]) == (Verdict.DUPLICATE, outputs)
                    assert other.pending(claim) == [outputs[0].id, outputs[2].id]
                    assert other.store.note_start(other.consumer, claim.id.key) == starts
                    other.counted("sale", 1)

    def test_failed_commit_is_told_and_leaves_nothing(self, bench: Bench) -> None:
        """Nobody acks what was not committed: neither a handling nor marks. Where COMMIT can't fail, its process ends."""
        claim, handled, outputs = bench.claim(), bench.claim(), make_outputs(2)
        bench.handle(handled, outputs)
        failing = self.failing_commits(bench.store)
        with pytest.raises(Exception) as raised, bench.store.begin([claim]) as unit:  # noqa: PT011 - the driver's own
            unit.claim(claim)
            bench.effects.write(unit, "sale")
            unit.store_outputs(claim, make_outputs(1), RELAY_AFTER)
            if failing is None:
                raise ZeroDivisionError
            with failing:
                unit.commit()
        assert failing is None or bench.store.translate(raised.value) is not None, f"not a store's: {raised.value!r}"
        with self.another(bench) as other:
            other.counted("sale", 0)
            assert other.look(claim).verdict is Verdict.CLAIMED
            expected = [output.id for output in outputs]
            if self._recorded(bench, Mark(handled, (outputs[0].id,))):
                del expected[0]
            assert other.pending(handled) == expected
            assert bench.handle(claim, effect="sale").verdict is Verdict.CLAIMED
            other.counted("sale", 1)

    def test_marks_made_at_once_all_count(self, bench: Bench) -> None:
        """Two processes record confirms of one handling: none is lost to the other's."""
        claim, outputs, start = bench.claim(), make_outputs(10), threading.Barrier(2)
        bench.handle(claim, outputs)

        def recording(recorder: Bench, own: Sequence[Output]) -> Callable[[], None]:
            def run() -> None:
                start.wait(self.patience)
                for output in own:
                    recorder.repeat(lambda: recorder.store.record([Mark(claim, (output.id,))]))  # noqa: B023 - at once

            return run

        with self.another(bench) as other:
            running = [Background(recording(bench, outputs[::2])), Background(recording(other, outputs[1::2]))]
            for recorder in running:
                recorder.result(self.patience)
            assert other.pending(claim) == []

    def _recorded(self, bench: Bench, mark: Mark) -> bool:
        """Whether the store says so, while its COMMITs fail if they can."""
        failing = self.failing_commits(bench.store)
        if failing is None:
            return False
        try:
            with failing:
                bench.store.record([mark])
        except StoreError:
            return False
        return True


class InstanceRelayCases(StoreSuite):
    """The same for what relays ask for."""

    def test_relays_of_two_instances_share_their_work(self, bench: Bench) -> None:
        """Leases, quarantine and heartbeats are those of the data, not of a process."""
        claim, outputs = bench.claim(), make_outputs(2)
        with self.another(bench) as other:
            mine, theirs = bench.store.upkeep, other.store.upkeep
            bench.handle(claim, outputs)
            assert theirs.pending_count() == 2
            bench.clock.advance(RELAY_AFTER)
            (first,) = (item.output for item in mine.take_pending(1, LEASE))
            assert [item.output for item in theirs.take_pending(10, LEASE)] == [one for one in outputs if one != first]
            mine.quarantine({first.id: "returned: no queue"})
            assert theirs.pending_state().quarantined == 1
            assert theirs.release_quarantined([first.id]) == 1
            theirs.settle_pending([one.id for one in outputs if one != first], {}, timedelta(0))
            assert bench.pending(claim) == [first.id]
            mine.beat("relay", relay=True, consumers=[])
            assert theirs.relay_alive()

    def test_relays_never_get_the_same(self, bench: Bench) -> None:
        """Two of them take at once, again and again."""
        outputs, start = make_outputs(24), threading.Barrier(2)
        bench.handle(bench.claim(), outputs)
        bench.clock.advance(RELAY_AFTER)

        def relaying(relay: Bench) -> Callable[[], list[UUID]]:
            def run() -> list[UUID]:
                start.wait(self.patience)
                taken: list[UUID] = []
                while found := relay.repeat(lambda: relay.store.upkeep.take_pending(3, LEASE)):
                    taken += [item.output.id for item in found]
                return taken

            return run

        with self.another(bench) as other:
            running = [Background(relaying(bench)), Background(relaying(other))]
            taken = [id_ for relay in running for id_ in relay.result(self.patience)]
        taken += [item.output.id for item in bench.store.upkeep.take_pending(24, LEASE)]  # both had let the other pass
        assert sorted(taken) == sorted(output.id for output in outputs)


class InstanceUpkeepCases(StoreSuite):
    """The same for what cleaner and workers ask for."""

    def test_windows_and_identities_are_known_to_others(self, bench: Bench) -> None:
        """How long the consumer consumed, and what its messages were identified by."""
        window, claim = timedelta(minutes=5), bench.claim()
        bench.consume(timedelta(0))
        self.handled(bench, claim)
        bench.agree(Identity(MESSAGE_TYPE, "field:number"), window)
        bench.consume(window + timedelta(seconds=1))
        with self.another(bench) as other:
            assert other.store.upkeep.late_before(bench.consumer, window) == bench.clock.now() - window
            if self.outlives_process:
                with pytest.raises(IdentityChanged, match="field:number"):
                    other.agree(Identity(MESSAGE_TYPE, "field:name"), window)
            assert other.store.upkeep.purge(bench.consumer, {MESSAGE_TYPE: window}, 10) == 1
        assert bench.look(claim).verdict is Verdict.CLAIMED

    def test_nobody_sees_half_of_a_handling(self, bench: Bench) -> None:
        """Whoever looks while others commit finds an effect with its outputs, or neither."""
        ended = threading.Event()
        with self.another(bench) as other:

            def watch() -> int:
                looks = 0
                while not ended.is_set():
                    before = other.store.upkeep.pending_count()
                    effects: int | None = other.effects.count("sale")
                    after = other.store.upkeep.pending_count()
                    assert effects is None or before <= effects <= after, (before, effects, after)
                    looks += 1
                return looks

            watcher = Background(watch)
            try:
                for _ in range(10):
                    bench.handle(bench.claim(), make_outputs(1), effect="sale")
                    if not watcher.running:  # it saw one
                        break
            finally:
                ended.set()
            assert watcher.result(self.patience)
