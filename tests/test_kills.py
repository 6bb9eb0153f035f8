"""SIGKILL of real processes at each crash point; the judge reads tables and queues only."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import pytest

from idemp.testing import CrashPoints
from tests.world import Order, World, insert_and_send

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.world"])


def some(every: int, first: int = 0) -> Iterator[int]:
    """Return the number of every third crash point, say, from the first one on; `IDEMP_TEST_EVERY=1` takes all.

    There is no last one: how many points a run has depends on how fast its machine is, so the run that is not stopped ends the loop.
    """
    every = 1 if "IDEMP_TEST_EVERY" in os.environ else every
    return count(first % every, every)


def insert_send_and_fail_once(message: Order, ctx: Any) -> None:
    insert_and_send(message, ctx)
    if ctx.attempt == 1:
        raise RuntimeError("not yet")


HANDLERS = {"handled": insert_and_send, "failing once": insert_send_and_fail_once}


def work(points: CrashPoints, url: str, story: str) -> None:
    world = World(url, HANDLERS[story])
    world.work(world.worker(points))


def run_until(at: int, live: Callable[..., None], *arguments: Any) -> str:
    """Run a process that is killed at a crash point; return the name of the point, or "" if the process has ended before it."""
    names = processes.SimpleQueue()
    process = processes.Process(target=_live, args=(at, names, live, *arguments))
    process.start()
    process.join(120)
    name: str = "" if names.empty() else names.get()
    names.close()
    assert process.exitcode == (-signal.SIGKILL if name else 0), (at, name)
    return name


def _live(at: int, names: Any, live: Callable[..., None], *arguments: Any) -> None:
    def kill(name: str) -> None:
        names.put(name)
        os.kill(os.getpid(), signal.SIGKILL)

    live(CrashPoints(at, kill), *arguments)


def watch(points: CrashPoints, steps: Mapping[Any, Sequence[str]]) -> None:
    """Make a point before and after each of these methods of classes."""
    for owner, names in steps.items():
        for name in names:
            setattr(owner, name, _pointed(points, name, getattr(owner, name)))


def _pointed(points: CrashPoints, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        points.reached(f"{step} before")
        result = function(*args, **options)
        points.reached(f"{step} after")
        return result

    return call


@pytest.mark.parametrize("story", HANDLERS)
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_a_process_is_killed_at_each_crash_point(new_url: Callable[[], str], kind: str, story: str) -> None:
    for at in some(2 if kind == "sqlite" and story == "failing once" else 3):
        world = World(new_url(), HANDLERS[story])
        world.send("1", "2", "1")
        name = run_until(at, work, world.url, story)
        world.recover()
        sent = world.sent()
        assert world.effects() == {"1": 1, "2": 1}, name
        assert set(sent) == {(id, part) for id in "12" for part in (0, 1)}, name
        assert all(len(variants) == 1 for variants in sent.values()), name
        assert (world.rows(), world.pending()) == ([], 2), name
        world.close()
        if not name:
            break
    assert at > 15
