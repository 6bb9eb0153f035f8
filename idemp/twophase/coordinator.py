"""The coordinator: knows the other databases, and carries out what the inbox has decided."""

from __future__ import annotations

import secrets
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from idemp.errors import BranchUnfinished, StoreError
from idemp.showing import logger
from idemp.twophase.branches import Branches
from idemp.twophase.ending import Unfinished, patiently, why_unfinished
from idemp.twophase.port import TOKEN_BYTES, BranchId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from idemp.inbox.port import Claim, Store
    from idemp.twophase.port import Database, Decision, Decisions, Prepared

log = logger("idemp.twophase")

COMPLETES: Final = (
    "Nothing is lost: its redelivery completes it, or any worker of the app, or `idemp recover MODULE:APP`."
)
MENDS: Final = (
    "Nobody can complete it in {lost}: register that database again, or mend its rows by hand; "
    "then `idemp recover MODULE:APP --forget {key}`, which first completes it in all others."
)


class Coordinator:
    """What the handlings of an app in several databases share. Safe to share between threads.

    Args:
        store: the inbox.
        decisions: kept in the inbox's own database.
        databases: the others, by their names.

    Attributes:
        pause: waits so many seconds for a branch in other hands. A simulation, which has no time, sets another.
        new_token: draws the token of an attempt, which no other has; there the simulation counts.

    Example:
        >>> from idemp.inbox.memory import InMemoryStore
        >>> Coordinator(InMemoryStore(), None, {}).names
        ()
    """

    def __init__(self, store: Store, decisions: Decisions, databases: Mapping[str, Database]) -> None:
        self.store = store
        self.decisions = decisions
        self.databases = dict(databases)
        self.pause: Callable[[float], object] = time.sleep
        self.new_token: Callable[[], bytes] = partial(secrets.token_bytes, TOKEN_BYTES)

    @property
    def names(self) -> tuple[str, ...]:
        """The other databases' names."""
        return tuple(self.databases)

    def branches(self, claims: Sequence[Claim], names: Sequence[str]) -> Branches:
        """For one handling, made before its transaction begins; `names` are those that it may use."""
        return Branches(self, claims, names)

    def verify(self) -> None:
        """See that all databases can prepare transactions. One that is away is told, and its handlings wait for it.

        Raises:
            ConfigurationError: one can't, or is not set up for it.
            StoreError: the inbox's own database is away.
        """
        self.decisions.inbox()
        for name, database in self.databases.items():
            try:
                database.verify()
            except StoreError as error:
                log.warning(
                    "the database %r is away: %s",
                    name,
                    error.message,
                    extra={"event": "recovery_waits", "databases": [name]},
                )

    def close(self) -> None:
        """End connections that the databases opened themselves."""
        for database in self.databases.values():
            database.close()

    def finish(self, claim: Claim) -> None:
        """Carry out what was decided about a handling that is committed, if its branches are not known to have ended.

        Raises:
            BranchUnfinished: a branch is prepared still, and can't be committed now.
            StoreError: the inbox's database could not say.
        """
        decision = self.decisions.noted(self.decisions.number(claim.consumer), claim.id.key)
        if decision is not None:
            self.carry_out(decision)

    def carry_out(self, decision: Decision) -> None:
        """Commit all branches of a decision, then forget it. Several may do so at once.

        Raises:
            BranchUnfinished: a branch is prepared still, and can't be committed now, or its server lost it.
        """
        open_ = {}
        for number, prepared in enumerate(decision.branches):
            branch = BranchId(self.decisions.inbox(), decision.consumer, decision.key, decision.token, number)
            why = self._why_unfinished(prepared, branch)
            if why is not None:
                open_[prepared.database] = why
        self.ended(decision, open_)

    def ended(self, decision: Decision, unfinished: Mapping[str, Unfinished]) -> None:
        """All branches of a decision were committed, but for those that are `unfinished`, by their databases' names.

        Raises:
            BranchUnfinished: there are such.
        """
        if unfinished:
            why = "; ".join(f"{name!r} {each.reason}" for name, each in unfinished.items())
            lost = [repr(name) for name, each in unfinished.items() if each.is_lost]
            are_lost = len(lost) == len(unfinished)
            log.error(
                "committed in the inbox's database, and not yet in others: %s",
                why,
                extra={
                    "event": "branch_unfinished",
                    "message_key": str(decision.key),
                    "databases": sorted(unfinished),
                },
            )
            raise BranchUnfinished(
                f"The inbox's database committed, and others have not{'' if are_lost else ' yet'}: {why}.",
                fix=MENDS.format(lost=", ".join(lost), key=decision.key) if lost else COMPLETES,
                is_lost=are_lost,
            )
        try:
            self.decisions.finished(decision)
        except StoreError as error:  # whoever finds it next finds that nothing is left to do
            log.debug("a decision that was carried out is not forgotten yet: %s", error)

    def _why_unfinished(self, prepared: Prepared, branch: BranchId) -> Unfinished | None:
        database = self.databases.get(prepared.database)
        if database is None:
            return Unfinished("is not registered here", is_lost=True)
        try:
            ended = patiently(lambda: database.end(branch, commit=True), self.pause)
            return why_unfinished(database, prepared, ended)
        except StoreError as error:
            return Unfinished(f"failed: {error.message.rstrip('.')}")
