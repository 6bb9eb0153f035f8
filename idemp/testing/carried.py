"""Values that outlive a message and leave with it: one that another process does not have may not be sent.

What a module makes when it is imported, or a handler at its first use, is no memory as long as it stays. If such a value is
found in an output or in a row, and neither the message nor the source code says it, then a new process has to say it, too.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from idemp.testing import elsewhere
from idemp.testing.findings import Finding
from idemp.testing.memory import PLAIN_NAMES, changed, is_users, shape_of, snapshot
from idemp.testing.variations import variations

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from idemp.messages import Message
    from idemp.testing.detectors import Rehearsal, RehearsalRun
    from idemp.testing.execution import ToldOutput

_LATER: Final = timedelta(days=2, hours=3, minutes=4, seconds=5)
_LONG: Final = 6  # a value of fewer characters has to be all of a text in which it is found


class _Carried(NamedTuple):
    """A value that left: what it is, where it stands, and whether it was put there by this run."""

    text: str
    place: str
    new: bool


def of_what_is_carried(rehearsal: Rehearsal, first: RehearsalRun, name: str) -> Iterator[Finding]:
    """Ask a new process, once for each handler, whether it says the same; what is only written is kept for later."""
    harness, message = rehearsal.harness, rehearsal.message
    asked = f"{name}, of what it carries"
    if asked in harness.compared:
        return
    function = harness.registry.declared[harness.registry.find(message).message_type].function
    found, given = _carried(first, function), in_message(message)
    suspected = [each for each in found if each.text not in given and not _is_constant(each.text)]
    if not suspected:  # is it of this message, and another one finds it?
        message, suspected = _of_the_first(rehearsal, [each for each in found if each.new and each.text in given])
    if not suspected:
        return
    harness.compared.add(asked)
    answer = elsewhere.of_a_new_process(harness, message, rehearsal.moment + _LATER)
    sent = texts([], first.outputs)
    for each in suspected:
        if answer is not None and not is_said(each.text, answer["said"]):
            finding = _finding(each, name)
            harness.written.setdefault(each.text, finding)
            if is_said(each.text, sent):
                yield finding


def _finding(carried: _Carried, name: str) -> Finding:
    if carried.new:
        return Finding(
            "memory",
            name,
            f"it made {carried.text!r:.40} at its first use, keeps it in {carried.place}, and lets it out",
        )
    return Finding(
        "environment",
        name,
        f"it lets out {carried.text!r:.40} of {carried.place}, and another process has another value",
    )


def _carried(run: RehearsalRun, function: Callable[..., Any]) -> list[_Carried]:
    """The values in a function's memory that stand in what a run of it sent or wrote."""
    said, (before, after) = texts(run.seen.writes, run.outputs), run.seen.memory
    if not said:
        return []
    places = {place: (place in changed(before, after), kept.shape) for place, kept in after.items()}
    places.pop("os.environ", None)
    places |= {f"the cache of {place}": (True, shape) for place, shape in _cached(function).items()}
    found = [_Carried(text, place, new) for place, (new, shape) in places.items() for text in _leaves(shape)]
    return [each for each in found if is_said(each.text, said)]


def _of_the_first(rehearsal: Rehearsal, found: list[_Carried]) -> tuple[Message, list[_Carried]]:
    """A message with another value than the first one had, whose handling says that value all the same."""
    for value, message in variations(rehearsal.message) if found else ():
        same = [each for each in found if each.text == str(value)]
        if same:
            run, given = rehearsal.run(message=message), in_message(message)
            said = texts(run.seen.writes, run.outputs) - given
            left = [each for each in same if is_said(each.text, said)]
            if left:
                return message, left
    return rehearsal.message, []


def texts(writes: Iterable[tuple[str, Any]], outputs: Iterable[ToldOutput]) -> set[str]:
    """All values of statements and of outputs, as texts."""
    sent = {text for _, _, body, headers in outputs for text in (*in_body(body), *flat(headers))}
    return sent | {text for _, values in writes for text in flat(values)}


def in_message(message: Message) -> set[str]:
    """All values of a message, as texts."""
    return {str(message.message_id), *in_body(message.body), *flat(dict(message.headers))}


def in_body(body: bytes) -> list[str]:
    """All values of a body, as texts."""
    with suppress(ValueError):
        return list(flat(json.loads(body, parse_float=str)))
    return [body.decode(errors="replace")]


def is_said(text: str, said: Iterable[str]) -> bool:
    """Whether a value is one of some texts, or if it is long, a part of one.

    Example:
        >>> is_said("b3f2c1", ["order b3f2c1"]), is_said("7", ["17"])
        (True, False)
    """
    return any(text == each or (len(text) >= _LONG and text in each) for each in said)


def _is_constant(text: str) -> bool:
    """Whether the environment or the source code of the user's says a value: then it is the same in each process."""
    return any(text in each for each in os.environ.values()) or any(text in source for source in _sources())


def flat(value: Any) -> Iterator[str]:
    """All values in one, as texts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from flat(each)
    elif value is not None and not isinstance(value, bool):
        yield str(value).replace("T", " ")


def _leaves(shape: Any) -> Iterator[str]:
    match shape:
        case (str(name), str(text)) if name in PLAIN_NAMES:
            if text and name not in {"bool", "NoneType"}:
                yield text.replace("T", " ")
        case tuple() | frozenset():
            for each in shape:
                yield from _leaves(each)


def _cached(function: Callable[..., Any]) -> dict[str, Any]:
    """What stands in each `functools.lru_cache` that a function uses: only the garbage collector tells."""
    caches: dict[str, Any] = {}
    snapshot(function, caches)
    found = {}
    for place, cache in caches.items():
        held = [each for each in gc.get_referents(cache) if each is not vars(cache)]
        found[place] = shape_of([list(each.values()) if isinstance(each, dict) else each for each in held])
    return found


def _sources() -> Iterator[str]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and file.endswith(".py") and is_users(name):
            yield _source(file)


@functools.cache
def _source(file: str) -> str:
    with suppress(OSError, ValueError):
        return Path(file).read_text(encoding="utf-8")
    return ""
