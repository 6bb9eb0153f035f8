"""HTTP requests as effects. Needs the extra: `pip install 'idemp[http]'`.

Each has the effect's id as `Idempotency-Key`, as the IETF's draft writes it (draft-ietf-httpapi-idempotency-key-header): a
server that honours it does once what it is asked twice.

>>> from idemp import App
>>> from idemp.effects.http import Http, Request
>>> app = App("orders", database="sqlite://", broker="local://orders.db")
>>> pay = Http("https://pay.example.org/v1", headers={"Authorization": lambda: "Bearer from-a-vault"})
>>> _ = app.effect("payment.capture", Request)(pay)
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal
from urllib.parse import SplitResult, unquote, urlsplit

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

from idemp.effects.secrets import Secret, revealed, without
from idemp.errors import ConfigurationError, EffectLater, EffectRefused

try:
    import httpx
except ModuleNotFoundError as error:
    raise ConfigurationError(f"HTTP effects need {error.name}.", fix="pip install 'idemp[http]'") from error

if TYPE_CHECKING:
    from idemp.effects.declared import EffectRun

LARGEST_ANSWER: Final = 64 * 1024
_ALSO_LATER: Final = {408, 409, 425, 429}
_SUCCESS: Final = range(200, 300)
_SERVER_ERROR: Final = 500
_KEY: Final = "Idempotency-Key"
_OWN: Final = {_KEY.lower(), "host", "content-length", "transfer-encoding", "connection", "accept-encoding"}
_HEADER_NAME: Final = r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$"
_HEADER_VALUE: Final = r"^([!-~]([\t -~]*[!-~])?)?$"


class Request(BaseModel):
    """A request to be made; what `ctx.effect` stores. Secrets belong to `Http`, not here.

    Attributes:
        path: below the base URL, with its query: `/charges?expand=fees`; none of its segments is `.` or `..`.
        json_body: what is sent as JSON; `None` for no body.
        method: a method that changes something.
        headers: further headers.

    Example:
        >>> Request(path="/charges", json={"cents": 995}).method
        'POST'
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    path: str = Field(pattern=r"^/[^\s#\\]*$")
    json_body: Any = Field(default=None, alias="json")
    method: Literal["POST", "PUT", "PATCH", "DELETE"] = "POST"
    headers: dict[
        Annotated[str, StringConstraints(pattern=_HEADER_NAME)],
        Annotated[str, StringConstraints(pattern=_HEADER_VALUE)],
    ] = {}

    @field_validator("path")
    @classmethod
    def _stays_below(cls, path: str) -> str:
        segments = unquote(path.partition("?")[0]).replace("\\", "/").split("/")
        if "." in segments or ".." in segments:
            raise ValueError("a segment of the path is . or .., by which it may leave the base URL")
        return path


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said that did what it was asked.

    Attributes:
        status: 200 to 299.
        headers: by lower-case name.
        body: its first bytes; what is beyond `largest_answer` was not read.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes


class Http:
    """Makes requests to one server; itself a function for `@app.effect`. Safe to share between threads.

    2xx is done. Tried again: no answer, or half of one, 5xx, 408, 409, 425 and 429, after the time that `Retry-After` asks
    for. Refused: all other 4xx, and redirects, which are not followed.

    Args:
        base_url: `https://…`; paths are below it. `http://…` only to this machine, or without secret headers.
        headers: sent with each request; values, or functions that answer them, are secrets: they are never shown.
        timeout: seconds for a whole request, and no more than the effect has.
        longest_wait: to which `Retry-After` is cut.
        largest_answer: bytes of an answer that are read.
        transport: of httpx, for tests.

    Raises:
        ConfigurationError: a base URL that is none, has a password in it, or would carry secrets in the clear.

    Example:
        >>> Http("https://pay.example.org/v1", headers={"Authorization": "Bearer s3cret"})
        Http('https://pay.example.org/v1')
    """

    def __init__(
        self,
        base_url: str,
        *,
        headers: Mapping[str, Secret] | None = None,
        timeout: float = 20.0,
        longest_wait: timedelta = timedelta(days=1),
        largest_answer: int = LARGEST_ANSWER,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        parts = _parts_of(base_url)
        if parts is None or not parts.hostname:
            raise ConfigurationError(
                "The base URL of an HTTP effect is http(s)://host, with a path at most.",
                fix="Give credentials as headers= of their own; they are never shown.",
            )
        here = parts.hostname in {"localhost", "127.0.0.1", "::1"}
        if headers and parts.scheme == "http" and not here:
            raise ConfigurationError(f"Headers for {parts.hostname} would travel in the clear.", fix="Use https://.")
        if any(name.lower() == _KEY.lower() for name in headers or {}):
            raise ConfigurationError(f"{_KEY} is the effect's id, and given by nobody else.", fix="Leave it out.")
        self._base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        self._timeout = timeout
        self._longest_wait = longest_wait
        self._largest_answer = largest_answer
        self._transport = transport
        self._tls = ssl.create_default_context()

    def __repr__(self) -> str:
        return f"Http({self._base_url!r})"

    def __call__(self, request: Request, run: EffectRun) -> None:
        """Make a request.

        Raises:
            EffectRefused: the server will never do it.
            EffectLater: it may later, or nobody knows whether it did.
        """
        self.send(request, run)

    def send(self, request: Request, run: EffectRun) -> Answer:
        """As calling it, with the server's answer, for effects of your own around it.

        Raises:
            EffectRefused: the server will never do it.
            EffectLater: it may later, or nobody knows whether it did.
        """
        secrets = self._secrets()
        taken = _OWN | {name.lower() for name in secrets}
        given = {name: value for name, value in request.headers.items() if name.lower() not in taken}
        # Nothing is unpacked: a small answer could become a large one.
        headers = {"Accept-Encoding": "identity", **given, **secrets, _KEY: f'"{run.id}"'}
        what = f"{request.method} {urlsplit(self._base_url).hostname}{request.path.partition('?')[0]}"
        seconds = min(self._timeout, run.timeout.total_seconds())
        try:
            answer = self._made(request, headers, seconds)
        except httpx.InvalidURL as error:
            raise EffectRefused(f"{what}: {error}") from None
        except (httpx.HTTPError, ValueError) as error:
            told = f"{what}: no answer: {type(error).__name__}: {error}"
            for secret in secrets.values():  # of "Bearer …" each part
                for part in (secret, *secret.split()[1:]):
                    told = without(part, told)
            raise EffectLater(told) from None
        if answer.status in _SUCCESS:
            return answer
        said = f"{what}: {answer.status}"
        if answer.status >= _SERVER_ERROR or answer.status in _ALSO_LATER:
            raise EffectLater(said, after=self._asked_for(answer.headers))
        raise EffectRefused(f"{said}, and redirects are not followed" if answer.status < 400 else said)  # noqa: PLR2004

    def _secrets(self) -> dict[str, str]:
        """Refuses what can't be a header before httpx does, which shows it."""
        secrets = {name: revealed(secret) for name, secret in self._headers.items()}
        for name, value in secrets.items():
            if re.fullmatch(_HEADER_VALUE, value) is None:
                raise EffectLater(
                    f"The value of the header {name} for {self._base_url} can't be sent: a line end or a blank at its end, "
                    "perhaps of the file that it was read from, or a character beyond ASCII"
                )
        return secrets

    def _made(self, request: Request, headers: Mapping[str, str], seconds: float) -> Answer:
        deadline = time.monotonic() + seconds
        body: dict[str, Any] = {} if request.json_body is None else {"json": request.json_body}
        url = self._base_url + request.path
        # A client for each: no idle connection that a server may be closing just when it is used again.
        with (
            httpx.Client(
                follow_redirects=False, transport=self._transport, trust_env=False, verify=self._tls, timeout=seconds
            ) as client,
            client.stream(request.method, url, headers=headers, **body) as response,
        ):
            content = b""
            for part in response.iter_raw(8192):
                content += part
                if len(content) >= self._largest_answer or time.monotonic() > deadline:
                    break  # its status says what became of it; an endless answer is left where it is
            return Answer(response.status_code, dict(response.headers), content[: self._largest_answer])

    def _asked_for(self, headers: Mapping[str, str]) -> timedelta | None:
        """Return what `Retry-After` says: seconds, or a date by the server's clock; cut to the longest wait."""
        if (value := headers.get("retry-after")) is None:
            return None
        try:
            if value.strip().isdigit():
                wanted = timedelta(seconds=int(value))
            else:
                now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
                wanted = _in_utc(parsedate_to_datetime(value)) - _in_utc(now)
        except (ValueError, TypeError, OverflowError):
            return None
        return min(max(wanted, timedelta(0)), self._longest_wait)


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=moment.tzinfo or UTC)


def _parts_of(base_url: str) -> SplitResult | None:
    """`None` if it is more or less than `http(s)://host[:port][/path]`."""
    try:
        parts = urlsplit(base_url)
        _ = parts.port  # is looked at only now
    except ValueError:
        return None
    more = parts.username is not None or any(mark in base_url for mark in "?#\\") or not base_url.isprintable()
    return None if more or " " in base_url or parts.scheme not in {"http", "https"} else parts
