"""`idemp doctor`: all start-up checks of a worker, and counts of waiting messages and outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Annotated, Any

import typer
from sqlalchemy.exc import DBAPIError

from idemp.app import App, load_app
from idemp.cli.exits import AsJson, Exit, exits
from idemp.cli.screen import counted, fields, folded, records
from idemp.errors import ConfigurationError, Unavailable, describe_error
from idemp.ports import Finding
from idemp.settings import Settings
from idemp.sql.checks import check_tables
from idemp.sql.records.waiting import Waiting, check_waiting, read_waiting

__all__ = ["doctor"]

Pairs = list[tuple[str, object]]


class _EnoughError(Exception):
    """A red finding after which no further check is possible."""


def doctor(
    target: Annotated[
        str | None, typer.Argument(help="module:app, whose policies and queue are checked, too.", metavar="MODULE:APP")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check tables, privileges, server settings, clocks and queues, and count waiting messages; exit code 1 if a finding is red.

    Declares the queue of the app if it does not exist, as a worker does.
    """
    with exits():
        app = load_app(target) if target else App("doctor", settings=Settings())
        findings, waiting = _look(app, {app.name: f"idemp worker {target}"} if target else {})
    if as_json:
        report = {"findings": [asdict(finding) for finding in findings], "waiting": waiting and waiting.as_dict()}
        print(json.dumps(report, indent=2))
    else:
        print(_screen(findings, waiting))
    if any(finding.level == "red" for finding in findings):
        raise SystemExit(Exit.FAILED)


def _look(app: App, commands: dict[str, str]) -> tuple[list[Finding], Waiting | None]:
    findings: list[Finding] = []

    def judge(some: Sequence[Finding]) -> None:
        findings.extend(some)
        if any(finding.level == "red" for finding in some):
            raise _EnoughError

    try:
        with closing(app.open(judge=judge)) as parts:
            if app.handlers:
                judge(parts.broker.declare(app.name, sorted(app.handlers)))
    except _EnoughError:
        pass
    except ConfigurationError as error:
        findings.append(Finding("red", str(error), "correct the named setting"))
    except Unavailable as error:
        findings.append(Finding("red", describe_error(error), "start the broker, or set IDEMP_BROKER_URL"))
    database = app.database()
    try:
        waiting = None if check_tables(database) else read_waiting(database, app.settings.lease)
    except DBAPIError:
        if not findings:
            raise
        return findings, None  # a privilege may be missing
    finally:
        database.close()
    return findings + (check_waiting(waiting, commands) if waiting else []), waiting


def _screen(found: Sequence[Finding], waiting: Waiting | None) -> str:
    pairs: Pairs = []
    for each in sorted(found, key=lambda finding: finding.level):
        level, *rest = [*folded(each.text), *each.fix.splitlines()]
        pairs += [(each.level, level), *(("", line) for line in rest)]
    blocks = [fields(pairs) if pairs else "no findings"]
    if waiting is not None:
        alive = ", ".join(counted(number, role) for role, number in sorted(waiting.alive.items())) or "none"
        overdue = f", due for {waiting.overdue} s" if waiting.overdue else ""
        quarantined = f", {waiting.quarantined} in quarantine" if waiting.quarantined else ""
        blocks.append(fields([("alive", alive), ("outputs", f"{waiting.pending} pending{overdue}{quarantined}")]))
        rows: list[dict[str, Any]] = [
            {**asdict(queue), "name": queue.name, "overdue": f"{queue.overdue} s"} for queue in waiting.queues
        ]
        blocks += [records(rows)] if rows else []
    return "\n\n".join(blocks)
