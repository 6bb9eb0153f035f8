"""Fault plans: which fault fires where, and the files by which test and tasks agree on how often it did.

A session has one folder of faults. Its file `current` names the plan in force; each plan is a folder of its own with
`plan.json`, and one file for each time that a fault fired, linked to its name before the fault happens: only one task can do
that, and the file is whole from its first moment. So the count is right, whatever dies then and however many tasks come
to the same place at once.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

How = Literal["raise", "exit", "kill", "freeze", "kill executor", "kill driver"]
When = Literal["before begin", "before commit", "after commit"]

FAULTS: Final = "IDEMP_SPARK_FAULTS"
"""The variable that names a session's folder of faults to its Python workers."""
DRIVER: Final = "IDEMP_SPARK_DRIVER"
"""The variable that names the process group of a driver that may be killed."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to a task, where, and how often. Limits that are left out hold for all.

    Args:
        how: `raise` an exception that nothing catches; `exit`, the Python worker is gone without a word; `kill` it by
            SIGKILL; `freeze` it, as a host does that is cut off: its transaction and its locks stay; `kill executor` or
            `kill driver`, with all that it runs.
        when: before a transaction of a chunk begins, before its COMMIT, or after it; for the atomic sink, whose tasks handle
            nothing, a transaction that stages messages.
        times: how often at most, in all tasks together.
        partition: only in this partition.
        attempt: only in this attempt of a task, from 0; a speculative copy is an attempt, too.
        transaction: only at the n-th that a task commits, from 1. A chunk has one, and more where a row fails or is alone.

    Raises:
        ValueError: there is no such fault, or no such place.

    Example:
        >>> Fault("kill", "after commit", attempt=0)
        Fault(how='kill', when='after commit', times=1, partition=None, attempt=0, transaction=None)
        >>> Fault("sleep", "after commit")
        Traceback (most recent call last):
        ...
        ValueError: There is no fault 'sleep'; they are raise, exit, kill, freeze, kill executor, kill driver.
    """

    how: How
    when: When
    times: int = 1
    partition: int | None = None
    attempt: int | None = None
    transaction: int | None = None

    def __post_init__(self) -> None:
        for given, known, what in ((self.how, How, "fault"), (self.when, When, "place")):
            if given not in get_args(known):
                raise ValueError(f"There is no {what} {given!r}; they are {', '.join(get_args(known))}.")
        if self.times < 1:
            raise ValueError("A fault fires at least once: times=1.")

    def concerns(self, place: Place) -> bool:
        """Whether it is meant for this place.

        Example:
            >>> place = Place("before commit", 0, 5, 0, transaction=1, pid=41, executor=40)
            >>> Fault("exit", "before commit", transaction=2).concerns(place)
            False
        """
        limits = (
            (self.partition, place.partition),
            (self.attempt, place.attempt),
            (self.transaction, place.transaction),
        )
        return self.when == place.when and all(limit in {None, actual} for limit, actual in limits)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a task is: what a fault was found to fire at.

    Attributes:
        when: before or after what.
        stage: Spark's number of the stage.
        partition: of the task.
        attempt: of the task, from 0.
        transaction: which of those that the task commits, from 1.
        pid: of the Python worker.
        executor: process id of the JVM that it works for.
    """

    when: When
    stage: int
    partition: int
    attempt: int
    transaction: int
    pid: int
    executor: int


@dataclass(frozen=True, slots=True)
class Fired:
    """A fault that happened.

    Attributes:
        fault: which.
        place: where.
    """

    fault: Fault
    place: Place


class Plan:
    """The faults in force, as their folder says.

    Args:
        folder: the plan's own.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     plan = Plan.put(Path(folder), [Fault("kill", "after commit")])
        ...     place = Place("after commit", 0, 0, 0, 1, pid=41, executor=40)
        ...     Plan.current(Path(folder)).due(place), plan.due(place), len(plan.fired())
        (Fault(how='kill', when='after commit', ...), None, 1)
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.faults = [Fault(**each) for each in json.loads((folder / "plan.json").read_text())]

    @classmethod
    def put(cls, session: Path, faults: Sequence[Fault]) -> Plan:
        """Put faults into force in a session's folder, instead of those before."""
        folder = session / uuid.uuid4().hex
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps([asdict(fault) for fault in faults]))
        _replace(session / "current", folder.name)
        return cls(folder)

    @classmethod
    def current(cls, session: Path) -> Plan | None:
        """What is in force in a session's folder."""
        try:
            return cls(session / (session / "current").read_text())
        except FileNotFoundError:
            return None

    def lift(self) -> None:
        """No fault of it fires any more, unless another one is in force by now."""
        current = self.folder.parent / "current"
        with suppress(FileNotFoundError):
            if current.read_text() == self.folder.name:
                current.unlink()

    def due(self, place: Place) -> Fault | None:
        """The fault that fires here and now, which is recorded."""
        for number, fault in enumerate(self.faults):
            if fault.concerns(place) and any(self._claim(number, time, place) for time in range(fault.times)):
                return fault
        return None

    def fired(self) -> list[Fired]:
        """What happened so far, by fault."""
        records = sorted(self.folder.glob("fired.*"))
        return [Fired(self.faults[int(file.name.split(".")[1])], Place(**_read(file))) for file in records]

    def _claim(self, number: int, time: int, place: Place) -> bool:
        part = self.folder / f"part.{place.pid}"
        part.write_text(json.dumps(asdict(place)))
        try:
            (self.folder / f"fired.{number:03}.{time:03}").hardlink_to(part)
        except FileExistsError:
            return False
        finally:
            part.unlink()
        return True


def _replace(file: Path, text: str) -> None:
    part = file.with_name(f"{file.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(file)


def _read(file: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(file.read_text())
    return read
