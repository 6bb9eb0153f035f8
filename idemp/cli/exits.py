"""The exit codes of `idemp`, in this one place."""

from __future__ import annotations

import enum
from typing import Final

from idemp.errors import (
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    IdempError,
    StoreError,
    StoreUnavailable,
)


class ExitCode(enum.IntEnum):
    """What a process of `idemp` answers to whoever started it.

    Example:
        >>> int(ExitCode.UNREACHABLE)
        4
    """

    OK = 0
    FAILED = 1
    USAGE = 2
    REFUSED = 3
    UNREACHABLE = 4
    UNEXPECTED = 5
    FINDINGS = 6
    INTERRUPTED = 130


MEANINGS: Final = {
    ExitCode.OK: "success",
    ExitCode.FAILED: (
        "a check failed, something was not found, messages were parked, a spool is full, transactions are left in doubt, or "
        "the demo's promise broke"
    ),
    ExitCode.USAGE: "wrong command line",
    ExitCode.REFUSED: "the configuration was refused: settings, tables, guarantees or identities",
    ExitCode.UNREACHABLE: "the database or the broker can't be reached",
    ExitCode.UNEXPECTED: "anything unexpected",
    ExitCode.FINDINGS: "a reconciliation found something",
    ExitCode.INTERRUPTED: "interrupted from the keyboard, or told twice to stop",
}


class NotFound(IdempError):
    """There is nothing of that name."""

    says_committed = False


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit code of an error that ended a command.

    Example:
        >>> exit_code_of(StoreUnavailable("The database is away.")).name, exit_code_of(ValueError()).name
        ('UNREACHABLE', 'UNEXPECTED')
    """
    match error:
        case ConfigurationError():
            return ExitCode.REFUSED
        case StoreUnavailable() | BrokerUnavailable():
            return ExitCode.UNREACHABLE
        case StoreError() | BrokerError() | NotFound():
            return ExitCode.FAILED
    return ExitCode.UNEXPECTED


def exit_codes_text() -> str:
    """The table for `--help`.

    Example:
        >>> exit_codes_text().splitlines()[0]
        'Exit codes: 0 success;'
    """
    lines = [f"{int(code)} {meaning}" for code, meaning in MEANINGS.items()]
    return "Exit codes: " + ";\n".join(lines) + "."
