"""docs/benchmarks/README.md, made of the results: tables, verdicts, and what does not reproduce."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from benchmarks import telling
from benchmarks.where import markdown

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NAMES: Final = {
    "postgresql": "PostgreSQL", "mariadb": "MariaDB", "sqlite": "SQLite",
    "rabbitmq": "RabbitMQ", "redis": "Redis", "local": "one file",
}  # fmt: skip
_INTRODUCTION: Final = """\
# Benchmarks

<!-- Written by `python -m benchmarks report` from the JSON files beside it; do not edit. -->

What idemp costs, beside what you would write without it: `make bench` measures it on your machine in about 45 minutes and
writes this page anew. Every message is parsed with pydantic, inserts one row and sends one persistent, confirmed message;
*bare* does just that, one at a time, with one transaction and one confirm each, and deduplicates nothing: a redelivery has
its effect again. All variants are connected at once and run in blocks, in random order in each round; a ratio pairs the
blocks of one round. After the last round queues and tables are counted: a variant that lost or repeated anything has no
figures. *Bound* is the value that the median's ratio keeps with 95 per cent, by a bootstrap of the rounds.
"""
_BARE_ELSEWHERE: Final = """\
On Redis *bare* is kombu's consumer and producer; on one file it is idemp's own receiver and publisher, since no other
library knows the file. Redis writes every command to the disk (`appendfsync always`), and promises less: see the
[table of brokers](../../README.md).
"""
_PEERS: Final = """\
The same work as everybody's in the same rounds: one row in PostgreSQL, one confirmed message to RabbitMQ, per message of a
queue, in a process of its own that is started once and held back until the queue is full. None of them stores what it sent
under the input's id and sends the same bytes again, which a redelivery needs whose predecessor died before its confirm came.
"""
_WHERE: Final = """\
PostgreSQL with RabbitMQ, by whose code it is; what Python's library and built-ins take counts for whoever calls them.
"""
_DESIGNS: Final = """\
What was taken, beside what could have been, in one run of its own (`python -m benchmarks designs`). *Statement by statement*
is the path of databases whose driver has no simple query protocol: bound statements through SQLAlchemy Core, a COMMIT of the
driver's own.
"""
_PURGE: Final = """\
Messages arrive at half the rate that the consumer can handle, while a cleaner in its process deletes expired claims from the
plain tables in batches, or drops a day's tables.
"""
_PURGE_HEAD: Final = ("tables", "messages/s", "p50, ms", "p99, ms", "claims deleted")
_REASONS: Final = "The reasons, as far as they are known, stand in [what does not reproduce](does-not-reproduce.md).\n"
_NOTHING: Final = "There are no results here yet: `make bench` writes them.\n"


def page(found: Mapping[str, Any]) -> str:
    """The whole page."""
    parts = [_INTRODUCTION]
    if not found:
        parts.append(_NOTHING)
    if rates := found.get("rates"):
        parts += _machine(rates)
    goals = list(_goals(found))
    if goals:
        parts += _shows(goals)
    if rates:
        parts += _rates(rates)
    for name, tell in (
        ("where", _where), ("designs", designs), ("cpu", _cpu), ("growth", _growth), ("purge", _purge),
    ):  # fmt: skip
        if name in found:
            parts += tell(found[name])
    for name, heading in telling.HEADINGS.items():
        if name in found:
            parts += _told(heading, found[name])
    parts += _missed(goals)
    return "\n".join(parts)


def real_pair(rates: Mapping[str, Any]) -> Any:
    """PostgreSQL with RabbitMQ, side by side with the consumer; `None` if it was not measured."""
    return _first(
        rates, lambda pair: (pair["database"], pair["broker"], pair["round_trip"]) == ("postgresql", "rabbitmq", 0)
    )


def far_pair(rates: Mapping[str, Any]) -> Any:
    """The pair with a database farther away."""
    return _first(rates, lambda pair: pair["round_trip"] > 0)


def _first(rates: Mapping[str, Any], wanted: Any) -> Any:
    return next((pair for pair in rates["pairs"] if pair["variants"] and wanted(pair)), None)


def pair_name(pair: Mapping[str, Any]) -> str:
    """For tables.

    Example:
        >>> pair_name({"database": "mariadb", "broker": "local", "round_trip": 0.0})
        'MariaDB x one file'
    """
    far = f", {pair['round_trip']:g} ms away" if pair["round_trip"] else ""
    return f"{NAMES[pair['database']]}{far} x {NAMES[pair['broker']]}"


def _machine(rates: Mapping[str, Any]) -> list[str]:
    machine, versions = rates["machine"], rates["versions"]
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    servers = ", ".join(f"{NAMES[name]} {version}" for name, version in rates["servers"].items())
    return [
        (
            f"Measured on {machine['cpus']} CPUs ({machine['architecture']}) with {machine['memory_gib']} GiB, "
            f"{machine['system']}, shared by all servers and consumers; Python {machine['python']}, {told}; {servers}. "
            "Read rates as ratios: another machine has other ones.\n"
        )
    ]


# What it shows -------------------------------------------------------------------------------------------------------


def _goals(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Whatever has a target or a prototype to be held against."""
    for pair in (found.get("rates") or {"pairs": []})["pairs"]:
        for show in pair["shows"]:
            if show["target"] or show["prototype"]:
                yield {"where": pair_name(pair), **show}
    for name, figures in (found.get("cpu") or {"databases": {}})["databases"].items():
        early = figures["early"]
        if early.get("target"):
            yield {
                "where": f"{NAMES[name]}, in memory",
                "name": "CPU of bare / that of idemp",
                "prototype": None,
                **early,
            }
    for inbox in (found.get("growth") or {"inboxes": []})["inboxes"]:
        for name, what in (("throughput", "throughput"), ("wal", "log bytes a message")):
            if inbox[name]["target"]:
                where = f"{found['growth']['rows']:,} rows / none, {inbox['keys']} ids"
                yield {"where": where, "name": what, "at_most": name == "wal", "prototype": None, **inbox[name]}
    for each in (found.get("purge") or {"layouts": []})["layouts"]:
        where = f"{found['purge']['rows']:,} expired rows, {each['layout']} tables"
        yield {"where": where, "name": "p99 while purging / else", "at_most": True, "prototype": None, **each["p99"]}
    yield from telling.goals(found)


def _shows(goals: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = []
    for goal in goals:
        at_most = goal.get("at_most") or goal.get("measure") == "cpu"
        bound = goal["upper_bound" if at_most else "lower_bound"]
        sign = "≤" if at_most else "≥"
        target = f"{sign} {goal['target']:g}: {goal['target_verdict']}" if goal["target"] else ""
        prototype = f"{goal['prototype']:g}: {goal['prototype_verdict']}" if goal["prototype"] else ""
        unit = " µs" if goal.get("measure") == "cpu" else ""
        rows.append((goal["where"], goal["name"], f"{_spread(goal)}{unit}", f"{bound:.2f}", target, prototype))
    return [
        "## What it shows\n",
        "A *prototype* was measured before idemp was written, on another run of another machine: a map, not a promise.\n",
        _table(("where", "what", "median (quartiles)", "bound", "target", "prototype"), rows),
    ]


def _missed(goals: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [
        (goal["where"], goal["name"], f"{goal[kind]:g}", f"{goal['median']:.2f}")
        for goal in goals
        for kind in ("target", "prototype")
        if goal.get(f"{kind}_verdict") == "not reached"
    ]
    told = [_table(("where", "what", "was to be", "is"), rows)] if rows else []
    return ["## What does not reproduce\n", *told, _REASONS]


# Rates ---------------------------------------------------------------------------------------------------------------


def _rates(rates: Mapping[str, Any]) -> list[str]:
    real, parts = real_pair(rates), []
    if real:
        variants = {name: each for name, each in real["variants"].items() if not name.startswith("limit:")}
        limits = {name: each for name, each in real["variants"].items() if name.startswith("limit:")}
        own = {name: each for name, each in variants.items() if name not in rates["peers"]}
        parts += ["## PostgreSQL and RabbitMQ\n", "![throughput](throughput.svg)\n", _variants(own), *_failed(real)]
        parts += ["## Peers\n", _PEERS, _peers(rates["peers"], variants, real["failed"])]
        if limits:
            parts += ["## Limits, in the same rounds\n", _limits(limits)]
    if far := far_pair(rates):
        parts += [f"## {far['round_trip']:g} ms to the database\n", _variants(far["variants"]), *_failed(far)]
    others = [pair for pair in rates["pairs"] if pair["variants"] and pair not in (real, far)]
    if others:
        parts += ["## Other databases and brokers\n", _BARE_ELSEWHERE, "![across](across.svg)\n", _across(others)]
    rest = [pair for pair in rates["pairs"] if pair not in (real, far)]
    return [*parts, *(line for pair in rest for line in _failed(pair))]


def _variants(variants: Mapping[str, Any]) -> str:
    rows = [
        (name, _spread(each), f"{each['messages_per_second']:,.0f}", f"{each['cpu_microseconds']:.0f}")
        for name, each in variants.items()
    ]
    return _table(("variant", "times as fast as bare (quartiles)", "messages/s", "CPU µs a message"), rows)


def _limits(limits: Mapping[str, Any]) -> str:
    rows = [
        (name.removeprefix("limit: "), f"{each['messages_per_second']:,.0f}", f"{each['cpu_microseconds'] or '':}")
        for name, each in limits.items()
    ]
    return _table(("limit", "a second", "CPU µs of the client"), rows)


def _peers(peers: Mapping[str, Any], variants: Mapping[str, Any], failed: Mapping[str, str]) -> str:
    rows = []
    for name, peer in peers.items():
        version = ", ".join(f"{package} {each}" for package, each in peer["versions"].items())
        figure = variants.get(name)
        figures = (
            (_spread(figure), f"{figure['messages_per_second']:,.0f}") if figure else (failed.get(name, "not run"), "")
        )
        rows.append((f"{name} ({version})", *figures, peer["promises"], peer["settings"]))
    return _table(("peer", "times as fast as bare (quartiles)", "messages/s", "promises", "set up as"), rows)


def _across(pairs: Sequence[Mapping[str, Any]]) -> str:
    names = list(dict.fromkeys(name for pair in pairs for name in pair["variants"] if name != "bare"))
    rows = [
        (
            pair_name(pair),
            f"{pair['variants']['bare']['messages_per_second']:,.0f}",
            *(_spread(pair["variants"][name]) if name in pair["variants"] else "" for name in names),
        )
        for pair in pairs
    ]
    return _table(("", "bare, messages/s", *names), rows)


def _failed(pair: Mapping[str, Any]) -> list[str]:
    return [f"No figures for *{name}* on {pair_name(pair)}: {reason}\n" for name, reason in pair["failed"].items()]


# The others ----------------------------------------------------------------------------------------------------------


def _cpu(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (NAMES[database], variant, _spread(each), f"{each['cpu_microseconds']:.0f}")
        for database, figures in found["databases"].items()
        for variant, each in figures.items()
    ]
    return [
        "## CPU time of the protocol alone\n",
        "One thread and a broker in memory; SQLite with `synchronous=OFF`. *Bare* publishes into memory, too.\n",
        _table(("database", "variant", "bare's CPU / its own (quartiles)", "CPU µs a message"), rows),
    ]


def _growth(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"{inbox['keys']}, {inbox['layout']}",
            _spread(inbox["throughput"]),
            _spread(inbox["wal"]),
            f"{inbox['wal_bytes']['empty']:,} / {inbox['wal_bytes']['full']:,}",
            ", ".join(f"{table} {each:.0f}" for table, each in inbox["bytes_per_row"].items()),
        )
        for inbox in found["inboxes"]
    ]
    return [
        f"## Growth: {found['rows']:,} handlings beside none\n",
        "PostgreSQL, each block after a checkpoint, which is the worst case for the log.\n",
        _table(
            ("ids, layout", "throughput", "log", "log bytes a message, empty / full", "bytes a row with indexes"), rows
        ),
    ]


def _purge(found: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            f"{each['layout']}, {name}",
            f"{each['messages_per_second']:,.0f}",
            f"{spent['p50']:.1f}",
            f"{spent['p99']:.1f}",
            f"{each['claims_deleted']:,}" if name == "purging" else "",
        )
        for each in found["layouts"]
        for name, spent in each["milliseconds"].items()
    ]
    return [f"## Purging {found['rows']:,} expired claims under load\n", _PURGE, _table(_PURGE_HEAD, rows)]


def _where(found: Mapping[str, Any]) -> list[str]:
    return ["## Where the CPU time goes\n", _WHERE, markdown(found["variants"])]


def _told(heading: str, found: Mapping[str, Any]) -> list[str]:
    return [
        f"## {heading}\n",
        f"{found['where']}.\n",
        _table(("what", "median (quartiles)", "to be"), list(telling.rows(found))),
    ]


def designs(found: Mapping[str, Any]) -> list[str]:
    """Tables of designs side by side."""
    parts = ["## Designs\n", _DESIGNS]
    for title, names in found["designs"].items():
        measured = {name: found["variants"][name] for name in names if name in found["variants"]}
        parts += [f"### {title.capitalize()}\n", _variants(measured)]
    return [*parts, *_failed(found)]


def _spread(figure: Mapping[str, float]) -> str:
    digits = 0 if abs(figure["median"]) >= 100 else 1 if abs(figure["median"]) >= 10 else 2  # noqa: PLR2004 - as many as say something
    told = f"{figure['median']:.{digits}f}"
    if "lower_quartile" not in figure:  # measured once
        return told
    low, high = figure["lower_quartile"], figure["upper_quartile"]
    return f"{told} ({low:.{digits}f} to {high:.{digits}f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
