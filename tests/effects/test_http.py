"""Requests: done once by a server that honours the key, and what each answer means."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from pydantic import ValidationError

from idemp import App, ConfigurationError, IdempError
from idemp.broker.memory import InMemoryBroker
from idemp.effects import EffectLater, EffectRefused, EffectRunner
from idemp.effects.http import Http, Request
from idemp.inbox.memory import InMemoryStore
from idemp.testing.clock import FakeClock
from tests.effects.conftest import Web, a_run, key_of

SECRET = "Bearer s3cret"


def asked(web: Web, *answer: Any, **options: Any) -> IdempError:
    web.answer = lambda _: answer
    with pytest.raises((EffectLater, EffectRefused)) as caught:
        Http(web.url, headers={"Authorization": lambda: SECRET}, **options)(Request(path="/charges?x=1"), a_run())
    assert SECRET not in str(caught.value)
    return caught.value


def test_each_effect_is_done_once_though_answers_get_lost(web: Web) -> None:
    """The server did it, and nobody heard: asked again under the same key, it does nothing more."""
    clock, web.lost_answers = FakeClock(), 5
    app = App("shop", store=InMemoryStore(clock), broker=InMemoryBroker(clock), clock=clock)
    app.effect("charge", Request)(Http(web.url))
    ids = []
    for number in range(20):
        with app.initiate() as unit:
            ids.append(unit.effect("charge", Request(path="/charges", json={"n": number})))
    runner = EffectRunner(app.store.upkeep, "shop", app.registry.effects)
    for _ in range(3):
        while runner.run_once().taken:
            pass
        clock.advance(timedelta(minutes=1))
    assert len(web.asked) == 25
    assert set(web.done) == {key_of(id_) for id_ in ids}
    assert sorted(web.done.values()) == sorted(b'{"n":%d}' % number for number in range(20))
    assert app.store.upkeep.pending_count() == 0


def test_what_is_sent(web: Web) -> None:
    run = a_run()
    answer = Http(f"{web.url}/v1/", headers={"Authorization": SECRET}).send(
        Request(method="PUT", path="/a/b?c=d", json=[1], headers={"X-Tenant": "7", "idempotency-key": "mine"}), run
    )
    ((method, path, headers, body),) = web.asked
    assert (method, path, body, answer.status) == ("PUT", "/v1/a/b?c=d", b"[1]", 201)
    assert headers["Idempotency-Key"] == key_of(run.id)
    assert (headers["Authorization"], headers["X-Tenant"]) == (SECRET, "7")


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 422, 301, 302, 307])
def test_refused(web: Web, status: int) -> None:
    error = asked(web, status, {"Location": "http://127.0.0.1:1/elsewhere"}, b"")
    assert isinstance(error, EffectRefused)
    assert str(status) in error.message
    assert len(web.asked) == 1, "redirects are not followed"


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503])
def test_tried_again(web: Web, status: int) -> None:
    error = asked(web, status, {}, b"")
    assert isinstance(error, EffectLater)
    assert error.after is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7),
        ("80000", 80000),
        ("999999", 86400),
        ("-5", None),
        ("soon", None),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0),
        ("9" * 99, None),
    ],
)
def test_retry_after(web: Web, value: str, seconds: float | None) -> None:
    error = asked(web, 429, {"Retry-After": value}, b"")
    assert isinstance(error, EffectLater)
    assert error.after == (None if seconds is None else timedelta(seconds=seconds))


def test_retry_after_a_date(web: Web) -> None:
    error = asked(web, 503, {"Retry-After": format_datetime(datetime.now(UTC) + timedelta(seconds=60))}, b"")
    assert isinstance(error, EffectLater)
    assert error.after is not None
    assert timedelta(seconds=50) < error.after <= timedelta(seconds=60)


def test_retry_after_a_date_by_the_servers_clock(web: Web) -> None:
    """This host's clock may be hours ahead."""
    there = datetime.now(UTC) - timedelta(hours=3)
    headers = {"date": format_datetime(there), "retry-after": format_datetime(there + timedelta(seconds=60))}
    assert Http(web.url)._asked_for(headers) == timedelta(seconds=60)


def test_answers_are_bounded(web: Web) -> None:
    web.answer = lambda _: (200, {}, b"x" * 500_000)
    answer = Http(web.url, largest_answer=1000).send(Request(path="/"), a_run())
    assert len(answer.body) == 1000


def test_no_answer_in_time(web: Web) -> None:
    import threading

    release = threading.Event()
    web.answer = lambda _: ((release.wait(5) and 200) or 200, {}, b"")
    with pytest.raises(EffectLater, match="no answer: ReadTimeout"):
        Http(web.url)(Request(path="/"), a_run(timeout=timedelta(seconds=0.1)))
    release.set()


def test_nobody_there() -> None:
    with pytest.raises(EffectLater, match="no answer: ConnectError"):
        Http("http://127.0.0.1:1")(Request(path="/"), a_run())


@pytest.mark.parametrize("path", ["charges", "http://elsewhere/", "/a b", "/a\r\nX: y", "/a#b",
                                  "/../admin", "/a/./b", "/%2E%2e/admin", "/a%2f../b", "/..%5cadmin", "/.."])  # fmt: skip
def test_paths_stay_below_the_base(path: str) -> None:
    with pytest.raises(ValidationError):
        Request(path=path)


def test_paths_may_have_dots_elsewhere() -> None:
    assert Request(path="/v1.2/..a/b..?next=/../c").path == "/v1.2/..a/b..?next=/../c"


@pytest.mark.parametrize("headers", [{"X": "a\r\nEvil: 1"}, {"X\r\nY": "1"}, {"X Y": "1"}, {"": "1"}, {"X": "é"}])
def test_headers_can_not_be_smuggled(headers: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        Request(path="/", headers=headers)


def test_stored_headers_do_not_stand_beside_secret_ones(web: Web) -> None:
    """However they are written: a server may take the first of two, or the last."""
    Http(web.url, headers={"Authorization": SECRET}).send(
        Request(path="/", headers={"authorization": "Bearer mine", "accept-encoding": "gzip"}), a_run()
    )
    ((_, _, headers, _),) = web.asked
    assert [value for name, value in headers.items() if name.lower() == "authorization"] == [SECRET]
    assert [value for name, value in headers.items() if name.lower() == "accept-encoding"] == ["identity"]


@pytest.mark.parametrize("secret", ["Bearer s3cret\n", "Bearer s3cret ", "Bearer s3cret\\\x01", "Bearer s3crét"])
def test_a_secret_that_can_not_be_sent_is_not_shown(web: Web, secret: str) -> None:
    """Read from a file, with the line end of the file: what httpx says of it has all of it, escaped."""
    with pytest.raises(EffectLater, match="header Authorization") as caught:
        Http(web.url, headers={"Authorization": lambda: secret})(Request(path="/"), a_run())
    assert "s3cr" not in f"{caught.value!r} {caught.value} {caught.value.__cause__} {caught.value.__context__}"
    assert not web.asked


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("ftp://a", {}),
        ("a.example.org", {}),
        ("https://me:secret@a.example.org", {}),
        ("http://a.example.org", {"A": "b"}),
        ("https://a.example.org/v1#x", {}),
        ("https://a.example.org/v1?", {}),
        ("https://a.example.org:99999", {}),
        ("https://[::1", {}),
        ("https://a.example.org\n", {}),
        ("https://a.example.org", {"idempotency-key": "mine"}),
    ],
)
def test_wrong_base_urls(url: str, headers: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Http(url, headers=headers)
    assert "secret" not in str(caught.value)
