"""Metrics of deliveries, outputs, relays and cleaners, through the real protocol."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import generate_latest

from idemp import App, Idempotent, Inbox, Outcome, Refuse
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Delivery
from idemp.effects import EffectRunner
from idemp.errors import StoreUnavailable, TransientStoreError
from idemp.inbox.memory import InMemoryStore
from idemp.relay import Relay
from idemp.retention import Cleaner
from idemp.telemetry.catalogue import METRICS
from idemp.telemetry.prometheus import Metrics
from tests.house import SELL, House, sale
from tests.telemetry.conftest import opened, value

if TYPE_CHECKING:
    from idemp.broker.port import Refusal

TYPED = {"consumer": "shop", "type": SELL}


def deliveries(metrics: Metrics, outcome: str, type: str = SELL) -> float:
    return value(metrics, "idemp_deliveries_total", consumer="shop", type=type, outcome=outcome)


def outputs(metrics: Metrics, via: str, result: str, consumer: str = "shop") -> float:
    return value(metrics, "idemp_outputs_total", consumer=consumer, via=via, result=result)


def test_handled_then_duplicate(any_house: House, metrics: Metrics) -> None:
    any_house.sells(outputs=3)
    any_house.handle()
    assert (deliveries(metrics, "handled"), outputs(metrics, "dispatch", "confirmed")) == (1, 3)
    any_house.clock.advance(timedelta(hours=2))
    any_house.handle()
    any_house.handle(sale("another"))
    assert (deliveries(metrics, "handled"), deliveries(metrics, "redispatched")) == (2, 1)
    assert outputs(metrics, "redispatch", "confirmed") == 3
    assert value(metrics, "idemp_duplicates_total", **TYPED) == 1
    assert value(metrics, "idemp_duplicate_age_seconds_sum", consumer="shop") == pytest.approx(7200)
    assert value(metrics, "idemp_duplicate_age_seconds_bucket", consumer="shop", le="3600.0") == 0
    assert value(metrics, "idemp_duplicate_age_seconds_bucket", consumer="shop", le="21600.0") == 1
    assert value(metrics, "idemp_handler_seconds_count", **TYPED) == 2
    assert value(metrics, "idemp_confirm_seconds_count", consumer="shop", via="dispatch") == 2
    assert value(metrics, "idemp_confirm_seconds_count", consumer="shop", via="redispatch") == 1
    assert value(metrics, "idemp_delivery_seconds_count", consumer="shop", outcome="handled") == 2


@pytest.mark.parametrize("claim", ["early", "late"])
def test_claims_in_flight(any_house: House, metrics: Metrics, claim: str) -> None:
    """Seen from inside the handler, and after its end, whichever it was."""
    seen = []

    def look(message: dict[str, Any]) -> None:
        seen.append(value(metrics, "idemp_claims_in_flight", **TYPED))
        if message.get("fail"):
            raise RuntimeError("no stock")

    any_house.app.handler(dict, type=SELL, policy=Idempotent(claim=claim))(look)
    any_house.handle(sale("1"))
    assert value(metrics, "idemp_claims_in_flight", **TYPED) == 0
    any_house.handle(sale("2", {"fail": True}))
    assert (seen, value(metrics, "idemp_claims_in_flight", **TYPED)) == ([1, 1], 0)


def test_claim_is_over_before_its_outputs_are_sent(house: House, metrics: Metrics) -> None:
    house.sells(outputs=1)
    seen = []
    publish = house.publisher.publish

    def looking(outputs: Any, timeout: float) -> list[Refusal | None]:
        seen.append(value(metrics, "idemp_claims_in_flight", **TYPED))
        return publish(outputs, timeout)

    house.publisher.publish = looking  # type: ignore[method-assign]
    house.handle()
    assert seen == [0]


def test_not_opted_in_claims_nothing(house: House, metrics: Metrics) -> None:
    house.app.handler(dict, type=SELL)(lambda message: seen.append(value(metrics, "idemp_claims_in_flight", **TYPED)))
    seen: list[float] = []
    house.handle()
    assert (seen, deliveries(metrics, "handled")) == ([0], 1)


def test_failures_retries_and_dead_letters(house: House, metrics: Metrics) -> None:
    def fail(message: dict[str, Any]) -> None:
        raise Refuse("never") if message.get("refuse") else RuntimeError("no stock")

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=2))(fail)
    house.handle(attempt=1)
    house.handle(attempt=2)
    house.handle(sale("2", {"refuse": True}))
    assert (deliveries(metrics, "retried"), deliveries(metrics, "parked")) == (1, 2)
    assert value(metrics, "idemp_retries_total", **TYPED, kind="delayed") == 1
    reasons = {
        reason: value(metrics, "idemp_dead_letters_total", **TYPED, reason=reason)
        for reason in ("RuntimeError", "Refuse")
    }
    assert reasons == {"RuntimeError": 1, "Refuse": 1}
    assert value(metrics, "idemp_handler_seconds_count", **TYPED) == 3


def test_conflict_is_no_duplicate(any_house: House, metrics: Metrics) -> None:
    any_house.sells()
    any_house.handle()
    any_house.handle(sale(body={"sku": "B-2"}))
    assert value(metrics, "idemp_dead_letters_total", **TYPED, reason="PayloadConflict") == 1
    assert value(metrics, "idemp_duplicates_total", **TYPED) == 0


def test_in_flight_elsewhere_is_an_uncounted_retry(metrics: Metrics) -> None:
    with opened("memory", metrics) as house:
        outcomes: list[Outcome] = []

        def meanwhile(message: dict[str, Any]) -> None:
            delivery = Delivery(message=sale(), queue="shop")
            outcomes.append(house.app.protocol(house.publisher).handle(delivery)[0])

        house.app.handler(dict, type=SELL, policy=Idempotent(claim_wait="1ms"))(meanwhile)
        house.handle()
    assert outcomes == [Outcome.IN_FLIGHT]
    assert (deliveries(metrics, "in_flight"), deliveries(metrics, "handled")) == (1, 1)
    assert value(metrics, "idemp_retries_total", **TYPED, kind="uncounted") == 1


def test_the_database_asks_again(house: House, metrics: Metrics) -> None:
    house.sells()
    house.script.store_faults = [TransientStoreError("deadlock"), TransientStoreError("deadlock")]
    house.handle()
    assert value(metrics, "idemp_retries_total", **TYPED, kind="immediate") == 2
    assert deliveries(metrics, "handled") == 1


def test_the_database_is_away(house: House, metrics: Metrics) -> None:
    """Held, not ended; it ends when it runs again."""
    house.sells()
    house.script.store_faults = [StoreUnavailable("away")] * 6
    with pytest.raises(StoreUnavailable):
        house.handle()
    assert (deliveries(metrics, "raised"), deliveries(metrics, "handled")) == (1, 0)
    house.handle()
    assert (deliveries(metrics, "raised"), deliveries(metrics, "handled")) == (1, 1)


@pytest.mark.parametrize("answer", ["nacked", "returned", "timeout", "blocked", "closed"])
def test_refusals_by_kind(house: House, metrics: Metrics, answer: Any) -> None:
    house.sells(outputs=3)
    house.script.answers = ["confirm", answer, answer]
    house.handle()
    assert (outputs(metrics, "dispatch", "confirmed"), outputs(metrics, "dispatch", answer)) == (1, 2)
    assert deliveries(metrics, "pending") == 1


def test_types_without_a_handler_share_one_label(house: House, metrics: Metrics) -> None:
    house.sells()
    for number in range(20):
        house.handle(sale(f"m-{number}", type=f"made.up.{number}"))
    house.handle(sale("no type", type=None))
    assert deliveries(metrics, "retried", type="unknown") == 21
    assert b"made.up" not in generate_latest(metrics.registry)


def test_undecodable_message_of_a_known_type(house: House, metrics: Metrics) -> None:
    house.sells()
    house.handle(sale(body=b"{"))
    assert value(metrics, "idemp_dead_letters_total", **TYPED, reason="UndecodableMessage") == 1


def test_reasons_are_bounded(house: House, metrics: Metrics) -> None:
    def fail(message: dict[str, Any]) -> None:
        raise type(f"Error{message['n']}", (Exception,), {})

    house.app.handler(dict, type=SELL, policy=Idempotent(attempts=1))(fail)
    for number in range(150):
        house.handle(sale(f"m-{number}", {"n": number}))
    series = [line for line in generate_latest(metrics.registry).splitlines() if b"dead_letters_total{" in line]
    assert len(series) == 101
    assert value(metrics, "idemp_dead_letters_total", **TYPED, reason="other") == 50


def test_no_id_becomes_a_label(house: House, metrics: Metrics) -> None:
    house.sells(outputs=2)
    for _ in range(2):
        house.handle(sale("id-4711", correlation_id="talk-4711", reply_to="q-4711"))
    assert b"4711" not in generate_latest(metrics.registry)


def test_relay(any_house: House, metrics: Metrics) -> None:
    any_house.sells(outputs=3)
    any_house.script.answers = ["closed"] * 3
    any_house.handle()
    any_house.clock.advance(timedelta(minutes=5))
    relay = Relay(any_house.app.store.upkeep, any_house.publisher, max_attempts=1, telemetry=any_house.app.telemetry)
    any_house.script.answers = ["confirm", "returned", "confirm"]
    relay.run_once()
    relay.run_once()  # finds nothing: no round
    assert value(metrics, "idemp_relay_rounds_total") == 1
    assert value(metrics, "idemp_quarantined_total") == 1
    assert (outputs(metrics, "relay", "confirmed", ""), outputs(metrics, "relay", "returned", "")) == (2, 1)
    assert value(metrics, "idemp_confirm_seconds_count", consumer="", via="relay") == 1


def test_cleaner(any_house: House, metrics: Metrics) -> None:
    any_house.sells(outputs=0)
    for number in range(3):
        any_house.handle(sale(f"m-{number}"))
    any_house.restart()
    upkeep = any_house.app.store.upkeep
    for _ in range(200):  # the window counts consuming time only
        upkeep.beat("host", relay=False, consumers=["shop"])
        any_house.clock.advance(timedelta(seconds=30))
    Cleaner(upkeep, "shop", {SELL: timedelta(hours=1)}, batch=2, telemetry=any_house.app.telemetry).run()
    assert value(metrics, "idemp_purged_claims_total", consumer="shop") == 3
    assert metrics.registry.get_sample_value("idemp_purge_lag_seconds", {"consumer": "shop"}) == 0


def test_wrapped_function(metrics: Metrics) -> None:
    def ship(message: dict[str, int]) -> None:
        if message.get("fail"):
            raise RuntimeError("no stock")

    inbox = Inbox(InMemoryStore(), telemetry=metrics)
    handle = inbox.wrap(ship, type="shop.Ship", consumer="shop", policy=Idempotent(key="id"))
    handle({"id": 1})
    handle({"id": 1})
    with pytest.raises(RuntimeError):
        handle({"id": 2, "fail": 1})
    found = {outcome: deliveries(metrics, outcome, "shop.Ship") for outcome in ("handled", "skipped", "raised")}
    assert found == {"handled": 1, "skipped": 1, "raised": 1}
    assert metrics.registry.get_sample_value("idemp_pending_outputs", {"state": "waiting"}) == 0


def test_effects(metrics: Metrics) -> None:
    app = App("shop", store=InMemoryStore(), broker=InMemoryBroker())
    fails = iter([True, False])

    @app.effect("ping")
    def ping(value: dict[str, int]) -> None:
        if next(fails):
            raise OSError("away")

    with app.initiate() as unit:
        unit.effect("ping", {})
        unit.effect("ping", {})
    runner = EffectRunner(app.store.upkeep, "shop", app.registry.effects, telemetry=metrics)
    runner.run_once()
    runner.run_once()
    for result in ("done", "failed"):
        assert value(metrics, "idemp_effects_total", effect="ping", result=result) == 1
    assert value(metrics, "idemp_effect_seconds_count", effect="ping") == 2


def test_what_is_made_is_what_the_catalogue_says(metrics: Metrics) -> None:
    """Names, kinds and labels; every metric has a use above or in the served one."""
    made = {}
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        made[name] = (family.type, family.documentation)
    assert made == {name: (metric.kind, metric.meaning) for name, metric in METRICS.items()}
    assert {label for metric in METRICS.values() for label in metric.labels} == {
        "consumer", "type", "outcome", "kind", "reason", "via", "result", "state", "effect",
    }  # fmt: skip
