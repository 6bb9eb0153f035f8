"""Webhooks of GitHub, Stripe and all that keep to Standard Webhooks: signed requests, handled once for each id of the provider."""

from __future__ import annotations

import hmac
import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from hashlib import sha256
from http import HTTPStatus
from typing import Final

from idemp.errors import ConfigurationError, Unreadable, needs

with needs("asgi"):
    from starlette.requests import HTTPConnection

    from idemp.integrations.asgi import Refused, Route

__all__ = ["Verify", "github", "standard", "stripe", "webhook"]

Verify = Callable[[HTTPConnection, bytes], str]
WINDOW: Final = 300.0  # seconds by which a signature may be older or newer than the clock
SHORTEST: Final = 16  # bytes of a secret


def webhook(path: str, name: str, verify: Verify) -> Route:
    """Return a route of `Idempotency` that a provider posts to. A forged request claims nothing, and does not reach the endpoint.

    Args:
        path: As Starlette and FastAPI have it.
        name: Of the operation.
        verify: Of `github`, `stripe` or `standard`, or your own: it returns the id of a request, or raises `Refused`.

    Example:
        >>> webhook("/hooks/github", "shop.github", github("a secret of some length")).method
        'POST'
    """
    return Route("POST", path, name, key=verify)


def github(secret: str) -> Verify:
    """Verify `X-Hub-Signature-256`; the key is `X-GitHub-Delivery`, which a redelivery keeps.

    GitHub signs neither a time nor this id: who has recorded a request can play it again under another id, for which TLS is needed.

    Raises:
        ConfigurationError: The secret is too short.

    Example:
        >>> github("short")
        Traceback (most recent call last):
        idemp.errors.ConfigurationError: the secret of the webhook has fewer than 16 bytes: make a longer one
    """
    key = _checked(secret.encode())

    def verify(request: HTTPConnection, body: bytes) -> str:
        _compare([_header(request, "x-hub-signature-256")], "sha256=" + hmac.new(key, body, sha256).hexdigest())
        return _header(request, "x-github-delivery")

    return verify


def stripe(secret: str) -> Verify:
    """Verify `Stripe-Signature`; the key is the `id` of the event.

    Raises:
        ConfigurationError: The secret is too short.

    Example:
        >>> verify = stripe("whsec_a_secret_of_some_length")
    """
    key = _checked(secret.encode())

    def verify(request: HTTPConnection, body: bytes) -> str:
        parts = [part.strip().partition("=") for part in _header(request, "stripe-signature").split(",")]
        signed, stamp = [value for name, _, value in parts if name == "v1"], dict(part[::2] for part in parts).get("t", "")
        _compare(signed, hmac.new(key, stamp.encode() + b"." + body, sha256).hexdigest())
        _fresh(stamp)
        try:
            id = json.loads(body)["id"]
        except (ValueError, KeyError, TypeError):
            id = None
        if not isinstance(id, str):
            raise Unreadable("the event has no id; nothing was done")
        return id

    return verify


def standard(secret: str) -> Verify:
    """Verify as Standard Webhooks 1.0.0 has it, by a symmetric secret (`whsec_…`); the key is `webhook-id`.

    Raises:
        ConfigurationError: The secret is no Base64, or too short.

    Example:
        >>> verify = standard("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    """
    try:
        key = _checked(b64decode(secret.removeprefix("whsec_"), validate=True))
    except ValueError as error:
        raise ConfigurationError(f"the secret of the webhook is none of Standard Webhooks: {error}") from None

    def verify(request: HTTPConnection, body: bytes) -> str:
        id, stamp = _header(request, "webhook-id"), _header(request, "webhook-timestamp")
        expected = b64encode(hmac.new(key, f"{id}.{stamp}.".encode() + body, sha256).digest()).decode()
        _compare(_header(request, "webhook-signature").split(), f"v1,{expected}")
        _fresh(stamp)
        return id

    return verify


def _checked(secret: bytes) -> bytes:
    if len(secret) < SHORTEST:
        raise ConfigurationError(f"the secret of the webhook has fewer than {SHORTEST} bytes: make a longer one")
    return secret


def _header(request: HTTPConnection, name: str) -> str:
    found = request.headers.getlist(name)
    if len(found) != 1:
        raise Refused(HTTPStatus.UNAUTHORIZED, f"the header {name} is needed once; nothing was done")
    return found[0]


def _fresh(stamp: str) -> None:
    """Refuse a request that was recorded, and is played again; the time of this host decides."""
    if not stamp.isascii() or not stamp.isdigit() or abs(time.time() - int(stamp)) > WINDOW:
        raise Refused(HTTPStatus.UNAUTHORIZED, "the signature is too old, or from the future; nothing was done")


def _compare(given: Sequence[str], expected: str) -> None:
    if not any(hmac.compare_digest(each.encode(), expected.encode()) for each in given):
        raise Refused(HTTPStatus.UNAUTHORIZED, "no signature fits; nothing was done")
