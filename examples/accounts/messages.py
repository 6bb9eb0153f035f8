"""The messages: two commands, and three events of which accounts are made."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel


class Deposit(BaseModel):
    """Put money on an account; `command_id` is the client's own, the same however often it sends this."""

    __message_type__: ClassVar[str] = "accounts.Deposit"
    command_id: str
    account: str
    cents: int


class Withdraw(BaseModel):
    """Take money from an account."""

    __message_type__: ClassVar[str] = "accounts.Withdraw"
    command_id: str
    account: str
    cents: int


class Deposited(BaseModel):
    """Money came."""

    __message_type__: ClassVar[str] = "accounts.Deposited"
    account: str
    cents: int


class Withdrawn(BaseModel):
    """Money went."""

    __message_type__: ClassVar[str] = "accounts.Withdrawn"
    account: str
    cents: int


class Declined(BaseModel):
    """Money was asked for that was not there."""

    __message_type__: ClassVar[str] = "accounts.Declined"
    account: str
    cents: int


class SendLetter(BaseModel):
    """A command to the post, and no event of an account."""

    __message_type__: ClassVar[str] = "post.SendLetter"
    account: str
    text: str
