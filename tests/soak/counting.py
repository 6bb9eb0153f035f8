"""What is left at the end, held against what was sent."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import Engine, func, select

from idemp.broker.kombu import KombuBroker
from idemp.inbox.sql import Tables
from idemp.messages import Message
from tests.soak.app import CONSUMER, KILLERS, effect
from tests.soak.audit import Ledger
from tests.soak.feeding import Feeder
from tests.soak.plan import Plan
from tests.soak.report import Report
from tests.storms.looking import depths

_PENDING = Tables().pending
_EVERYTHING = 1_000_000
# Faults that can swallow the ack of a parked message, so that it comes again and is parked again.
_SWALLOWING = ("kill", "broker restarted", "link to the broker", "closed by the broker")
_TOLD = 20


def count(
    report: Report, plan: Plan, engine: Engine, broker_url: str, feeder: Feeder, ledger: Ledger, queues: list[str]
) -> None:
    """Fill the report; the workers have ended, and the outputs are read."""
    report.messages, report.copies, report.resent = feeder.sent, feeder.copies, len(feeder.resent)
    report.feeding_held_seconds, report.killers = round(feeder.held_seconds, 1), len(feeder.killers)
    _count_effects(report, plan, engine, feeder.sent)
    broker = KombuBroker(broker_url)
    _count_letters(report, plan, broker, feeder)
    dead = {f"{CONSUMER}.dead", f"{KILLERS}.dead"}
    left = depths(broker, [name for name in queues if name not in dead])
    report.left = {name: depth for name, depth in left.items() if depth}
    ledger.check(feeder.sent)
    report.outputs_seen, report.outputs = ledger.seen, dict(ledger.found)
    report.examples |= ledger.examples


def _count_effects(report: Report, plan: Plan, engine: Engine, sent: int) -> None:
    with engine.connect() as connection:
        counts = Counter(connection.scalars(select(effect.c.number)))
        pending = select(func.count()).select_from(_PENDING)
        report.pending = connection.scalar(pending) or 0
        report.quarantined = connection.scalar(pending.where(_PENDING.c.quarantined_at.is_not(None))) or 0
    report.effects = counts.total()
    lost = [number for number in range(sent) if not counts[number] and plan.kind(number) != "always"]
    doubled = [number for number, times in counts.items() if times > 1]
    parked = [number for number in counts if plan.kind(number) == "always"]
    report.lost, report.doubled, report.effects_of_what_was_parked = len(lost), len(doubled), len(parked)
    for name, numbers in (("lost", lost), ("doubled", doubled), ("effects_of_what_was_parked", parked)):
        if numbers:
            report.examples[name] = [f"{number}: {plan.order_id(number)}" for number in numbers[:_TOLD]]


def _count_letters(report: Report, plan: Plan, broker: KombuBroker, feeder: Feeder) -> None:
    letters = [letter for name in (CONSUMER, KILLERS) for letter in broker.browse(f"{name}.dead", _EVERYTHING)]
    report.letters = dict(Counter(_reason(letter) for letter in letters))
    copies = Counter(letter.message_id or "" for letter in letters)
    always = {plan.message_id(number, 0) for number in range(feeder.sent) if plan.kind(number) == "always"}
    wanted = always | set(feeder.killers)
    report.letters_missing = len(wanted - copies.keys())
    report.letters_unexpected = [
        f"{letter.message_id}: {_reason(letter)}: {letter.headers.get('idemp-dead-error')}"
        for letter in letters
        if letter.message_id not in wanted
    ][:_TOLD]
    report.letters_repeated = sum(copies[name] - 1 for name in wanted if copies[name])
    swallowing = sum(times for name, times in report.faults.items() if any(each in name for each in _SWALLOWING))
    report.letters_explained = swallowing + len(wanted & feeder.resent)
    report.letters_unexplained = max(0, report.letters_repeated - report.letters_explained)


def _reason(letter: Message) -> str:
    return str(letter.headers.get("idemp-dead-reason"))
