"""The state of one call of `publish`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, cast

from idemp.broker.kombu.link import said
from idemp.broker.kombu.wire import Parcel
from idemp.broker.port import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from idemp.broker.kombu.link import Link
    from idemp.broker.kombu.wire import Declarable

_NOT_FOUND = 404


class Call:
    """One call of `publish` or `send`: what to send, what was answered, and until when.

    Attributes:
        answers: by index in the call: `None` for a confirm, else why there is none.
        sent_on: the connection that a call of `send` went over last.
        sendings: how often it was sent without waiting.
    """

    def __init__(self, parcels: Sequence[Parcel | Refusal], deadline: float) -> None:
        self._parcels = parcels
        self._deadline = deadline
        self.sent_on: Link | None = None
        self.sendings = 0
        self.answers: dict[int, Refusal | None] = {
            index: parcel for index, parcel in enumerate(parcels) if isinstance(parcel, Refusal)
        }

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self._deadline - time.monotonic()

    @property
    def is_answered(self) -> bool:
        """Whether nothing waits."""
        return len(self.answers) == len(self._parcels)

    @property
    def waiting(self) -> list[int]:
        """What has no answer, in order."""
        return [index for index in range(len(self._parcels)) if index not in self.answers]

    @property
    def declarable(self) -> list[int]:
        """What came back because a queue is missing that we know how to declare."""
        return [
            index
            for index, parcel in enumerate(self._parcels)
            if isinstance(parcel, Parcel)
            and parcel.hop is not None
            and (refusal := self.answers.get(index)) is not None
            and refusal.kind == "returned"
        ]

    def parcel(self, index: int) -> Parcel:
        """One that can be sent."""
        return cast("Parcel", self._parcels[index])

    def hop(self, index: int) -> Declarable:
        """The queue of one that came back."""
        return cast("Declarable", self.parcel(index).hop)

    def refuse(self, indexes: Sequence[int], refusal: Refusal) -> None:
        """The same answer for several."""
        self.answers.update(dict.fromkeys(indexes, refusal))

    def blame(self, error: BaseException, in_flight: list[int]) -> list[int]:
        """Refuse what made the broker close the channel, as far as that is certain."""
        text = said(error)
        if getattr(error, "reply_code", 0) == _NOT_FOUND:
            names = {index: self.parcel(index).exchange for index in self.waiting}
            guilty = [index for index, name in names.items() if name and f"no exchange '{name}' in" in text]
            guilty = guilty or (in_flight if len(in_flight) == 1 else [])
            self.refuse(guilty, Refusal("returned", text))
            return guilty
        guilty = in_flight if len(in_flight) == 1 else []
        self.refuse(guilty, Refusal("unsendable", text))
        return guilty

    def result(self) -> list[Refusal | None]:
        """The answers in order."""
        return [self.answers[index] for index in range(len(self._parcels))]
