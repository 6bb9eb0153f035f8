"""What an inbox on documents promises beside the port: where ids stand, what handlers see, what the collector may delete."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import pytest

from idemp import App, Context, Idempotent, Outcome, Previous
from idemp.broker.memory import InMemoryBroker
from idemp.broker.port import Park
from idemp.errors import (
    CommitUnknown,
    ConfigurationError,
    HandlerError,
    IdentityChanged,
    MessageError,
    StoreError,
    StoreUnavailable,
    TransactionEnded,
    TransientStoreError,
    UnaddressableMessage,
    UnusableState,
)
from idemp.inbox.document import (
    Document,
    DocumentInbox,
    DocumentTooLarge,
    InMemoryDocuments,
    Place,
    RevisionConflict,
    document_of,
    session_of,
)
from idemp.inbox.document.port import DocumentRefused, UnreadableDocument, size_of
from idemp.inbox.port import Identity, Mark, Verdict
from idemp.messages import Message, parse_json
from idemp.settings import Settings
from idemp.startup import check_entities
from idemp.testing.clock import FakeClock
from idemp.testing.document_conformance import DocumentEffects
from idemp.testing.faulty import FaultyDocuments, Script
from idemp.testing.store_bench import MESSAGE_TYPE, RELAY_AFTER, Bench, make_outputs
from tests.house import SELL, memory_house, sale
from tests.inbox.document.given import DocumentHouse

if TYPE_CHECKING:
    from collections.abc import Mapping

WINDOW = timedelta(minutes=5)
ATTEMPTS = "idemp/attempt/"


@pytest.fixture
def documents() -> InMemoryDocuments:
    return InMemoryDocuments()


@pytest.fixture
def requests(documents: InMemoryDocuments) -> FaultyDocuments:
    return FaultyDocuments(documents, Script())


@pytest.fixture
def inbox(requests: FaultyDocuments) -> DocumentInbox:
    return DocumentInbox(requests, clock=FakeClock())


@pytest.fixture
def bench(inbox: DocumentInbox, documents: InMemoryDocuments) -> Bench:
    clock = inbox.clock
    assert isinstance(clock, FakeClock)
    return Bench(inbox, DocumentEffects(documents), clock, "shop", asks_again=False, patience=10)


def body(documents: InMemoryDocuments, id: str) -> Mapping[str, Any]:
    found = documents.read(id)
    assert found is not None
    return found.body


def purge(inbox: DocumentInbox) -> int:
    return inbox.purge("shop", {MESSAGE_TYPE: WINDOW}, 100)


def attempts(documents: InMemoryDocuments) -> int:
    return len(documents.scan(ATTEMPTS)[0])


# Where things stand ---------------------------------------------------------------------------------------------------


def test_ids_stand_where_the_place_says(documents: InMemoryDocuments) -> None:
    inbox = DocumentInbox(documents, places={MESSAGE_TYPE: Place(lambda entity: f"cart:{entity}", "meta.seen")})
    bench = Bench(inbox, DocumentEffects(documents), FakeClock(), "shop", asks_again=False, patience=10)
    documents.write("cart:1", {"meta": {"by": "me"}, "stock": 7}, None)
    with inbox.begin([claim := bench.claim("1")]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        assert unit.session.document == {"meta": {"by": "me"}, "stock": 7}
        unit.session.document["stock"] -= 1
        unit.commit()
    stored = body(documents, "cart:1")
    assert stored["stock"] == 6
    assert set(stored["meta"]) == {"by", "seen"}
    assert set(stored["meta"]["seen"]["shop"]["ids"]) == {str(claim.id.key)}
    with inbox.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.DUPLICATE
        assert unit.session.document == {"meta": {"by": "me"}, "stock": 6}
        assert unit.session.read("cart:1") == unit.session.document


def test_own_documents_in_a_collection_of_their_own(documents: InMemoryDocuments) -> None:
    own = InMemoryDocuments()
    inbox = DocumentInbox(documents, own)
    inbox.verify()
    bench = Bench(inbox, DocumentEffects(documents), FakeClock(), "shop", asks_again=False, patience=10)
    bench.handle(claim := bench.claim("1"), make_outputs(2))
    assert [found.id for found in documents.scan("")[0]] == ["1"]
    assert [found.id.startswith(ATTEMPTS) for found in own.scan("")[0]] == [True]
    assert len(bench.look(claim).outputs) == 2
    inbox.close()


def test_no_outputs_no_attempt(bench: Bench, documents: InMemoryDocuments) -> None:
    bench.handle(bench.claim(), effect="sale")
    assert attempts(documents) == 0
    assert len(documents.scan("")[0]) == 1


@pytest.mark.parametrize("entity", [None, "idemp/books", "idemp/attempt/x"])
def test_messages_do_not_reach_our_own_documents(bench: Bench, entity: str | None) -> None:
    claim = replace(bench.claim(), entity=entity)
    with pytest.raises(UnaddressableMessage), bench.store.begin([claim]) as unit:
        unit.claim(claim)


def test_two_documents_in_one_unit_are_refused(bench: Bench) -> None:
    one, other = bench.claim(), bench.claim()
    with pytest.raises(StoreError, match="batch=1"), bench.store.begin([one]) as unit:
        unit.claim(one)
        unit.claim(other)


def test_types_without_entity_and_batches_are_refused_at_start(inbox: DocumentInbox) -> None:
    def registered(**policy: Any) -> App:
        app = App("shop", store=inbox, broker=InMemoryBroker(), settings=Settings())
        app.handler(dict, type=SELL, policy=Idempotent(**policy))(lambda message, ctx: None)
        app.handler(dict, type="shop.Ask")(lambda message, ctx: None)
        app.registry.build({})
        return app

    for policy, told in (({}, "entity="), ({"entity": "sku", "batch": 5}, "batch")):
        with pytest.raises(ConfigurationError, match=told):
            check_entities(inbox, registered(**policy).registry.registrations())
    check_entities(inbox, registered(entity="sku").registry.registrations())
    check_entities(memory_house().app.store, registered().registry.registrations())


# What handlers see ----------------------------------------------------------------------------------------------------


def test_a_handler_changes_its_document() -> None:
    service = DocumentHouse()

    def sell(message: dict[str, Any], ctx: Context) -> None:
        stock = document_of(ctx)
        assert session_of(ctx).exists is ("left" in stock)
        stock["left"] = stock.get("left", 10) - 1
        assert session_of(ctx).open(message["sku"]) is stock

    service.app.handler(dict, type=SELL, policy=Idempotent(entity="sku"))(sell)
    assert [service.deliver(sale(id_)) for id_ in ("1", "2", "1")] == [
        Outcome.HANDLED,
        Outcome.HANDLED,
        Outcome.SKIPPED,
    ]
    assert body(service.documents, "A-1")["left"] == 8


def test_a_number_that_no_float_holds_is_refused_and_not_rounded(documents: InMemoryDocuments) -> None:
    with pytest.raises(HandlerError, match="its text"), DocumentInbox(documents).begin() as unit:
        unit.session.open("A-1")["amount"] = parse_json(Message(body=b"0.1234567890123456789"))
        unit.flush()
    assert documents.read("A-1") is None


@pytest.mark.parametrize("text", ["\ud800", float("nan"), {1}, b"bytes"])
def test_what_json_can_not_say_is_refused_before_anything_is_written(documents: InMemoryDocuments, text: Any) -> None:
    with pytest.raises(HandlerError, match="can't be kept as JSON"), DocumentInbox(documents).begin() as unit:
        unit.session.open("A-1")["text"] = text
        unit.flush()
    assert documents.read("A-1") is None


@pytest.mark.parametrize("kept", [{1: "a"}, {"items": {7: 1}}, {"list": [{None: 1}]}, {"pair": ({True: 1},)}], ids=str)
def test_keys_that_json_would_turn_into_text_are_refused(documents: InMemoryDocuments, kept: dict[Any, Any]) -> None:
    """The next handling would not find what this one wrote under 7, and count from nothing."""
    with pytest.raises(HandlerError, match="in JSON all keys are text"), DocumentInbox(documents).begin() as unit:
        unit.session.open("A-1").update(kept)
        unit.flush()
    assert documents.read("A-1") is None


KEY = "6f8f0c9e-3c1a-4c0f-9a55-7f2f0d5d2f3b"
OURS = {"shop": {"ids": {KEY: {"type": "shop.Sell", "at": "2026-03-01T12:00:00+00:00"}}}}
"""What idemp itself would write, and nothing tells apart from it."""
OF_OTHERS = [
    "field", {}, [], {"v": 2}, {"shop": "x"}, {"shop": {}}, {"shop": {"ids": {}}}, {"shop": {"ids": {"7": {}}}},
    {"shop": {**OURS["shop"], "more": 1}}, {"shop": {"ids": {"7": OURS["shop"]["ids"][KEY]}}},
    {"shop": {"ids": {KEY: {"type": "shop.Sell"}}}}, {**OURS, "v": 2},
]  # fmt: skip
"""What another program keeps in a field of that name, some of it nearly what idemp writes."""


@pytest.mark.parametrize("written", [*OF_OTHERS, OURS], ids=str)
def test_a_field_of_the_users_own_where_ids_are_kept(bench: Bench, documents: InMemoryDocuments, written: Any) -> None:
    """It is refused, and neither hidden nor lost, were it there before or not."""
    with pytest.raises(HandlerError, match="'idemp' of its own"), bench.store.begin([claim := bench.claim()]) as unit:
        unit.claim(claim)
        unit.session.document["idemp"] = written
        unit.flush()
    assert claim.entity is not None
    if written != OURS:
        first = documents.write(claim.entity, {"idemp": written}, None)
        with pytest.raises(HandlerError, match="'idemp' of its own"), bench.store.begin([claim]) as unit:
            unit.claim(claim)
            assert unit.session.document == {"idemp": written}
            unit.flush()
        assert documents.read(claim.entity) == Document(claim.entity, {"idemp": written}, first)


@pytest.mark.parametrize("written", OF_OTHERS, ids=str)
@pytest.mark.parametrize("path", ["idemp", "meta.handled"])
def test_a_field_of_the_users_own_survives_what_does_not_concern_it(
    documents: InMemoryDocuments, written: Any, path: str
) -> None:
    """A handler whose ids are elsewhere sees it, and writes it back as it was; so does the collector."""
    inbox = DocumentInbox(documents, places={"shop.Other": Place(ids="meta.handled"), MESSAGE_TYPE: Place(ids="seen")})
    clock = FakeClock()
    bench = Bench(inbox, DocumentEffects(documents), clock, "shop", asks_again=False, patience=10)
    inbox.clock = clock
    field = {"idemp": written} if path == "idemp" else {"meta": {"handled": written}}
    documents.write("1", field, None)
    bench.consume(timedelta(0))
    with inbox.begin([claim := bench.claim("1")]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        assert unit.session.document == field
        unit.session.document["n"] = 1
        unit.store_outputs(claim, outputs := make_outputs(1), RELAY_AFTER)
        unit.commit()
    inbox.record([Mark(claim, (outputs[0].id,))])
    bench.consume(WINDOW + timedelta(minutes=1))
    assert purge(inbox) == 1
    stored = dict(body(documents, "1"))
    assert set(stored.pop("seen")["shop"]) == {"ids", "purged"}
    assert stored == {**field, "n": 1}


def test_what_would_be_hidden_is_refused_where_another_field_has_the_ids(documents: InMemoryDocuments) -> None:
    """Other types' ids may be in `idemp`: what looks like them, no handler would see again."""
    inbox = DocumentInbox(documents, places={MESSAGE_TYPE: Place(ids="meta.handled")})
    with inbox.begin() as unit:
        unit.session.open("A-1")["idemp"] = {"v": 2}
        unit.commit()
    with inbox.begin() as unit:
        unit.session.open("A-1")["idemp"] = OURS
        with pytest.raises(HandlerError, match="'idemp'"):
            unit.flush()
    assert inbox.begin().session.read("A-1") == {"idemp": {"v": 2}}


def test_fields_within_one_another_and_fields_without_names(documents: InMemoryDocuments) -> None:
    with pytest.raises(ConfigurationError, match=r"'idemp' and in 'idemp\.handled'"):
        DocumentInbox(documents, places={"shop.Sell": Place(ids="idemp.handled")})
    for ids in ("", "meta.", "a..b"):
        with pytest.raises(ConfigurationError, match="names no field"):
            Place(ids=ids)


def test_a_handler_that_is_not_opted_in_opens_one_document() -> None:
    service = DocumentHouse()
    service.documents.write("idle", {"n": 1}, None)

    def sell(message: dict[str, Any], ctx: Context) -> None:
        with pytest.raises(HandlerError, match="open"):
            document_of(ctx)
        assert session_of(ctx).read("nobody") is None
        (session_of(ctx).read("idle") or {})["n"] = 9
        session_of(ctx).open("A-1")["seen"] = message["sku"]
        for id_ in ("B-1", "idemp/books"):
            with pytest.raises(HandlerError):
                session_of(ctx).open(id_)
        with pytest.raises(HandlerError):
            session_of(ctx).read("idemp/books")

    service.app.handler(dict, type=SELL)(sell)
    service.deliver()
    first = service.documents.read("A-1")
    service.deliver()
    assert first is not None
    assert first.body == {"seen": "A-1"}
    assert service.documents.read("A-1") == first, "it was written, and nothing had changed"
    assert body(service.documents, "idle") == {"n": 1}


@pytest.mark.parametrize(("before", "after"), [(1, True), (0, False), (1, 1.0), ([1], [True]), ({"a": 1}, {"a": True})])
def test_what_python_takes_for_equal_is_a_change_all_the_same(before: Any, after: Any) -> None:
    """Of a type that is not opted in, which writes nothing where nothing has changed."""
    service = DocumentHouse()
    service.documents.write("A-1", {"value": before}, None)

    def sell(message: dict[str, Any], ctx: Context) -> None:
        session_of(ctx).open("A-1")["value"] = after

    service.app.handler(dict, type=SELL)(sell)
    service.deliver()
    assert repr(body(service.documents, "A-1")) == repr({"value": after})


@pytest.mark.parametrize("value", [{"idemp": {}}, {"x": object()}, {"x": float("nan")}], ids=["ours", "object", "nan"])
def test_what_can_not_be_kept_is_the_handlers_fault(bench: Bench, value: dict[str, Any]) -> None:
    with pytest.raises(HandlerError), bench.store.begin([claim := bench.claim()]) as unit:
        bench.handle(claim)
        unit.claim(bench.claim(claim.id.text + "-2"))
        unit.session.document.update(value)
        unit.flush()


def test_swallowed_refusal_is_found_at_commit(bench: Bench, documents: InMemoryDocuments) -> None:
    claim = bench.claim()
    with bench.store.begin([claim]) as unit:
        unit.claim(claim)
        with suppress(TransactionEnded):
            unit.session.commit()
        with pytest.raises(TransactionEnded):
            unit.store_outputs(claim, make_outputs(), RELAY_AFTER)
        with pytest.raises(TransactionEnded):
            unit.commit()
    assert documents.scan("")[0] == []


def test_store_that_is_away_in_a_handler_is_not_the_handlers_fault(bench: Bench, requests: FaultyDocuments) -> None:
    with bench.store.begin([claim := bench.claim()]) as unit:
        unit.claim(claim)
        assert unit.usable()
        with patch.object(requests, "read", side_effect=StoreUnavailable("away")), pytest.raises(StoreUnavailable):
            unit.session.read("other")
        assert not unit.usable()


@pytest.mark.parametrize("when", ["at the claim", "in the handler", "of an attempt"])
def test_a_document_that_can_not_be_read_is_about_its_message(
    bench: Bench, requests: FaultyDocuments, when: str
) -> None:
    """Whoever wraps a function delivers again what raises `StoreError`, for ever."""
    claim = bench.claim()
    if when == "of an attempt":
        bench.handle(claim, make_outputs(1))
    read = requests.read

    def unreadable(id: str) -> Document | None:
        if when != "of an attempt" or id.startswith(ATTEMPTS):
            raise UnreadableDocument("The item has no `revision`.", fix="Give it one.")
        return read(id)

    with bench.store.begin([claim]) as unit:
        with patch.object(requests, "read", side_effect=unreadable), pytest.raises(UnusableState) as told:
            if when == "in the handler":
                _ = unit.session.document
            unit.claim(claim)
        assert unit.raised(told.value) is (when == "in the handler")
        assert "replay the message" in told.value.fix


def test_another_document_that_can_not_be_read_is_the_handlers_affair(bench: Bench, requests: FaultyDocuments) -> None:
    with bench.store.begin([claim := bench.claim()]) as unit:
        unit.claim(claim)
        broken = UnreadableDocument("The item has no `revision`.")
        with patch.object(requests, "read", side_effect=broken), pytest.raises(HandlerError, match="revision"):
            unit.session.read("other")


def test_a_write_that_the_store_refuses_for_its_content_is_the_handlers_failure(
    bench: Bench, requests: FaultyDocuments
) -> None:
    with pytest.raises(HandlerError, match="no price"), bench.store.begin([claim := bench.claim()]) as unit:
        unit.claim(claim)
        unit.session.document["n"] = 1
        with patch.object(requests, "write", side_effect=DocumentRefused("forbidden: no price")):
            unit.commit()


def test_too_large_documents_leave_no_orphan() -> None:
    assert issubclass(DocumentTooLarge, MessageError), "who wraps a function delivers StoreError again, for ever"
    documents = InMemoryDocuments(largest=2_000)
    bench = Bench(
        DocumentInbox(documents), DocumentEffects(documents), FakeClock(), "shop", asks_again=False, patience=9
    )
    with pytest.raises(DocumentTooLarge), bench.store.begin([claim := bench.claim()]) as unit:
        unit.claim(claim)
        unit.session.document["text"] = "x" * 2_000
        unit.store_outputs(claim, make_outputs(1), RELAY_AFTER)
        unit.commit()
    assert documents.scan("")[0] == []


def test_a_document_that_fills_is_warned_of_and_refused_with_nothing_lost(caplog: pytest.LogCaptureFixture) -> None:
    """From four fifths of what the store takes on, once; what no longer fits is parked, and its effect is not there."""
    service = DocumentHouse()
    service.documents.largest = service.requests.largest = 5_000
    service.sells(entity="sku", outputs=0, attempts=1)
    caplog.set_level("WARNING", "idemp.inbox")

    def warnings() -> list[Any]:
        return [record for record in caplog.records if getattr(record, "event", None) == "document_nearly_full"]

    handled = 0
    while (ended := service.handle(sale(f"sale-{handled}")))[0] is Outcome.HANDLED:
        handled += 1
        used = size_of(body(service.documents, "A-1"))
        assert len(warnings()) == (used > 4_000), f"{used} bytes after {handled} messages"
    assert ended[0] is Outcome.PARKED
    (warning,) = warnings()
    assert (warning.document, warning.largest) == ("A-1", 5_000)
    assert 4_000 < warning.bytes < 5_000
    assert warning.ids <= handled == service.sales()
    _, settlement = ended
    assert isinstance(settlement, Park)
    told = " ".join(map(str, settlement.headers.values()))
    assert re.search(r"'A-1' has \d+ bytes as JSON, and its store takes 5000; \d+ of them are ids", told)
    assert service.deliver(sale("sale-0")) is Outcome.SKIPPED, "what was handled is known"


# What the collector may delete ----------------------------------------------------------------------------------------


def test_attempt_that_may_still_win_is_fenced_first(
    bench: Bench, requests: FaultyDocuments, documents: InMemoryDocuments
) -> None:
    """However slow its write is: once the outputs are gone it can't succeed any more."""
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    documents.write((claim := bench.claim()).id.text, {"stock": 3}, None)
    requests.write_faults = ["", "slow"]
    with pytest.raises(CommitUnknown):
        bench.handle(claim, make_outputs(2), effect="sale")
    bench.consume(WINDOW - timedelta(minutes=1))
    assert purge(bench.store) == 0
    assert attempts(documents) == 1, "it is within the window"
    bench.consume(timedelta(minutes=2))
    assert purge(bench.store) == 0
    assert attempts(documents) == 0
    with pytest.raises(RevisionConflict):
        requests.slow.pop()()
    with bench.store.begin([claim]) as unit:
        assert unit.claim(claim).verdict is Verdict.CLAIMED
        assert unit.session.document == {"stock": 3}
    bench.counted("sale", 0)


def test_attempt_that_may_still_make_its_document_is_kept(
    bench: Bench, requests: FaultyDocuments, documents: InMemoryDocuments
) -> None:
    """No fence can stand where there is no document: the collector makes none, and the slow write keeps its outputs."""
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    requests.write_faults = ["", "slow"]
    with pytest.raises(CommitUnknown):
        bench.handle(claim := bench.claim(), outputs := make_outputs(2), effect="sale")
    bench.consume(5 * WINDOW)
    assert purge(bench.store) == 0
    assert documents.read(claim.id.text) is None
    assert attempts(documents) == 1
    requests.slow.pop()()
    assert [stored.output for stored in bench.look(claim).outputs] == outputs
    bench.counted("sale", 1)


def test_slow_write_before_the_collector_keeps_its_outputs(
    bench: Bench, requests: FaultyDocuments, documents: InMemoryDocuments
) -> None:
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    requests.write_faults = ["", "slow"]
    with pytest.raises(CommitUnknown):
        bench.handle(claim := bench.claim(), outputs := make_outputs(2), effect="sale")
    bench.consume(WINDOW + timedelta(minutes=1))
    requests.slow.pop()()
    purge(bench.store)
    assert [stored.output for stored in bench.look(claim).outputs] == outputs
    bench.counted("sale", 1)


def test_attempt_that_lost_goes_without_a_fence(bench: Bench, documents: InMemoryDocuments) -> None:
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    claim, outputs = bench.claim(), make_outputs(1)
    with bench.store.begin([claim]) as unit:
        unit.claim(claim)
        unit.store_outputs(claim, make_outputs(3), RELAY_AFTER)
        bench.handle(claim, outputs)
        with pytest.raises(RevisionConflict):
            unit.commit()
    assert attempts(documents) == 2
    bench.consume(WINDOW + timedelta(minutes=1))
    before = documents.read(claim.id.text)
    assert purge(bench.store) == 0, "the winner's outputs pend"
    assert documents.read(claim.id.text) == before
    assert attempts(documents) == 1
    assert [stored.output for stored in bench.look(claim).outputs] == outputs


def test_what_pends_is_kept_for_two_windows_after_its_last_refusal(bench: Bench, documents: InMemoryDocuments) -> None:
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    (output,) = make_outputs(1)
    bench.handle(claim := bench.claim(), [output])
    bench.consume(2 * WINDOW - timedelta(minutes=1))
    bench.store.record([Mark(claim, (), refused=((output.id, "nacked"),))])
    bench.consume(2 * WINDOW - timedelta(minutes=1))
    assert purge(bench.store) == 0
    assert bench.pending(claim) == [output.id]
    bench.consume(timedelta(minutes=2))
    assert purge(bench.store) == 1
    assert attempts(documents) == 0
    assert bench.look(claim).verdict is Verdict.CLAIMED


def test_outputs_that_somebody_else_deleted_are_told(bench: Bench, documents: InMemoryDocuments) -> None:
    """Never an empty answer: that would be an output lost in silence."""
    bench.handle(claim := bench.claim(), make_outputs(2))
    ((attempt,), _) = documents.scan(ATTEMPTS)
    documents.delete(attempt.id, attempt.revision)
    with pytest.raises(UnusableState, match="are gone") as told:
        bench.look(claim)
    assert attempt.id in told.value.fix


@pytest.mark.parametrize("anew", [False, True], ids=["not handled again", "handled again"])
def test_id_that_expires_while_it_is_read(
    bench: Bench, requests: FaultyDocuments, documents: InMemoryDocuments, anew: bool
) -> None:
    """The state named an attempt, and the collector came in between: it is looked for once more."""
    bench.consume(timedelta(0))
    claim, (output,) = bench.claim(), make_outputs(1)
    bench.handle(claim, [output])
    bench.store.record([Mark(claim, (output.id,))])
    bench.consume(WINDOW + timedelta(minutes=1))
    other = DocumentInbox(documents, clock=bench.clock)

    def read(id: str) -> Document | None:
        if id.startswith(ATTEMPTS) and purge(other) and anew:
            replace(bench, store=other).handle(claim, make_outputs(2))
        return documents.read(id)

    with (
        patch.object(requests, "read", side_effect=read),
        pytest.raises(TransientStoreError, match="expired"),
        bench.store.begin([claim]) as unit,
    ):
        unit.claim(claim)
    assert bench.look(claim).verdict is (Verdict.DUPLICATE if anew else Verdict.CLAIMED)


def test_ids_without_outputs_go_with_the_next_write(bench: Bench, documents: InMemoryDocuments) -> None:
    """And only those that are past their window; whoever claims learns that some are gone."""
    bench.agree(Identity(MESSAGE_TYPE, "field:number"), WINDOW)
    bench.consume(timedelta(0))
    first = bench.claim("first")
    second, third = (replace(bench.claim(text), entity=first.entity) for text in ("second", "third"))
    bench.handle(first)
    bench.consume(WINDOW + timedelta(minutes=1))
    bench.handle(second)
    assert len(body(documents, "first")["idemp"]["shop"]["ids"]) == 2, "a worker may go by a window that it read before"
    bench.consume(WINDOW)
    with bench.store.begin([third]) as unit:
        assert unit.claim(third).verdict is Verdict.CLAIMED
        assert unit.purged_before("shop") is None
        unit.store_outputs(third, [], RELAY_AFTER)
        unit.commit()
    kept = body(documents, "first")["idemp"]["shop"]
    assert sorted(each["id"] for each in kept["ids"].values()) == ["second", "third"]
    with bench.store.begin([first]) as unit:
        assert unit.claim(first).verdict is Verdict.CLAIMED
        assert unit.purged_before("shop") == bench.clock.now()


def test_nothing_is_left_to_relays(bench: Bench) -> None:
    upkeep = bench.store.upkeep
    bench.handle(bench.claim(), make_outputs(2))
    bench.clock.advance(timedelta(minutes=10))
    upkeep.beat("relay", relay=True, consumers=[])
    assert not bench.store.relay_alive()
    assert list(upkeep.take_pending(10, timedelta(seconds=5))) == []
    state = upkeep.pending_state()
    assert (state.count, state.oldest_seconds) == (2, 600)


def test_long_looks_through_everything_are_seldom(bench: Bench, requests: FaultyDocuments) -> None:
    """Nineteen times as long as one took it rests; what is asked meanwhile is answered as before."""
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    bench.handle(claim := bench.claim(), outputs := make_outputs(1))
    bench.store.record([Mark(claim, (outputs[0].id,))])
    scan = requests.inner.scan

    def slow(*arguments: Any) -> Any:
        bench.clock.advance(timedelta(seconds=2))
        return scan(*arguments)

    with patch.object(requests.inner, "scan", side_effect=slow):
        for look, found in (
            (lambda: purge(bench.store), 0),
            (bench.store.pending_count, 0),
            (lambda: bench.store.purge_lag("shop", {MESSAGE_TYPE: WINDOW}), timedelta(0)),
        ):
            assert [look(), look()] == [found, found]
    assert requests.script.calls.count("scan documents") == 1 + 1 + 1 + 1, "attempts, starts; pending; lag"
    bench.consume(WINDOW + timedelta(minutes=1))
    assert purge(bench.store) == 1


def test_a_round_goes_on_where_it_stopped(bench: Bench, requests: FaultyDocuments) -> None:
    """Much to delete is deleted in several calls, which look through the attempts once."""
    assert isinstance(bench.store, DocumentInbox)
    bench.consume(timedelta(0))
    for _ in range(5):
        bench.handle(claim := bench.claim(), outputs := make_outputs(1))
        bench.store.record([Mark(claim, (outputs[0].id,))])
    bench.consume(WINDOW + timedelta(minutes=1))
    requests.script.clear()
    assert [bench.store.purge("shop", {MESSAGE_TYPE: WINDOW}, 2) for _ in range(3)] == [2, 2, 1]
    assert requests.script.calls.count("scan documents") == 1 + 3, "attempts once, starts each time"


# Another entity -------------------------------------------------------------------------------------------------------

OTHERWISE = sale(body={"sku": "A-1", "shelf": "9"})


@pytest.mark.parametrize("claim", ["early", "late"])
def test_a_changed_entity_is_refused_at_start_until_the_former_one_is_named(claim: Literal["early", "late"]) -> None:
    """Under another document nobody finds the ids."""
    service = DocumentHouse()

    def started(**policy: Any) -> App:
        app = App("shop", store=service.inbox, broker=service.broker, settings=Settings(), clock=service.clock)

        def sell(message: dict[str, Any], ctx: Context) -> None:
            document_of(ctx)["left"] = 9
            ctx.send({}, to="stock", type="stock.Reserve")

        app.handler(dict, type=SELL, policy=Idempotent(claim=claim, **policy))(sell)
        app.start()
        return app

    former = started(entity="sku")
    assert former.protocol(service.publisher).process(OTHERWISE) is Outcome.HANDLED
    fix = r"""'message_id; about field:shelf'; until now .* 'message_id; about field:sku'.*Previous\(entity='sku'\)"""
    with pytest.raises(IdentityChanged, match=fix):
        started(entity="shelf")
    present = started(entity="shelf", previous=[Previous(entity="sku")]).protocol(service.publisher)
    assert present.process(OTHERWISE) is Outcome.REDISPATCHED
    present.dispatcher.flush()
    assert service.inbox.pending_count() == 0, "confirms are recorded where the claim is"
    assert service.documents.read("9") is None
    other = replace(OTHERWISE, message_id="sale-2")
    assert [present.process(other), present.process(other)] == [Outcome.HANDLED, Outcome.REDISPATCHED]
    assert "sale-2" in str(service.documents.read("9"))
    assert "sale-2" not in str(service.documents.read("A-1")), "which another message's write would conflict with"
    with pytest.raises(IdentityChanged, match=r"Previous\(entity='shelf'\)"):
        started(entity="sku")  # unlike a former key, which newer claims name, too
    started(entity="sku", previous=[Previous(entity="shelf")])


def test_one_entity_by_another_name_is_claimed_once() -> None:
    service = DocumentHouse()
    service.sells(entity="shelf", previous=[Previous(entity="sku")])
    message = sale(body={"sku": "A-1", "shelf": "A-1"})
    assert [service.deliver(message), service.deliver(message)] == [Outcome.HANDLED, Outcome.REDISPATCHED]


@pytest.mark.parametrize("former", [{"aliases": ["shop.Sale"]}, {"previous": [Previous(type="shop.Sale")]}])
def test_a_place_under_a_former_name_alone_is_refused_at_start(former: dict[str, Any]) -> None:
    """Under the new name there is none, and the ids would be looked for in another document."""

    def start(*names: str) -> None:
        places = {name: Place(lambda sku: f"stock:{sku}") for name in names}
        inbox = DocumentInbox(InMemoryDocuments(), places=places)
        app = App("shop", store=inbox, broker=InMemoryBroker(), settings=Settings())
        policy = Idempotent(entity="sku", previous=former.get("previous", ()))
        app.handler(dict, type=SELL, aliases=former.get("aliases", ()), policy=policy)(lambda message: None)
        app.start()

    with pytest.raises(ConfigurationError, match=rf"'{SELL}' has no Place, and under its former name 'shop\.Sale'"):
        start("shop.Sale")
    start("shop.Sale", SELL)
    start()
