"""Real worker processes: signals, deaths, supervision."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.worker.conftest import Processes
from tests.worker.test_loop import wait_for
from tests.world import World, let_pass


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_sigterm_lets_async_handlers_finish_and_gives_the_rest_back(processes: Processes) -> None:
    world = processes.world
    world.send("1", "2", type="shop.Blocking")
    world.send("3", "4", "5")
    process = processes.start(target="tests.apps:asynchronous", IDEMP_CONCURRENCY="2")
    wait_for(lambda: {"1 began", "2 began"} <= set(processes.runs()))
    process.terminate()
    wait_for(lambda: "told" in stopping(world))
    assert process.poll() is None
    processes.go_on()
    assert process.wait(60) == 0
    assert world.effects() == {"1": 1, "2": 1}
    assert [(row.deliveries, row.holder) for row in world.rows()] == [(0, None)] * 3


@pytest.mark.parametrize("kind", ["postgresql"], indirect=True)
def test_async_handlers_are_cancelled_when_the_grace_time_is_over(processes: Processes) -> None:
    processes.world.send("slow", type="shop.Blocking")
    process = processes.start(target="tests.apps:asynchronous", IDEMP_GRACE="1s")
    wait_for(lambda: "slow began" in processes.runs())
    process.terminate()
    assert process.wait(60) == 0
    assert processes.runs() == ["slow began", "slow was cancelled"]
    assert "stopped" in processes.log().splitlines()[-1]
    assert processes.world.effects() == {}
    recovered(processes)


def test_sigterm_lets_the_handler_finish_and_gives_the_rest_back(processes: Processes) -> None:
    world = processes.world
    world.send("slow", type="shop.Blocking")
    world.send("1", "2")
    process = processes.start()
    wait_for(lambda: "slow began" in processes.runs())
    process.terminate()
    wait_for(lambda: "told" in stopping(world))
    assert process.poll() is None
    processes.go_on()
    assert process.wait(60) == 0
    assert world.effects() == {"slow": 1}
    assert [(row.deliveries, row.holder) for row in world.rows()] == [(0, None)] * 2
    assert {part for _, part in world.sent()} == {0, 1}


def stopping(world: World) -> str:
    with world.database.queue_engine.connect() as connection:
        worker = world.database.tables.worker
        return "told" if any(row.stopping for row in connection.execute(worker.select())) else ""


def test_a_second_signal_ends_at_once(processes: Processes) -> None:
    processes.world.send("slow", type="shop.Blocking")
    process = processes.start()
    wait_for(lambda: "slow began" in processes.runs())
    process.send_signal(signal.SIGINT)
    wait_for(lambda: stopping(processes.world))
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "interrupted twice" in processes.log()
    recovered(processes)


def test_a_handler_longer_than_the_grace_time_is_cut_off_and_runs_again(processes: Processes) -> None:
    processes.world.send("slow", type="shop.Blocking")
    process = processes.start(IDEMP_GRACE="0.5s")
    wait_for(lambda: "slow began" in processes.runs())
    process.terminate()
    assert process.wait(60) == 0
    assert "stopped while shop.Blocking was running" in processes.log()
    recovered(processes)


def recovered(processes: Processes) -> None:
    """Another process handles the message once."""
    processes.go_on()
    let_pass(processes.world.database, 60)
    processes.start()
    wait_for(lambda: processes.world.effects() == {"slow": 1})
    wait_for(lambda: not processes.world.rows())


@pytest.mark.parametrize("exits", [False, True])
@pytest.mark.parametrize("target", ["tests.apps:app", "tests.apps:asynchronous"])
def test_poison_is_parked_after_its_attempts_and_its_neighbours_are_handled(
    processes: Processes, exits: bool, target: str
) -> None:
    world = processes.world
    world.send(*(f"{number}" for number in range(25)))
    world.send("poison", type="shop.Poison", exits=exits)
    world.send(*(f"{number}" for number in range(25, 49)))
    deaths = 0
    process = processes.start(target=target, IDEMP_GROUP="50")
    while not done(world):
        if process.poll() is not None:
            assert process.returncode == (1 if exits else 9)
            deaths += 1
            let_pass(world.database, 60)
            process = processes.start(target=target, IDEMP_GROUP="50")
        time.sleep(0.01)
    assert world.effects() == {f"{number}": 1 for number in range(49)}
    (dead,) = world.dead()
    assert (dead["rule"], deaths, processes.runs().count("poison")) == ("poison", 5, 5)  # the first two prove nothing
    assert "3 processes ended while they handled this message and nothing else" in dead["error"]


def done(world: World) -> bool:
    rows: Any = world.rows()
    return len(rows) == 1 and rows[0].due_at is None


def test_several_processes_share_the_work_and_stop_together(processes: Processes) -> None:
    supervisor = processes.start("--processes", "2")
    processes.world.send(*(f"{number}" for number in range(40)))
    wait_for(lambda: len(processes.world.effects()) == 40)
    wait_for(lambda: len(children(supervisor)) == 2)
    os.kill(children(supervisor)[0], signal.SIGKILL)  # it is started again
    wait_for(lambda: "a worker process ended with -9: another is started" in processes.log())
    wait_for(lambda: len(children(supervisor)) == 2)
    supervisor.terminate()
    assert supervisor.wait(60) == 0, processes.log()


def test_processes_do_not_outlive_their_supervisor(processes: Processes) -> None:
    supervisor = processes.start("--processes", "2")
    wait_for(lambda: processes.log().count("consuming shop") == 2)
    pids = children(supervisor)
    supervisor.kill()
    supervisor.wait()
    wait_for(lambda: not any(map(alive, pids)))


def children(process: subprocess.Popen[str]) -> list[int]:
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("options", [[], ["--processes", "2"]])
@pytest.mark.parametrize(
    ("target", "settings", "code", "reason"),
    [
        ("tests.apps:empty", {}, 3, "the app 'empty' has no handlers"),
        ("tests.apps:nothing", {}, 3, "tests.apps has no app 'nothing'"),
        ("tests.nowhere", {}, 3, "tests.nowhere cannot be imported"),
        ("tests.apps:app", {"IDEMP_DATABASE_URL": "sqlite:////nowhere/at.db"}, 3, "does not exist: idemp db upgrade"),
        ("tests.apps:app", {"IDEMP_DATABASE_URL": "oracle://x:secret@y/z"}, 3, "the database cannot be used"),
        ("tests.apps:app", {"IDEMP_BROKER_URL": "redis://x:secret@y/z"}, 3, "is not supported: use sql://"),
        ("tests.apps:app", {"IDEMP_LEASE": "soon"}, 3, "is not a duration"),
    ],
)
def test_a_refused_configuration_ends_with_its_reason(
    processes: Processes, options: list[str], target: str, settings: dict[str, str], code: int, reason: str
) -> None:
    process = processes.start(*options, target=target, **settings)
    assert process.wait(60) == code
    assert reason in processes.log()
    assert "secret" not in processes.log()
    assert "Traceback" not in processes.log()
