"""What an account is: a fold over its events."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pydantic import BaseModel

from idemp.inbox.stream import Event, Stream, StreamSession

from .messages import Declined, Deposited, Withdrawn


@dataclass(frozen=True)
class Account:
    """The state that follows from the events so far.

    Attributes:
        cents: the balance; never below zero.
        declined: how often money was asked for that was not there.
    """

    cents: int = 0
    declined: int = 0


class _Moved(BaseModel):
    """What all events of an account say."""

    cents: int


def after(account: Account, event: Event) -> Account:
    """The account after one more event."""
    cents = _Moved.model_validate(event.data).cents
    match event.type:
        case Deposited.__message_type__:
            return replace(account, cents=account.cents + cents)
        case Withdrawn.__message_type__:
            return replace(account, cents=account.cents - cents)
        case Declined.__message_type__:
            return replace(account, declined=account.declined + 1)
    raise ValueError(f"{event.type} is no event of an account")


def account_of(stream: Stream | StreamSession) -> Account:
    """The account that a stream is about."""
    return stream.fold(after, Account())
