"""The bookkeeping of delivery tags, for any sequence of answers."""

from __future__ import annotations

from amqp.exceptions import NoConsumers
from hypothesis import given
from hypothesis import strategies as st

from idemp.broker.kombu.confirms import Confirms
from idemp.broker.kombu.wire import parcel

STEPS = st.lists(
    st.one_of(
        st.just(("send",)),
        st.tuples(st.sampled_from(["ack", "nack"]), st.integers(0, 30), st.booleans()),
    ),
    max_size=60,
)


@given(STEPS)
def test_each_answer_concerns_exactly_what_it_names(steps) -> None:
    """Against a list that is searched naively: tags from 1, `multiple` means all up to it, 0 means all."""
    answers: dict[int, str] = {}
    confirms = Confirms(lambda index, refusal: answers.__setitem__(index, refusal.kind if refusal else "confirmed"))
    waiting: list[int] = []
    expected: dict[int, str] = {}
    sent = 0
    for step in steps:
        if step[0] == "send":
            confirms.sent(sent, parcel("", "q", b"", {"message_id": str(sent)}, mandatory=True))
            sent += 1
            waiting.append(sent)
            continue
        kind, tag, multiple = step
        meant = [each for each in waiting if (multiple and (each <= tag or tag == 0)) or each == tag]
        for each in meant:
            waiting.remove(each)
            expected[each - 1] = "confirmed" if kind == "ack" else "nacked"
        (confirms.on_ack if kind == "ack" else confirms.on_nack)(tag, multiple)
        assert answers == expected
        assert confirms.waiting == [each - 1 for each in waiting]
        assert len(confirms) == len(waiting)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.sampled_from(["1", "2", None])), max_size=12), st.data())
def test_returns_concern_exactly_their_message(sent, data) -> None:
    """Any subset of queues is missing; equal ids and absent ids are told apart by destination and order."""
    missing = data.draw(st.sets(st.sampled_from(["a", "b"])))
    answers: dict[int, str | None] = {}
    confirms = Confirms(lambda index, refusal: answers.__setitem__(index, refusal and refusal.kind))
    parcels = [parcel("", queue, b"", {"message_id": identity}, mandatory=True) for queue, identity in sent]
    for index, each in enumerate(parcels):
        confirms.sent(index, each)
    for each in parcels:
        if each.routing_key in missing:
            confirms.on_return(NoConsumers("NO_ROUTE"), "", each.routing_key, each.content)
    confirms.on_ack(len(parcels), multiple=True)
    assert answers == {index: "returned" if queue in missing else None for index, (queue, _) in enumerate(sent)}


def test_of_equal_messages_the_first_is_the_returned_one() -> None:
    """Ids may be absent. A queue that is declared between two publishes takes the second one alone."""
    answers: dict[int, str | None] = {}
    confirms = Confirms(lambda index, refusal: answers.__setitem__(index, refusal and refusal.kind))
    parcels = [parcel("", "q", b"", {}, mandatory=True) for _ in range(2)]
    for index, each in enumerate(parcels):
        confirms.sent(index, each)
    confirms.on_return(NoConsumers("NO_ROUTE"), "", "q", parcels[0].content)
    confirms.on_ack(2, multiple=True)
    assert answers == {0: "returned", 1: None}
