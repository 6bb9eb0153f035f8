"""What all verbs share: their common options, and how an error becomes a message and an exit code."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from typer.core import TyperGroup

from idemp.cli import logs
from idemp.cli.exits import ExitCode
from idemp.cli.screen import Screen, report_error
from idemp.durations import parse_duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

__all__ = [
    "Broker",
    "BrokerName",
    "Commands",
    "Consumer",
    "Database",
    "Limit",
    "Prefix",
    "Schema",
    "Screen",
    "TypeName",
    "group",
    "verb",
    "window_of",
]

Database = Annotated[str | None, typer.Option("--database", metavar="URL", help="Database with the inbox.")]
Broker = Annotated[str | None, typer.Option("--broker", metavar="URL", help="Broker.")]
BrokerName = Annotated[str | None, typer.Option("--broker-name", help="Name of the broker in the database.")]
Schema = Annotated[str | None, typer.Option("--schema", help="Database schema of idemp's tables.")]
Prefix = Annotated[str | None, typer.Option("--prefix", help="Prefix of idemp's tables.")]
Limit = Annotated[int, typer.Option("--limit", min=1, help="At most so many.")]
Consumer = Annotated[str | None, typer.Option("--consumer", help="Only this consumer's.")]
TypeName = Annotated[str | None, typer.Option("--type", help="Only messages of this type.")]

_LogLevel = Literal["debug", "info", "warning", "error", "critical"]
_COMMON: Final[dict[str, tuple[Any, Any]]] = {
    "json_mode": (Annotated[bool, typer.Option("--json", help="Print JSON; errors, too.")], False),
    "with_traceback": (Annotated[bool, typer.Option("--traceback", help="Show where an error came from.")], False),
    "log_level": (Annotated[_LogLevel | None, typer.Option("--log-level", help="How much to log to stderr.")], None),
    "log_json": (Annotated[bool, typer.Option("--log-json", help="Log JSON objects, one a line.")], False),
}


class Commands(TyperGroup):
    """The root command: every error ends here."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit."""
        given = list(sys.argv[1:] if args is None else args)
        json_mode = "--json" in given
        # With --json a wrong command line is told as JSON, too.
        alone = standalone_mode and not json_mode
        try:
            code = super().main(given, prog_name or "idemp", complete_var, alone, windows_expand_args, **extra)
        except typer.Abort:  # standing alone, it is told already
            wrong = {"kind": "Aborted", "message": "Nobody said yes. Say --yes.", "exit_code": int(ExitCode.FAILED)}
            print("\n" + json.dumps({"error": wrong}), file=sys.stderr)  # noqa: T201 - the question has no end of line
            sys.exit(ExitCode.FAILED)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it was: one message, and the exit code for it
            describe = getattr(error, "format_message", None)
            if describe is not None:
                wrong = {"kind": "UsageError", "message": describe(), "exit_code": int(ExitCode.USAGE)}
                print(json.dumps({"error": wrong}), file=sys.stderr)  # noqa: T201
                sys.exit(ExitCode.USAGE)
            sys.exit(report_error(error, json_mode=json_mode, with_traceback="--traceback" in given))
        sys.exit(code if isinstance(code, int) else ExitCode.OK)


def verb(
    group: typer.Typer, name: str, *, log_level: str = "warning"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a command. It gets a `Screen` first; the common options are added to its own.

    Args:
        group: the group that it belongs to.
        name: the verb.
        log_level: what is logged unless `--log-level` says otherwise.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        common = [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (annotation, default) in _COMMON.items()
        ]

        @functools.wraps(function)
        def run(**values: Any) -> None:
            given = {option: values.pop(option) for option in _COMMON}
            logs.set_up(given["log_level"] or log_level, json_lines=given["log_json"])
            function(Screen(json_mode=given["json_mode"]), **values)

        positional = [item.replace(kind=inspect.Parameter.KEYWORD_ONLY) for item in own]
        run.__signature__ = inspect.Signature([*positional, *common])  # type: ignore[attr-defined]
        run.__annotations__ = {item.name: item.annotation for item in (*own, *common)}
        group.command(name)(run)
        return function

    return register


def group(name: str, help: str) -> typer.Typer:
    """A group of verbs."""
    return typer.Typer(name=name, help=help, no_args_is_help=True, rich_markup_mode=None, add_completion=False)


def window_of(text: str | None) -> timedelta | None:
    """What an option for a retention window says.

    Raises:
        typer.BadParameter: it is no duration.

    Example:
        >>> window_of("7d"), window_of(None)
        (datetime.timedelta(days=7), None)
    """
    if text is None:
        return None
    try:
        return parse_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
