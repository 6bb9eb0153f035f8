"""What the test kit says when a handler does not survive redelivery."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

Kind = Literal[
    "clock", "random", "counter", "set order", "environment", "second connection", "network", "process", "file",
    "memory", "mutation", "check then insert", "swallowed error", "redelivered", "transaction ended", "unstable key",
    "after commit", "order", "conflict",
]  # fmt: skip

DEFAULT_KINDS: Final[frozenset[Kind]] = frozenset({
    "clock", "random", "counter", "set order", "environment", "second connection", "network", "process", "file",
    "memory", "mutation", "check then insert", "swallowed error", "redelivered", "transaction ended", "unstable key",
    "after commit", "conflict",
})  # fmt: skip
"""What is looked for if nothing else is said: everything but "order", which only `assert_idempotent` can look for: many
correct handlers depend on the order of their messages."""

_WIDTH: Final = 110

WHY: Final[dict[str, str]] = {
    "clock": (
        "An attempt that dies is run again later: what the first one promised (to a log, a caller, another "
        "system) and what the second one sends differ. Take the time from the message, or from a column that "
        "the first attempt commits."
    ),
    "random": (
        "Each attempt invents something else, so nobody can tell that both are about the same thing. Derive "
        "it from the message: uuid5(namespace, ctx.message_id), or the ids that idemp gives to outputs."
    ),
    "counter": (
        "A number that counts runs counts attempts, too, and starts again with each process. Count rows in "
        "the database."
    ),
    "set order": (
        "The order of a set differs from process to process, so the outputs of a second attempt are other "
        "ones under the same ids. Sort before you emit."
    ),
    "environment": (
        "Another worker, or the same one after a restart, has another process id, host name and hash() of texts, "
        "so a second attempt sends other outputs under the same ids. Take from the message or the settings what "
        "you send, and use hashlib for digests."
    ),
    "second connection": (
        "It commits by itself: it stays when the handling is rolled back, and happens again with the next "
        "attempt. Use ctx.session or ctx.connection, which are the claim's own transaction."
    ),
    "network": (
        "It is not taken back when the handling is rolled back, and is done again with the next attempt: the "
        "customer gets two e-mails, or one for an order that does not exist. Emit a message, and let a "
        "consumer of its own do it. If it is a metric that may count attempts, don't look for this kind."
    ),
    "process": "Another process is not rolled back with the handling. Emit a message, and let its consumer start it.",
    "file": (
        "A file is not rolled back with the handling, and other hosts don't see it. Write a row, or emit a "
        "message to somebody who writes files under a name derived from the message's id."
    ),
    "memory": (
        "It is not rolled back with the handling, is gone with the process, and differs between workers: what "
        "the handler does next depends on which of them it runs in. Keep it in the database; a pure cache may "
        "be a functools.lru_cache."
    ),
    "mutation": (
        "Whoever looks at the message afterwards (a second handler, a log, a test) sees another one. Work on a copy."
    ),
    "check then insert": (
        "Two workers that handle both at the same time look before either has inserted, and both insert. Put "
        "a unique constraint on what must not be there twice, or name it as the message's key."
    ),
    "swallowed error": (
        "The handling is committed although a part of it failed, and is never tried again. Let errors out, or "
        "use begin_nested() around what may fail and catch only what you expect."
    ),
    "redelivered": (
        "A first attempt may have died before it did anything, and a redelivery may be of a message that "
        "nobody handled. The claim has answered that question already: whenever the handler runs, it is the "
        "first time that counts."
    ),
    "transaction ended": (
        "Claim, effects and outputs are committed together or not at all, and idemp does that. Return to "
        "commit, raise to roll back."
    ),
    "unstable key": (
        "A redelivery that is counted by another id is handled once more. Name a field of the message, or use "
        "a digest that is the same everywhere (hashlib): hash() of a text differs from process to process."
    ),
    "after commit": (
        "A worker that dies right after COMMIT never does it, and the redelivery is a duplicate that runs "
        "nothing. Emit an output: it is stored with the effects, and sent however often the worker dies."
    ),
    "conflict": (
        "Two different messages have one key, so the consumer takes the second for a copy of the first and never runs "
        "its handler. Name all the fields that tell messages apart: key=('tenant', 'id')."
    ),
    "order": (
        "Brokers redeliver out of order. Make it independent (relative updates, versions in the message), or "
        "have the messages of one key ordered."
    ),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why a handler is not idempotent.

    Attributes:
        kind: short and stable.
        handler: whose fault it is.
        what: what was seen.

    Example:
        >>> print(Finding("mutation", "place_order", "it changed its message"))
        place_order: it changed its message [mutation]
          Whoever looks at the message afterwards (a second handler, a log, a test) sees another one. Work on a copy.
    """

    kind: Kind
    handler: str
    what: str

    def __str__(self) -> str:
        why = textwrap.fill(WHY[self.kind], width=_WIDTH, initial_indent="  ", subsequent_indent="  ")
        return f"{self.handler}: {self.what} [{self.kind}]\n{why}"


class NotIdempotent(AssertionError):
    """A handler does not survive redelivery.

    Attributes:
        findings: the reasons.

    Example:
        >>> raise NotIdempotent([Finding("file", "export", "it wrote the file out.csv")])
        Traceback (most recent call last):
        ...
        idemp.testing.findings.NotIdempotent: 1 reason why redelivery changes the result:
        - export: it wrote the file out.csv [file]
          A file is not rolled back with the handling, ...
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        number = "1 reason" if len(self.findings) == 1 else f"{len(self.findings)} reasons"
        told = "".join(f"\n- {finding}" for finding in self.findings)
        super().__init__(f"{number} why redelivery changes the result:{told}")
