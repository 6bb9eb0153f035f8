"""What users say to the test kit, and what it says when nothing was shown: no test is green if nothing was handled."""

from __future__ import annotations

import itertools
import random
import re
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from idemp import App, Context, Idempotent, Inbox, Key, Policy
from idemp.errors import ConfigurationError, Refuse
from idemp.inbox.memory import InMemoryStore
from idemp.settings import Settings
from idemp.testing import world as worlds
from idemp.testing.detectors import DEFAULT, rehearse
from idemp.testing.findings import NotIdempotent
from idemp.testing.handled import NeverHandled
from idemp.testing.harness import Harness
from idemp.testing.light import assert_idempotent, redeliver
from idemp.testing.machine import redelivery_machine, replay
from idemp.testing.promises import PromiseBroken

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

PLACE, CANCEL = "orders.Place", "orders.Cancel"
ORDERS = {PLACE: st.fixed_dictionaries({"id": st.integers(0, 3)})}
BY_ID = Idempotent(key="id", attempts=1)
ONE: dict[str, Any] = {"type": PLACE, "message": dict, "policy": BY_ID}


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "kept_order"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    state: Mapped[str] = mapped_column(default="new")


def orders(session: Session) -> Any:
    return session.query(Order).order_by(Order.id).all()


def place(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.add(Order(id=message["id"]))


def misspelt(message: dict[str, Any], ctx: Context) -> None:
    ctx.sesion.add(Order(id=message["id"]))  # type: ignore[attr-defined]


def refuses(message: dict[str, Any], ctx: Context) -> None:
    raise Refuse("Not here.")


def upserts(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.merge(Order(id=message["id"]))


def pays(message: dict[str, Any], ctx: Context) -> None:
    order = ctx.session.get_one(Order, message["id"])
    order.state = "paid"


def app_of(handler: Callable[..., Any], policy: Policy = BY_ID) -> App:
    app = App("shop")
    app.handler(dict, type=PLACE, policy=policy)(handler)
    return app


def machine(
    app: App, *, messages: Any = ORDERS, tables: Any = Base.metadata, rehearse: bool = False, **options: Any
) -> Any:
    return redelivery_machine(app, messages=messages, tables=tables, rehearse=rehearse, **options)


def attack(app: App, *, examples: int = 30, **options: Any) -> Any:
    """As a test class does it, from the first example until the class has ended."""
    made = machine(app, **options)
    wanted = settings(made.TestCase.settings, max_examples=examples, database=None, derandomize=True)
    try:
        run_state_machine_as_test(made, settings=wanted)
    finally:
        made.TestCase.tearDownClass()
    return made


# Green only if something was shown


def test_machine_that_handles_nothing_stops_and_says_why() -> None:
    """At the latest when an example ends after which enough messages were published in vain."""
    with pytest.raises(
        NeverHandled, match=f"(?s)No message of {PLACE} was ever handled: .*no such table: kept_order"
    ) as found:
        attack(app_of(place), tables=None)
    published = re.search(r"handled: (\d+) published", str(found.value))
    assert published is not None
    assert 20 <= int(published.group(1)) < 50


@pytest.mark.parametrize(
    ("handler", "messages", "why"),
    [
        (misspelt, ORDERS, "The first failure:\n  AttributeError: .*sesion"),
        (place, {PLACE: st.just({"idd": 1})}, "No handler got to see one; the first failure:\n  MissingId: "),
    ],
    ids=["misspelt", "only invalid messages"],
)
def test_it_fails_at_the_end_of_the_class_where_examples_are_few(handler: Any, messages: Any, why: str) -> None:
    with pytest.raises(NeverHandled, match=why):
        attack(app_of(handler), messages=messages, examples=1)


def test_refused_on_purpose_is_no_finding() -> None:
    attack(app_of(refuses), examples=2)
    attack(app_of(misspelt, Idempotent(key="id", attempts=1, refuse_on=[AttributeError])), examples=2)


def cancel(message: dict[str, Any], ctx: Context) -> None:
    ctx.session.delete(ctx.session.get_one(Order, message["id"]))


@pytest.mark.parametrize("handler", [cancel, misspelt])
def test_what_can_only_follow_another_message_gets_another_chance(handler: Any) -> None:
    """The cancellation that never met its order in the examples meets it before the verdict; a misspelt one is found."""
    app = app_of(place)
    app.handler(dict, type=CANCEL, policy=BY_ID)(handler)
    made = machine(app)
    for name in (CANCEL, PLACE):
        made.world.play([("publish", name, f'{{"id":{number}}}') for number in range(20)])
    if handler is cancel:
        made.TestCase.tearDownClass()
    else:
        with pytest.raises(NeverHandled, match=f"No message of {CANCEL} was ever handled: 20 published"):
            made.TestCase.tearDownClass()


# assert_idempotent


def test_no_message_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="was given no message"):
        assert_idempotent(place, **ONE)


@pytest.mark.parametrize(
    ("handler", "options", "why"),
    [
        (misspelt, {"tables": Base.metadata}, r"'orders.Place' .*AttributeError: .*sesion|its handler fails"),
        (place, {}, "no such table: kept_order"),
        (place, {"policy": Idempotent(key=Key.header("x-id"))}, "no handler gets to see it:\n  MissingId: "),
    ],
    ids=["misspelt", "tables forgotten", "header absent"],
)
def test_what_is_never_handled_is_told_with_its_error(handler: Any, options: Any, why: str) -> None:
    with pytest.raises(NeverHandled, match=why):
        assert_idempotent(handler, {"id": 1}, **{**ONE, **options}, crash_at=())


SOME = ("after claim", "after commit", "before settle")


@pytest.mark.parametrize(
    ("handler", "messages", "policy"),
    [
        (refuses, [{"id": 1}], BY_ID),
        (misspelt, [{"id": 1}], Idempotent(attempts=1, refuse_on=[AttributeError])),
        (upserts, [{"id": 1}], Policy()),
    ],
    ids=["Refuse", "refuse_on", "not opted in"],
)
def test_messages_that_end_parked_or_are_not_opted_in(handler: Any, messages: Any, policy: Policy) -> None:
    assert_idempotent(handler, *messages, **{**ONE, "policy": policy}, tables=Base.metadata, crash_at=SOME)


def test_state_may_be_objects_that_the_session_knew_and_default_is_row_counts() -> None:
    assert_idempotent(place, {"id": 1}, **ONE, tables=Base, state=orders, crash_at="after commit")

    def adds(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.add(Order(id=len(orders(ctx.session))))

    with pytest.raises(AssertionError, match=r"(?s)state: \{'kept_order': 3\}.*instead of \{'kept_order': 1\}"):
        assert_idempotent(
            adds, {"id": 1}, **{**ONE, "policy": Policy()}, tables=Base.metadata, detect=(), crash_at="before settle"
        )


@pytest.mark.parametrize(
    ("policy", "became"),
    [
        (BY_ID, "it is parked as a conflict"),
        (Idempotent(key="id", on_conflict="redispatch"), "it counts as a duplicate"),
    ],
)
def test_a_key_that_is_too_narrow(policy: Policy, became: str) -> None:
    about: dict[str, Any] = {**ONE, "policy": policy, "tables": Base.metadata, "crash_at": SOME}
    messages = [{"id": 1}, {"id": 1, "sku": "other"}]
    with pytest.raises(NotIdempotent, match=rf"'message-2' has the key of .*'message-1'.*{became} \[conflict\]"):
        assert_idempotent(place, *messages, **about)
    assert_idempotent(place, *messages, **about, detect=DEFAULT - {"conflict"})
    assert_idempotent(place, {"id": 1}, {"id": 1}, {"id": 2}, **about)


def test_chance_and_clock_are_not_blamed_on_a_death() -> None:
    """What the state holds of them differs without any death, too, and the failure says so."""

    def by_chance_only(message: dict[str, Any], ctx: Context) -> None:
        if random.random() < 0.001:
            ctx.session.add(Order(id=message["id"]))

    def draws(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.add(Order(id=message["id"], state=str(uuid4())))

    def dates(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.add(Order(id=message["id"], state=str(datetime.now(UTC).date())))

    about: dict[str, Any] = {**ONE, "tables": Base.metadata, "crash_at": ("before begin", "before commit")}
    for handler in (by_chance_only, draws):
        with pytest.raises(
            NotIdempotent, match=r"with other random values, and without any death.*\n.*state: "
        ) as found:
            assert_idempotent(handler, {"id": 1}, **about, state=orders)
        assert [finding.kind for finding in found.value.findings] == ["random"]
        assert_idempotent(handler, {"id": 1}, **about, state=orders, detect=DEFAULT - {"random"})
    with pytest.raises(NotIdempotent, match=r"two days later, and without any death") as found:
        assert_idempotent(dates, {"id": 1}, **about, state=orders)
    assert [finding.kind for finding in found.value.findings] == ["clock"]
    assert_idempotent(dates, {"id": 1}, **about, state=orders, detect=DEFAULT - {"clock"})
    assert_idempotent(draws, {"id": 1}, **about)


def test_what_differs_from_run_to_run_is_not_blamed_on_a_death() -> None:
    runs = itertools.count()
    with pytest.raises(AssertionError, match="and without any death, the messages have another result") as found:
        assert_idempotent(
            place,
            {"id": 1},
            **{**ONE, "policy": BY_ID},
            tables=Base.metadata,
            state=lambda session: next(runs) // 6,
            crash_at=("before begin",) * 9,
        )
    assert "When the process dies" not in str(found.value)


def test_a_green_test_says_what_it_covered() -> None:
    report = assert_idempotent(
        place,
        {"id": 1},
        **ONE,
        tables=Base.metadata,
        crash_at=("after commit", "before record"),
        detect=DEFAULT - {"file"},
    )
    assert report.deaths == ("after commit",)
    assert report.not_reached == ("before record",)
    assert report.not_looked_for == ("file",)
    assert report.deliveries > 3
    assert report.not_seen == ("Whether the key tells messages apart: one message was given.",)
    assert str(report).startswith(
        "Tested: orders.Place under Idempotent(key='field:id', attempts=1), as the test declares"
    )


def test_rows_that_are_there_before() -> None:
    def setup(session: Session) -> None:
        session.add(Order(id=1))

    about: dict[str, Any] = {"tables": Base.metadata, "setup": setup}
    assert_idempotent(pays, {"id": 1}, **ONE, **about, state=orders, crash_at=SOME)
    assert redeliver(app_of(pays), {"id": 1}, type=PLACE, **about).commits == 1


def test_as_many_deliveries_as_were_asked_for() -> None:
    about: dict[str, Any] = {"type": PLACE, "tables": Base.metadata}
    for times, point, deliveries in [(3, "after commit", 3), (1, "after commit", 2), (3, None, 3)]:
        outcomes = redeliver(app_of(place), {"id": 1}, **about, times=times, crash_at=point).outcomes
        assert len(outcomes) == deliveries
        assert (outcomes[0] is None) == (point is not None)
    with pytest.raises(ValueError, match="at least once"):
        redeliver(app_of(place), {"id": 1}, **about, times=0)


# Silencing


def writes_files(path: Any, message: dict[str, Any], ctx: Context) -> None:
    path.write_text("sold")
    place(message, ctx)


def test_findings_can_be_silenced_in_machine_and_replay(tmp_path: Any) -> None:
    def exports(message: dict[str, Any], ctx: Context) -> None:
        writes_files(tmp_path / "sold.txt", message, ctx)

    app, quiet = app_of(exports), DEFAULT - {"file"}
    schedule = [("publish", PLACE, '{"id":1}'), ("deliver",)]
    with pytest.raises(NotIdempotent, match=r"\[file\]"):
        replay(app, schedule, tables=Base.metadata, rehearse=True)
    replay(app, schedule, tables=Base.metadata, rehearse=True, detect=quiet)
    attack(app, examples=2, rehearse=True, detect=quiet)


def test_kinds_that_nothing_looks_for_are_refused() -> None:
    app = app_of(place)
    with Harness(app, tables=Base.metadata) as harness:
        message = harness.message({"id": 1})
        calls: list[Callable[..., Any]] = [
            partial(redelivery_machine, app, messages=ORDERS),
            partial(replay, app, []),
            partial(assert_idempotent, place, {"id": 1}, **ONE),
            partial(rehearse, harness, message),
        ]
        for call in calls:
            with pytest.raises(ConfigurationError, match=r"kind 'clok'\. Did you mean 'clock'"):
                call(detect={"clok"})
    for call in calls[:2]:
        with pytest.raises(ConfigurationError, match=r"'order' here\. assert_idempotent does"):
            call(detect={"order"})


def test_what_is_compared_once_only_is_found_each_time_that_the_steps_run() -> None:
    """Other processes are asked once; a story that is shortened, or told again, has to come to the same."""
    calls = itertools.count()

    def differs_at_first(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({"text": str(next(calls) == 0)}, to="stock", type="stock.Reserve")

    made = machine(app_of(differs_at_first), rehearse=True, detect={"random", "set order"})
    for _ in range(2):
        with pytest.raises(NotIdempotent, match=r"\[random\]"):
            made.world.play([("publish", PLACE, '{"id":1}'), ("deliver",)])
    made.world.close()


# Steps and arguments that make no sense


@pytest.mark.parametrize(
    ("action", "why"),
    [
        (("fail commit", "nonsense"), "There is no way for COMMIT to fail 'nonsense'. Use one of lost, committed"),
        (("refuse output", "nonsense"), "There is no answer to an output 'nonsense'. Use one of confirm, lose"),
        (("compete", "after lunch"), "There is no crash point 'after lunch'"),
        (("publish",), "can't be taken: missing a required argument: 'type'"),
        ("publish", "'publish' is no step"),
    ],
)
def test_steps_that_do_not_exist_are_refused(action: Any, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        replay(app_of(place), [("publish", PLACE, '{"id":1}'), action], tables=Base.metadata)


def test_arguments_that_make_no_sense_are_refused() -> None:
    class Asynchronous:
        async def __call__(self, message: dict[str, Any], ctx: Context) -> None: ...

    with pytest.raises(ConfigurationError, match="is neither an App nor what"):
        redelivery_machine(None, messages=ORDERS)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="needs Hypothesis strategies"):
        redelivery_machine(app_of(place), messages={})
    with pytest.raises(ConfigurationError, match="are no tables"):
        redeliver(app_of(place), {"id": 1}, type=PLACE, tables=[Base.metadata])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is asynchronous"):
        assert_idempotent(Asynchronous(), {"id": 1}, **ONE)


# Stories


def test_flow_that_keeps_itself_going_says_how_to_end_it() -> None:
    def ticks(message: dict[str, Any], ctx: Context) -> None:
        ctx.send({"id": message["id"] + 1}, to="shop", type=PLACE, delay=60)

    with Harness(app_of(ticks)) as harness:
        harness.most_steps = 10
        harness.send({"id": 1})
        with pytest.raises(AssertionError, match=r"number \d in a chain of messages.*say max_hops=3"):
            harness.rest()
    assert redeliver(app_of(ticks, Idempotent(key="id", max_hops=2)), {"id": 1}, type=PLACE).commits == 3


def test_story_is_shortened_for_so_long_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a run takes its time, hundreds of runs would be needed for the shortest story."""
    monkeypatch.setattr(worlds, "_PATIENCE", 0.0)
    made = machine(app_of(place), invariants=[lambda session: not orders(session)])
    schedule = [("relay",), ("purge",), ("publish", PLACE, '{"id":1}'), ("deliver",)]
    with pytest.raises(PromiseBroken) as first:
        made.world.play(schedule)
    with pytest.raises(PromiseBroken) as found:
        made.world.raise_shortest(schedule, first.value)
    assert "schedule = [('relay',), ('purge',)" in "".join(found.value.__notes__)
    made.world.close()


def test_handler_that_does_not_do_the_same_twice_has_one_story() -> None:
    """Not Hypothesis' own, which says that the test is unreliable, and tells other steps."""
    calls = itertools.count()

    def differs_at_first(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.add(Order(id=message["id"], state=str(next(calls) == 0)))

    with pytest.raises(PromiseBroken, match="The state is not") as found:
        attack(app_of(differs_at_first), state=orders)
    told = "\n".join(found.value.__notes__)
    assert "your handler does not do the same twice" in told
    assert told.count("What happened:") == 1


def test_handler_that_fails_at_its_first_attempt_on_purpose_is_right() -> None:
    def second_time(message: dict[str, Any], ctx: Context) -> None:
        if ctx.attempt == 1:
            raise ConnectionError("flaky")
        place(message, ctx)

    schedule = [("publish", PLACE, '{"id":1}'), ("deliver",)]
    replay(app_of(second_time, Idempotent(key="id")), schedule, tables=Base.metadata, state=orders)


NUMBERED = App("numbered")


@NUMBERED.handler(dict, type="numbered.Mark", policy=Idempotent(key=Key.call(lambda body: str(uuid4()), "chance")))
def marks(message: dict[str, Any]) -> None: ...


def test_a_handler_is_tested_under_the_policy_that_its_app_declares() -> None:
    with pytest.raises(NotIdempotent, match=r"\[unstable key\]"):
        assert_idempotent(marks, {"n": 1})
    assert_idempotent(marks, {"n": 1}, policy=Idempotent(key="n"), type="numbered.Mark")


def by_chance(body: object) -> str:
    return str(uuid4())


CHANCE = Idempotent(key=Key.call(by_chance, "chance"))


@pytest.mark.parametrize("about", [{}, {"type": PLACE}, {"message": dict}, {"type": PLACE, "message": dict}])
def test_the_policy_is_found_wherever_the_app_is(about: dict[str, Any]) -> None:
    """The app is a local variable, and the type is named: the declaration is found all the same."""
    app = App("local")

    @app.handler(dict, type=PLACE, policy=CHANCE)
    def local(message: dict[str, Any]) -> None: ...

    with pytest.raises(NotIdempotent, match=r"\[unstable key\]") as found:
        assert_idempotent(local, {"n": 1}, **about)
    (note,) = found.value.__notes__
    assert note.startswith("Tested: orders.Place under Idempotent(key='call:chance'), as app 'local' declares it.\n")


@pytest.mark.parametrize("about", [{}, {"policy": BY_ID}], ids=["declared", "policy of the test"])
def test_the_effects_of_its_app_are_those_of_a_handler(about: dict[str, Any]) -> None:
    """They are stored with the handling; what does them is not the handler's, and is not run."""
    app, mailed = App("orders"), list[Any]()
    app.effect("mail.receipt", dict)(mailed.append)

    @app.handler(dict, type=PLACE, policy=BY_ID)
    def place(message: dict[str, Any], ctx: Context) -> None:
        ctx.session.add(Order(id=message["id"]))
        ctx.effect("mail.receipt", {"order": message["id"]})

    assert_idempotent(place, {"id": 1}, tables=Base.metadata, **about)
    assert mailed == []


def test_the_policy_of_a_wrapped_function_is_found() -> None:
    def wrapped(message: dict[str, Any]) -> None: ...

    handle = Inbox(InMemoryStore()).wrap(wrapped, dict, type=PLACE, consumer="shop", policy=CHANCE)
    with pytest.raises(NotIdempotent, match=r"\[unstable key\]") as found:
        assert_idempotent(wrapped, {"n": 1})
    assert "as Inbox.wrap(consumer='shop') declares it.\n" in found.value.__notes__[0]
    assert handle.consumer == "shop"


def test_the_settings_of_the_app_change_the_policy() -> None:
    """Opted in, and its key named, by the settings alone."""
    app = App("shop", settings=Settings(messages={PLACE: {"idempotent": True, "key": {"header": "x-order"}}}))

    @app.handler(dict, type=PLACE)
    def settled(message: dict[str, Any]) -> None: ...

    with pytest.raises(NeverHandled, match="MissingId") as found:
        assert_idempotent(settled, {"n": 1})
    assert "key='header:x-order'" in found.value.__notes__[0]


def test_a_policy_is_never_guessed() -> None:
    def undeclared(message: dict[str, Any]) -> None: ...

    with pytest.raises(ConfigurationError, match=r"No app declares a policy for .*undeclared"):
        assert_idempotent(undeclared, {"id": 1}, type=PLACE)
    apps = [app_of(upserts), app_of(upserts, Idempotent())]
    with pytest.raises(ConfigurationError, match="upserts is declared 2 times"):
        assert_idempotent(upserts, {"id": 1})
    assert_idempotent(upserts, {"id": 1}, policy=apps[0].registry.declared[PLACE].policy, tables=Base, crash_at=SOME)


def test_a_method_is_told_apart_from_that_of_another_object() -> None:
    class Shop:
        def place(self, message: dict[str, Any]) -> None: ...

    one, other = Shop(), Shop()
    app = App("shop")
    app.handler(dict, type=PLACE, policy=CHANCE)(one.place)
    with pytest.raises(NotIdempotent, match=r"\[unstable key\]"):
        assert_idempotent(one.place, {"n": 1})
    with pytest.raises(ConfigurationError, match="No app declares a policy"):
        assert_idempotent(other.place, {"n": 1})
