"""Stores that mix effects up with messages, or lose sight of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from uuid import UUID

from idemp.inbox.memory import MemoryUnit
from idemp.inbox.port import Claim, PendingOutput
from idemp.messages import Output
from tests.testing.store_mutants.sound import Store, breaks


@breaks("effects_are_no_relays_affair")
class RelayTakesEffects(Store):
    """A relay publishes effects."""

    def take_pending(self, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return self._taken(lambda *_: True, limit, lease)


@breaks("effects_are_no_relays_affair")
class EffectsAfterTheGraceTime(Store):
    """Effects wait for a dispatch that never comes."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, outputs, relay_after)
            for item in self._handlings[claim.consumer, claim.id.key].sendings:
                item.due_at = self._store.clock.now() + (relay_after or timedelta(0))


@breaks("effects_of_several_handlings_and_ways_to_store")
class EffectsNeverLeftOut(Store):
    """What is kept only is run."""

    class unit(MemoryUnit):  # noqa: N801
        def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
            super().store_outputs(claim, outputs, relay_after or timedelta(0))


@breaks("effects_of_another_consumer")
class EffectsOfAll(Store):
    """Who does not know an effect gets it."""

    def take_effects(self, consumer: str, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return self._taken(lambda _, output: output.is_effect, limit, lease)


@breaks("effects_are_leased_and_settled")
class ReturnedEffectsCount(Store):
    """What was never run has an attempt less."""

    def return_effects(self, effects: Mapping[UUID, str], retry_in: timedelta) -> None:
        self.settle_pending([], effects, retry_in)


@breaks("effects_are_leased_and_settled")
class EffectsWithoutLease(Store):
    """Two processes run an effect side by side."""

    def take_effects(self, consumer: str, limit: int, lease: timedelta) -> Sequence[PendingOutput]:
        return super().take_effects(consumer, limit, timedelta(0))


@breaks("effects_in_quarantine")
class QuarantinedEffectsRun(Store):
    """What was given up is run all the same."""

    def quarantine(self, outputs: Mapping[UUID, str]) -> None:
        self.settle_pending([], outputs, timedelta(days=1))


@breaks("announcing_effects_wakes_who_runs_them")
class EffectsOnlyPolled(Store):
    """Nobody is told of effects."""

    def announce_effects(self) -> None:
        pass


@breaks("announcing_effects_wakes_who_runs_them")
class RelaysWakeRunners(Store):
    """Each message wakes who runs effects."""

    def announce_pending(self) -> None:
        super().announce_effects()
