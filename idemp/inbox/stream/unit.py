"""The unit of work over a stream: it reads at the claim, and appends one commit at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from idemp.errors import ConfigurationError, UnaddressableMessage
from idemp.inbox.content import Handling, Sending
from idemp.inbox.port import Claimed, Verdict
from idemp.inbox.small import PlainUnit
from idemp.inbox.stream.known import KnownCommits
from idemp.inbox.stream.port import Commit
from idemp.inbox.stream.session import StreamSession

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime, timedelta
    from types import TracebackType

    from idemp.clock import Clock
    from idemp.inbox.port import Claim
    from idemp.inbox.stream.port import Found, Streams
    from idemp.messages import Output


class StreamUnit(PlainUnit):
    """One handling of one message: a stream that was read, and the commit that is to be appended to it.

    Args:
        streams: where they are.
        clock: source of time.
        claims: what it is going to claim; with `late` the stream is read now, before the handler, and the claim comes after.
        late: whether the handler comes before the claim.
        known: what this process has read of the streams before; default: nothing.
    """

    def __init__(
        self,
        streams: Streams,
        clock: Clock,
        claims: Sequence[Claim] = (),
        *,
        late: bool = False,
        known: KnownCommits | None = None,
    ) -> None:
        self._streams = streams
        self._clock = clock
        self._claim: Claim | None = None
        self._outputs: tuple[Output, ...] = ()
        self._pending = False
        self._known = known or KnownCommits(streams)
        self.session = self.connection = StreamSession(self._known)
        if late and claims:
            self.session.enter(stream_name(claims[0]))

    def claim(self, claim: Claim) -> Claimed:
        """Look for the commit of this id; without one, read the stream, whose next number decides at COMMIT.

        Nobody else is kept from handling the same message meanwhile: of several, one will be appended.
        """
        self.flush()
        name = stream_name(claim)
        found = self._streams.find(name, claim.consumer, claim.id.key)
        if found is not None:
            return answer(found, claim)
        if not self.session.is_open:
            self.session.enter(name)
        self._claim = self._claim or claim
        return Claimed(Verdict.CLAIMED)

    def claim_all(self, claims: Sequence[Claim], wait: timedelta) -> Sequence[Claimed]:
        """`claim` for one.

        Raises:
            ConfigurationError: there are several, and no append covers them.
        """
        if len(claims) > 1:
            raise _one_message(len(claims))
        return super().claim_all(claims, wait)

    def look_all(self, claims: Sequence[Claim]) -> Sequence[Claimed]:
        """By reading."""
        found = [(claim, self._streams.find(stream_name(claim), claim.consumer, claim.id.key)) for claim in claims]
        return [Claimed(Verdict.CLAIMED) if each is None else answer(each, claim) for claim, each in found]

    def store_outputs(self, claim: Claim, outputs: Sequence[Output], relay_after: timedelta | None) -> None:
        """Keep outputs for the commit.

        Raises:
            ConfigurationError: it is another message's commit already.
        """
        self.flush()
        if claim != self._claim:
            raise _one_message(2)
        self._outputs, self._pending = tuple(outputs), relay_after is not None

    def purged_before(self, consumer: str) -> datetime | None:
        """No claim is ever deleted: the stream is the record."""
        del consumer
        return None

    def raised(self, error: Exception) -> bool:
        """Whether its session raised this error."""
        return error is self.session.raised

    def flush(self) -> None:
        """Nothing is held back here; a refusal that the handler swallowed is raised."""
        if self.session.broken is not None:
            raise self.session.broken

    def commit(self) -> None:
        """Append.

        Raises:
            AlreadyCommitted: another delivery of the message was faster.
            WrongVersion: another message of the same stream was.
            CommitUnknown: the answer was lost.
        """
        self.flush()
        claim = self._claim
        if claim is None:
            return
        stream = self.session.stream
        commit = Commit(
            stream=stream.name,
            number=stream.number + 1,
            first_version=stream.next_version,
            claim=claim,
            committed_at=self._clock.now(),
            outputs=self._outputs,
        )
        self._streams.append(commit, pending=self._pending)
        if stream.commits and (other := stream.commits[-1].claim.consumer) != claim.consumer:
            self._known.warned.shared(claim.consumer, other, stream.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        broken = self.session.broken
        if broken is not None and isinstance(error, Exception) and error is not broken:
            raise broken from error  # the handler swallowed it, and failed of its consequences


def stream_name(claim: Claim) -> str:
    """The stream that a message is about.

    Raises:
        ConfigurationError: what is claimed is about none: an initiation, say.
        UnaddressableMessage: the name has blanks around it, which databases don't tell apart.
    """
    if claim.entity is None:
        raise ConfigurationError(
            f"The claim of {claim.id.text!r} ({claim.message_type}) names no stream.",
            fix='Use messages of a type with Idempotent(entity="…"); initiations need a store of another kind.',
        )
    if claim.entity != claim.entity.strip():
        raise UnaddressableMessage(
            f"{claim.entity!r} can't be the name of a stream: it begins or ends with a blank.",
            fix="Have the producer leave the blank out, or choose another entity in the type's policy.",
        )
    return claim.entity


def answer(found: Found, claim: Claim) -> Claimed:
    """What somebody learns who claims an id that is committed."""
    return handling_of(found).answer(claim)


def handling_of(found: Found) -> Handling:
    """A commit as a handling, with what pends of it."""
    commit = found.commit
    sendings = [
        Sending(output, commit.committed_at, 0, pending=output.id in found.pending) for output in commit.outputs
    ]
    return Handling(commit.claim, commit.committed_at, sendings)


def _one_message(number: int) -> ConfigurationError:
    return ConfigurationError(
        f"{number} messages were to be committed at once, and an append to a stream covers one.",
        fix="Leave out batch from the type's policy; hand messages over one by one.",
    )
