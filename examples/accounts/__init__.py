"""Accounts, event-sourced: each is a stream, and the events are the only record. Begin reading in `handlers.py`."""

from .handlers import app, make_inbox
from .ledger import Account, account_of

__all__ = ["Account", "account_of", "app", "make_inbox"]
