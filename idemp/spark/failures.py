"""What Spark raises when it gives up, in idemp's words."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from idemp import errors
from idemp.errors import ConfigurationError, IdempError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator

_RAISED: Final = re.compile(r"^idemp\.\w+(?:\.\w+)*\.(\w+): (.+)$", re.MULTILINE)
_OF_COMMIT: Final = re.compile(r" (?:The|Whether the) database was ")  # what follows is about one attempt only
_LONGEST: Final = 400
_OF_PYTHON: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")
_OF_JAVA: Final = re.compile(r"^(?:Caused by|): [\w.$]+: (.+?)(?=\n[ \t]*at |\nCaused by|\Z)", re.MULTILINE | re.DOTALL)
_FILE: Final = re.compile(r"Encountered error while reading file (\S+?)\.?\s")
_LOGS: Final = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")


class GivenUp(IdempError):
    """Spark gave a task up, after as many attempts as it is allowed.

    Example:
        >>> print(GivenUp("A task failed four times.", committed="unknown", fix="Run it again."))
        A task failed four times. Whether the database was committed is unknown. Run it again.
    """


_NOTHING_CHANGED: Final = "Nothing was changed."


@contextmanager
def told_plainly(*, writes: bool = True) -> Iterator[None]:
    """What a task raised, as the error that it was, instead of Spark's account of it.

    Args:
        writes: whether tasks may have committed something before.

    Raises:
        ConfigurationError, StoreError: a task met such a one.
        GivenUp: anything else; chunks that were committed stay committed.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import AnalysisException, PySparkException

    try:
        yield
    except AnalysisException:
        raise  # found before anything ran
    except (PySparkException, Py4JError) as error:
        known = _known(str(error))
        raise known if writes else type(known)(known.message, committed="no", fix=_NOTHING_CHANGED) from error


@contextmanager
def unlogged() -> Iterator[None]:
    """Without PySpark's own log of each analysis error, stack and all: for what is only tried, or told in idemp's words."""
    from pyspark.logger import PySparkLogger

    logs = [PySparkLogger.getLogger(name) for name in _LOGS]
    before = [log.disabled for log in logs]
    for log in logs:
        log.disabled = True
    try:
        yield
    finally:
        for log, disabled in zip(logs, before, strict=True):
            log.disabled = disabled


def _known(account: str) -> IdempError:
    r"""The last error of idemp's in a traceback of a task.

    Example:
        >>> type(_known("Traceback …\nidemp.errors.StoreUnavailable: It is away.\n at org.apache…")).__name__
        'StoreUnavailable'
        >>> print(_known("Job aborted due to stage failure\n at org.apache…").message)
        Spark gave up: Job aborted due to stage failure
    """
    raised = _RAISED.findall(account)
    fix = "What was committed stays: run it again, it goes on where it stopped."
    if raised:
        name, text = raised[-1]
        text = _OF_COMMIT.split(text)[0]
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, ConfigurationError):
            return kind(text)
        if isinstance(kind, type) and issubclass(kind, StoreError):
            return errors.StoreUnavailable(text, committed="unknown", fix=fix)
        return GivenUp(f"Spark gave up: {name}: {text}", committed="unknown", fix=fix)
    return GivenUp(f"Spark gave up: {cause_of(account)}", committed="unknown", fix=fix)


def cause_of(account: str, *, outermost: bool = False) -> str:
    r"""What it was, of all that Spark tells: the last error of Python's, else of Java's, else the first line.

    Args:
        account: Spark's.
        outermost: of Java's, rather the first one: of what Spark refuses it says most.

    Example:
        >>> cause_of("An error occurred while calling o7.\n: a.B: Job aborted.\n\tat c\nCaused by: d.E: No space.\n\tat f")
        'No space.'
        >>> cause_of("Job aborted: Traceback (most recent call last):\n  File ...\nKeyError: 'sku'\n SQLSTATE: 38000\n")
        "KeyError: 'sku'"
    """
    found = _OF_PYTHON.findall(account) or _OF_JAVA.findall(account)[:: -1 if outermost else 1]
    told = found[-1] if found else next((line for line in account.splitlines() if line.strip()), "no reason given")
    told = " ".join(told.split())[:_LONGEST]
    file = _FILE.search(account)
    return f"{told} (reading {file[1]})" if file is not None and file[1] not in told else told
