"""SIGKILL of real processes at each crash point; the judge reads tables and queues only."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from idemp.testing import CrashPoints
from tests.world import Order, World, insert_and_send

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.world"])


def some(points: list[str], every: int, first: int = 0) -> list[tuple[int, str]]:
    """Return every third point, say, from the first one on, with its number; `IDEMP_TEST_EVERY=1` takes all."""
    return list(enumerate(points))[first % every :: every] if "IDEMP_TEST_EVERY" not in os.environ else list(enumerate(points))


def insert_send_and_fail_once(message: Order, ctx: Any) -> None:
    insert_and_send(message, ctx)
    if ctx.attempt == 1:
        raise RuntimeError("not yet")


HANDLERS = {"handled": insert_and_send, "failing once": insert_send_and_fail_once}


def work_and_die(url: str, story: str, at: int | None, names: Any) -> None:
    """The body of a process."""

    def kill(name: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    points = CrashPoints(at, kill)
    world = World(url, HANDLERS[story])
    world.work(world.worker(points))
    names.put(points.names)


def run_until(at: int | None, live: Callable[..., None], *arguments: Any) -> list[str]:
    """Run a process that is killed at a crash point; or to its end, and return the names of the crash points."""
    names = processes.SimpleQueue()
    process = processes.Process(target=live, args=(*arguments, at, names))
    process.start()
    found: list[str] = names.get() if at is None else []
    process.join(60)
    names.close()
    assert process.exitcode == (0 if at is None else -signal.SIGKILL), at
    return found


@pytest.mark.parametrize("story", HANDLERS)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_process_is_killed_at_each_crash_point(new_url: Callable[[], str], story: str) -> None:
    def begin() -> World:
        world = World(new_url(), HANDLERS[story])
        world.send("1", "2", "1")
        return world

    calm = begin()
    names = run_until(None, work_and_die, calm.url, story)
    assert len(names) > 15
    assert calm.effects() == {"1": 1, "2": 1}
    calm.close()
    for at, name in some(names, 2 if calm.url.startswith("sqlite") and story == "failing once" else 3):
        world = begin()
        run_until(at, work_and_die, world.url, story)
        world.recover()
        sent = world.sent()
        assert world.effects() == {"1": 1, "2": 1}, name
        assert set(sent) == {(id, part) for id in "12" for part in (0, 1)}, name
        assert all(len(variants) == 1 for variants in sent.values()), name
        assert (world.rows(), world.pending()) == ([], 2), name
        world.close()
