"""Mails as effects, by the standard library's client.

The Message-ID is the effect's id: a mail that is sent twice, because a process died before it was recorded, has one and the
same, by which servers and mail programs may tell. SMTP itself promises no more; see "What is not promised".

>>> from idemp import App
>>> from idemp.effects.smtp import Mail, Smtp
>>> app = App("orders", database="sqlite://", broker="local://orders.db")
>>> smtp = Smtp("mail.example.org", sender="Shop <shop@example.org>", user="shop", password=lambda: "from a vault")
>>> _ = app.effect("mail.send", Mail)(smtp)
"""

from __future__ import annotations

import smtplib
import socket
import ssl
import time
from contextlib import contextmanager, suppress
from email.errors import MessageError
from email.message import EmailMessage
from email.policy import SMTP, SMTPUTF8
from email.utils import format_datetime, getaddresses, localtime, parseaddr
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from idemp.effects.secrets import Secret, revealed, without
from idemp.errors import ConfigurationError, EffectLater, EffectRefused

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from idemp.effects.declared import EffectRun

Security = Literal["starttls", "tls", "none"]
_PORTS: Final[dict[str, int]] = {"starttls": 587, "tls": 465, "none": 25}
_PERMANENT: Final = 500
_OK: Final = {250, 251}
_DATA: Final = 250
_GOODBYE_SECONDS: Final = 1.0

_OWN: Final = {"bcc", "cc", "reply-to", "mime-version"}
"""Headers that are made of other fields, beside those that each mail has."""


def _one_address(text: str) -> str:
    """Refuses `ann@example.org, everybody@example.org`: who types an address into a form is to get a mail alone."""
    if len(getaddresses([text])) != 1 or "@" not in parseaddr(text)[1]:
        raise ValueError("this is not one mail address")
    return text


_Line = Annotated[str, StringConstraints(pattern=r"^[^\r\n]*$")]
_Address = Annotated[_Line, AfterValidator(_one_address)]
_Name = Annotated[str, StringConstraints(pattern=r"^[!-9;-~]+$")]


class Mail(BaseModel):
    """A mail to be sent; what `ctx.effect` stores.

    Attributes:
        to: addresses, each `ann@example.org` or `Ann <ann@example.org>`.
        subject: one line.
        text: the plain text.
        html: the same as HTML, if there is one.
        cc: further addresses that all see.
        bcc: addresses that nobody else sees.
        reply_to: where answers go; default the sender.
        headers: further headers; not Message-ID, nor those above.

    Example:
        >>> Mail(to=["ann@example.org"], subject="Your order", text="Thank you.").cc
        []
    """

    model_config = ConfigDict(extra="forbid")

    to: list[_Address] = Field(min_length=1)
    subject: _Line
    text: str
    html: str | None = None
    cc: list[_Address] = []
    bcc: list[_Address] = []
    reply_to: _Line | None = None
    headers: dict[_Name, _Line] = {}

    def recipients(self) -> list[str]:
        """Bare addresses of all, each once."""
        return list(dict.fromkeys(address for _, address in getaddresses([*self.to, *self.cc, *self.bcc])))


class Smtp:
    """Sends mails through one server; itself a function for `@app.effect`. Safe to share between threads.

    A mail goes to all of its recipients or to none: where the server refuses one of them, it is not sent. For recipients
    that shall not depend on each other, declare an effect for each.

    Args:
        host: the server.
        sender: From, and the envelope's sender.
        port: default by `security`.
        security: `starttls` and `tls` check the server's certificate; `none` is for a server on this machine.
        user: login name; without one nobody logs in.
        password: or a function that answers it, asked at each login. It is never shown.
        domain: the right side of Message-IDs; default the sender's.
        timeout: seconds for each answer of the server, and no more than the effect has.
        context: for TLS; default the system's certificates.

    Raises:
        ConfigurationError: a password would travel in the clear, or the sender is no address.

    Example:
        >>> Smtp("localhost", sender="shop@example.org", security="none")
        Smtp(localhost:25, security='none', sender='shop@example.org')
    """

    def __init__(
        self,
        host: str,
        *,
        sender: str,
        port: int | None = None,
        security: Security = "starttls",
        user: str | None = None,
        password: Secret | None = None,
        domain: str | None = None,
        timeout: float = 10.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        if security not in _PORTS:
            raise ConfigurationError(f"security={security!r} is none of {', '.join(map(repr, _PORTS))}.")
        if user is not None and security == "none":
            raise ConfigurationError("The password would travel in the clear.", fix='Use security="starttls" or "tls".')
        _, self._address = parseaddr(sender)
        if "@" not in self._address:
            raise ConfigurationError(f"{sender!r} is no mail address.")
        self._host = host
        self._port = port or _PORTS[security]
        self._sender = sender
        self._security = security
        self._user = user
        self._password = password
        self._domain = domain or self._address.rpartition("@")[2]
        self._timeout = timeout
        self._context = context
        self._name: str | None = None  # of this machine

    def __repr__(self) -> str:
        return f"Smtp({self._host}:{self._port}, security={self._security!r}, sender={self._sender!r})"

    def __call__(self, mail: Mail, run: EffectRun) -> None:
        """Send a mail.

        Raises:
            EffectRefused: the server refuses it for good (5xx), or it can't be written as a mail.
            EffectLater: the server refuses it for now (4xx), can't be reached, or did not say whether it has the mail.
        """
        recipients = mail.recipients()
        international = not all(address.isascii() for address in (*recipients, self._address))
        body = _flat(self._message(mail, run), international=international)
        deadline = time.monotonic() + run.timeout.total_seconds()
        with self._session(deadline) as session:
            if international and not session.has_extn("smtputf8"):
                raise EffectRefused(f"{self._host} takes no addresses beyond ASCII.")
            self._deliver(session, deadline, body, recipients, international=international)

    def _message(self, mail: Mail, run: EffectRun) -> EmailMessage:
        message = EmailMessage(policy=SMTP.clone(cte_type="7bit"))  # not every server takes 8 bits
        try:
            message["From"] = self._sender
            message["To"] = ", ".join(mail.to)
            if mail.cc:
                message["Cc"] = ", ".join(mail.cc)
            if mail.reply_to:
                message["Reply-To"] = mail.reply_to
            message["Subject"] = mail.subject
            message["Date"] = format_datetime(localtime())
            message["Message-ID"] = f"<{run.id}@{self._domain}>"
            for name, value in mail.headers.items():
                if name in message or name.lower() in _OWN or name.lower().startswith("content-"):
                    raise EffectRefused(f"The header {name!r} of a mail can't be given twice.")
                message[name] = value
            message.set_content(mail.text)
            if mail.html is not None:
                message.add_alternative(mail.html, subtype="html")
        except (ValueError, TypeError, LookupError) as error:
            raise EffectRefused(f"The mail can't be written: {error}") from error
        return message

    @contextmanager
    def _session(self, deadline: float) -> Iterator[smtplib.SMTP]:
        """A session ready for mail; what goes wrong in it is translated, and shows no password."""
        password = revealed(self._password)
        if not f"{self._user}{password}".isascii():  # smtplib's error would show the character
            raise EffectLater(f"{self._host}: user or password has a character beyond ASCII, which can't be sent.")
        try:
            session = self._connected()
            try:
                self._hurry(session, deadline)
                session.ehlo_or_helo_if_needed()
                if self._security == "starttls":
                    session.starttls(context=self._tls())
                    session.ehlo()
                if self._user is not None:
                    self._hurry(session, deadline)
                    session.login(self._user, password)
                yield session
            finally:  # whatever comes now, the server has the mail or has it not
                with suppress(smtplib.SMTPException, OSError):
                    if session.sock is not None:
                        session.sock.settimeout(_GOODBYE_SECONDS)
                        session.quit()
                session.close()
        except (EffectLater, EffectRefused) as error:  # what the server said about the mail
            raise type(error)(without(password, error.message)) from None
        except smtplib.SMTPResponseException as error:  # of the session, not of the mail: a login, a greeting
            raise EffectLater(without(password, f"{self._host}: {_said(error.smtp_code, error.smtp_error)}")) from None
        except (smtplib.SMTPException, OSError) as error:
            raise EffectLater(without(password, f"{self._host}: {type(error).__name__}: {error}")) from None

    def _connected(self) -> smtplib.SMTP:
        if self._name is None:
            self._name = socket.getfqdn()  # smtplib asks for it, and so perhaps a name server, for each connection
        if self._security == "tls":
            return smtplib.SMTP_SSL(self._host, self._port, self._name, timeout=self._timeout, context=self._tls())
        return smtplib.SMTP(self._host, self._port, self._name, timeout=self._timeout)

    def _hurry(self, session: smtplib.SMTP, deadline: float) -> None:
        """The next answer has so much time, and all of them together no more than the effect has."""
        left = deadline - time.monotonic()
        if left <= 0 or session.sock is None:
            raise TimeoutError("no time is left")
        session.sock.settimeout(min(self._timeout, left))

    def _tls(self) -> ssl.SSLContext:
        return self._context or ssl.create_default_context()

    def _deliver(
        self,
        session: smtplib.SMTP,
        deadline: float,
        body: bytes,
        recipients: Sequence[str],
        *,
        international: bool,
    ) -> None:
        options = ["SMTPUTF8", "BODY=8BITMIME"] if international else []
        if session.has_extn("size"):
            options.append(f"SIZE={len(body)}")
        self._hurry(session, deadline)
        _judge("the sender", *session.mail(self._address, options))
        refused: list[tuple[int, str]] = []
        for address in recipients:
            self._hurry(session, deadline)
            code, answer = session.rcpt(address)
            if code not in _OK:
                refused.append((code, f"{address}: {_said(code, answer)}"))
        if refused:
            with suppress(smtplib.SMTPException, OSError):
                session.rset()
            reasons = "; ".join(reason for _, reason in refused)
            # Nobody got it: if the others had, trying again would send it to them twice.
            if any(code >= _PERMANENT for code, _ in refused):
                raise EffectRefused(f"The mail was sent to nobody, since not all may get it. {reasons}")
            raise EffectLater(f"The mail was sent to nobody yet. {reasons}")
        self._hurry(session, deadline)
        try:
            code, answer = session.data(body)
        except smtplib.SMTPDataError as error:
            code, answer = error.smtp_code, error.smtp_error  # type: ignore[assignment]
        _judge("the mail", code, answer)


def _judge(what: str, code: int, answer: Any) -> None:
    if code == _DATA:
        return
    said = f"{what} was refused: {_said(code, answer)}"
    raise EffectRefused(said) if code >= _PERMANENT else EffectLater(said)


def _said(code: int, answer: Any) -> str:
    text = answer.decode("utf-8", "replace") if isinstance(answer, bytes) else str(answer)
    return f"{code} {' '.join(text.split())}"


def _flat(message: EmailMessage, *, international: bool) -> bytes:
    """As it is sent. Refuses what would have other headers than it was given.

    Python decodes encoded words when it parses a value: `=?utf-8?q?a=0D=0ABcc:_b?=` has a line end by then, which
    releases without the mend of CVE-2024-6923 write as it stands.
    """
    try:
        flat = message.as_bytes(policy=SMTPUTF8 if international else SMTP)
    except (ValueError, MessageError) as error:
        raise EffectRefused(f"The mail can't be written: {error}") from error
    lines = flat.partition(b"\r\n\r\n")[0].split(b"\r\n")
    names = [line.partition(b":")[0].decode("utf-8", "replace") for line in lines if not line.startswith((b" ", b"\t"))]
    if names != message.keys() or any(b"\r" in line or b"\n" in line for line in lines):
        raise EffectRefused("The mail can't be written: one of its headers would hold another one.")
    return flat
