"""All orders in which workers claim one id while its day gets tables, loses them or is given up: it is new once.

A table is that of the id's day, that of late ids, or the plain one; a worker remembers one of them. A claim is open until it
is committed, and holds a lock on its table meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

PLAIN, DAY, LATE = "plain", "day", "late"
WORKERS: Final = 3


@dataclass(frozen=True, slots=True)
class World:
    """The database, and what each worker remembers.

    Attributes:
        home: the table that the layout says.
        guarded: whether the plain inbox refuses ids of the day.
        tables: which there are.
        open: those with a claim that is not committed.
        claims: those with one that is.
        young: whether a committed claim is within its window.
        twice: whether one was committed while another was within its window.
        remembered: by worker.
        passed: what operator and cleaner did, each once.
    """

    home: str = PLAIN
    guarded: bool = False
    tables: frozenset[str] = frozenset({PLAIN})
    open: frozenset[str] = frozenset()
    claims: frozenset[str] = frozenset()
    young: bool = False
    twice: bool = False
    remembered: tuple[str, ...] = (PLAIN,) * WORKERS
    passed: frozenset[str] = frozenset()

    @property
    def homeless(self) -> bool:
        """Whether even a worker that has just looked can't claim."""
        return self.home not in self.tables or (self.home == PLAIN and self.guarded)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the code does; leave one out, and something goes wrong."""

    guards_the_plain_inbox: bool = True
    looks_for_earlier_claims: bool = True
    waits_for_open_claims_to_begin: bool = True
    lets_open_claims_keep_their_day: bool = True
    notes_that_a_day_is_gone: bool = True
    moves_what_is_young: bool = True
    ends_only_where_nothing_was_claimed: bool = True
    drops_the_days_after_the_end: bool = True
    unguards_them: bool = True


def after(world: World, rules: Rules) -> Iterator[World]:
    """What may happen next."""
    for number, table in enumerate(world.remembered):
        looked = (*world.remembered[:number], world.home, *world.remembered[number + 1 :])
        yield replace(world, remembered=looked)
        refused = table not in world.tables or (table == PLAIN and world.guarded)  # it is told, and looks
        if not refused and table not in world.claims | world.open:  # else it waits, or is a duplicate
            yield replace(world, open=world.open | {table})
    for table in world.open:
        ended = replace(world, open=world.open - {table})
        yield ended
        yield replace(
            ended, claims=world.claims | ({table} & world.tables), young=True, twice=world.twice or world.young
        )
    yield from _begun(world, rules)
    yield from _dropped(world, rules)
    yield from _given_up(world, rules)


def _begun(world: World, rules: Rules) -> Iterator[World]:
    if "begun" in world.passed or (rules.looks_for_earlier_claims and PLAIN in world.claims):
        return
    if rules.waits_for_open_claims_to_begin and PLAIN in world.open:
        return
    made, passed = world.tables | {DAY, LATE}, world.passed | {"begun"}
    yield replace(world, home=DAY, guarded=rules.guards_the_plain_inbox, tables=made, passed=passed)


def _dropped(world: World, rules: Rules) -> Iterator[World]:
    """Where its claim is past the window, or where it is young, since the id came late."""
    if world.home != DAY or "dropped" in world.passed:
        return
    if rules.lets_open_claims_keep_their_day and DAY in world.open:
        return
    home = LATE if rules.notes_that_a_day_is_gone else DAY
    passed, claims = world.passed | {"dropped"}, world.claims - {DAY}
    gone = replace(world, home=home, tables=world.tables - {DAY}, claims=claims, passed=passed)
    yield replace(gone, young=False)
    if world.young and DAY in world.claims:
        yield replace(gone, claims=claims | ({LATE} if rules.moves_what_is_young else set()))


def _given_up(world: World, rules: Rules) -> Iterator[World]:
    if world.home != DAY or "given up" in world.passed:
        return
    if rules.ends_only_where_nothing_was_claimed and DAY in world.claims:
        return
    if rules.lets_open_claims_keep_their_day and DAY in world.open:
        return
    gone = frozenset({DAY}) if rules.drops_the_days_after_the_end else frozenset()
    guarded = world.guarded and not rules.unguards_them
    passed = world.passed | {"given up"}
    yield replace(
        world, home=PLAIN, guarded=guarded, tables=world.tables - gone, claims=world.claims - gone, passed=passed
    )


def search(rules: Rules) -> set[World]:
    """All states that can be reached."""
    seen, waiting = {World()}, [World()]
    while waiting:
        for found in after(waiting.pop(), rules):
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return seen


def test_an_id_is_new_once_and_always_has_a_home() -> None:
    states = search(Rules())
    assert not any(world.twice or world.homeless for world in states)
    assert {PLAIN, DAY, LATE} == {world.home for world in states}
    assert len(states) > 100


@pytest.mark.parametrize("rule", [rule.name for rule in fields(Rules)])
def test_each_rule_is_needed(rule: str) -> None:
    assert any(world.twice or world.homeless for world in search(replace(Rules(), **{rule: False})))
