"""Webhooks: the vectors of the providers' own pages, and forged, old and repeated requests."""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from hashlib import sha256
from hmac import digest

import pytest
import stripe as theirs
import time_machine
from starlette.requests import HTTPConnection

from idemp import ConfigurationError
from idemp.integrations.webhooks import Verify, github, standard, stripe
from tests.integrations.http_shop import SECRET
from tests.integrations.test_asgi import Shop, on_sqlite, shop

__all__ = ["shop"]

BODY = json.dumps({"id": "evt_1", "type": "charge.succeeded"}).encode()


def by_github(body: bytes, stamp: int, id: str, secret: str = SECRET) -> dict[str, str]:
    return {"x-github-delivery": id, "x-hub-signature-256": "sha256=" + digest(secret.encode(), body, sha256).hex()}


def by_stripe(body: bytes, stamp: int, id: str, secret: str = SECRET) -> dict[str, str]:
    signature = digest(secret.encode(), f"{stamp}.".encode() + body, sha256).hex()
    return {"stripe-signature": f"t={stamp},v0=none,v1={'0' * 64},v1={signature}"}


def by_standard(body: bytes, stamp: int, id: str, secret: str = SECRET) -> dict[str, str]:
    signature = digest(b64decode(secret.removeprefix("whsec_")), f"{id}.{stamp}.".encode() + body, sha256)
    signed = f"v1a,none v1,{b64encode(b'other').decode()} v1,{b64encode(signature).decode()}"
    return {"webhook-id": id, "webhook-timestamp": str(stamp), "webhook-signature": signed}


PROVIDERS: dict[str, Callable[..., dict[str, str]]] = {"github": by_github, "stripe": by_stripe, "standard": by_standard}
every_provider = pytest.mark.parametrize("provider", PROVIDERS)


def request(headers: Mapping[str, str]) -> HTTPConnection:
    return HTTPConnection({"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})


def test_vectors_of_the_providers() -> None:
    """GitHub: Validating webhook deliveries, Testing the webhook payload validation. Standard Webhooks: the example of its page."""
    signed = "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    headers = {"x-hub-signature-256": signed, "x-github-delivery": "72d3162e"}
    assert github("It's a Secret to Everybody")(request(headers), b"Hello, World!") == "72d3162e"
    headers = {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    with time_machine.travel(1614265330):
        assert standard(SECRET)(request(headers), b'{"test": 2432232314}') == headers["webhook-id"]
    # Stripe's page has no vector, but its library signs and verifies.
    stamp = int(time.time())
    ours = by_stripe(BODY, stamp, "", "whsec_a_secret_of_some_length")
    assert theirs.WebhookSignature.verify_header(BODY.decode(), ours["stripe-signature"], "whsec_a_secret_of_some_length", 300)
    made = f"t={stamp},v1={theirs.WebhookSignature._compute_signature(f'{stamp}.{BODY.decode()}', SECRET)}"
    assert stripe(SECRET)(request({"stripe-signature": made}), BODY) == "evt_1"


@on_sqlite
@every_provider
def test_a_request_is_handled_once_and_a_forged_one_not_at_all(shop: Shop, provider: str) -> None:
    now, sign = int(time.time()), PROVIDERS[provider]

    def post(headers: Mapping[str, str], body: bytes = BODY) -> tuple[int, bool]:
        answer = shop.client.post(f"/hooks/{provider}", content=body, headers=headers)
        return answer.status_code, "idempotent-replayed" in answer.headers

    genuine = sign(BODY, now, "evt_1")
    other = b64encode(b"another secret that is long").decode()
    forged: list[Mapping[str, str]] = [{}, sign(BODY + b" ", now, "evt_1"), sign(BODY, now, "evt_1", other)]
    forged += [{name: value for name, value in genuine.items() if name != missing} for missing in genuine]
    forged += [{**genuine, name: value[:-1] + "é"} for name, value in genuine.items() if "signature" in name]
    if provider != "github":
        forged += [sign(BODY, now - 400, "evt_1"), sign(BODY, now + 400, "evt_1")]
    if provider == "standard":
        forged.append({**genuine, "webhook-id": "evt_2"})
    assert [post({name: value.encode() for name, value in each.items()})[0] for each in forged] == [401] * len(forged)
    assert shop.claims() == shop.placed() == 0
    assert [post(genuine), post(genuine)] == [(200, False), (200, True)]
    worded = b'{"id":"evt_1","again":true}'  # a redelivery, worded and signed anew
    assert post(sign(worded, now + 9, "evt_1"), worded) == (200, True)
    assert (shop.claims(), shop.placed()) == (1, 1)
    null = b'{"id": "evt_3", "more": "%s"}' % (b"x" * 1000)  # the endpoint refuses it, until it is mended
    assert [post(sign(null, now, "evt_3"), null) for _ in range(2)] == [(422, False), (422, False)]
    long = sign(b'{"id": "%s"}' % (b"x" * 300), now, "x" * 300)
    assert post(long, b'{"id": "%s"}' % (b"x" * 300))[0] == 400


@on_sqlite
def test_events_without_an_id_are_refused(shop: Shop) -> None:
    for body in (b"no json", b"[]", b"{}", b'{"id": 7}'):
        answer = shop.client.post("/hooks/stripe", content=body, headers=by_stripe(body, int(time.time()), ""))
        assert answer.status_code == 400
    assert shop.claims() == 0


@pytest.mark.parametrize("make", [github, stripe, standard])
def test_a_short_secret_is_refused(make: Callable[[str], Verify]) -> None:
    for secret in ("", "whsec_", "whsec_AAAA", "short"):
        with pytest.raises(ConfigurationError, match="the secret of the webhook"):
            make(secret)
