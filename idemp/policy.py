"""Policies per message type."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypedDict, Unpack

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import core_schema

from idemp.durations import DurationLike, parse_duration
from idemp.errors import ConfigurationError
from idemp.findings import describe_errors
from idemp.fingerprint import Fingerprint
from idemp.identity import Key
from idemp.retries import DelaysLike, ExceptionLike, parse_delays, parse_exceptions, refusing_rule, spread

MOST_IN_BATCH: Final = 1000
"""Deliveries that may share a transaction; beyond a few hundred there is little left to share."""
MOST_DATABASES: Final = 8
"""Other databases of one handling."""
LONGEST_HELD: Final = timedelta(minutes=15)
"""How long a failing message may hold back others: half the time after which RabbitMQ takes deliveries back."""


class _Parsed:
    """Lets pydantic read a value through one of our own `parse` functions, and nothing else."""

    def __init__(self, parse: Callable[[object], Any]) -> None:
        self.parse = parse

    def __get_pydantic_core_schema__(self, source: object, handler: object) -> core_schema.CoreSchema:
        def validate(value: object) -> Any:
            try:
                return self.parse(value)
            except ConfigurationError as error:
                raise ValueError(str(error)) from error

        return core_schema.no_info_plain_validator_function(validate)


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError(f"a number, not {str(value).lower()}")  # noqa: TRY004 - pydantic reports only ValueErrors
    return value


Whole = Annotated[int, BeforeValidator(_no_bool)]
"""A whole number; true and false are none, though Python counts them as 1 and 0."""
Share = Annotated[float, BeforeValidator(_no_bool)]
Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
KeySpec = Annotated[Key, _Parsed(Key.parse)]
FingerprintSpec = Annotated[Fingerprint, _Parsed(Fingerprint.parse)]
Delays = Annotated[tuple[timedelta, ...], _Parsed(parse_delays)]
Exceptions = Annotated[tuple[type[Exception], ...], _Parsed(parse_exceptions)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)]
"""One name, or several."""

KeyLike = Key | str | Sequence[str] | Mapping[str, str] | Callable[[Any], Any]
FingerprintLike = Fingerprint | str | Mapping[str, Sequence[str]]


_MessageClass = type[Any]  # `Previous` has a field `type`


class PreviousOptions(TypedDict, total=False):
    """What may be said of a former identity; see `Previous`."""

    key: KeyLike
    message: _MessageClass
    type: str
    consumer: str
    entity: KeyLike
    opted_in: bool


class PolicyOptions(TypedDict, total=False):
    """What may be said in a policy; see `Policy`."""

    idempotent: bool
    key: KeyLike
    retention: DurationLike
    redispatch: Literal["always", "pending"]
    claim: Literal["early", "late"]
    claim_wait: DurationLike
    fingerprint: FingerprintLike
    on_conflict: Literal["park", "redispatch"]
    late: Literal["park", "handle", "guard"]
    attempts: int
    retry_delays: DelaysLike
    retry_jitter: float
    retry_on: ExceptionLike | Sequence[ExceptionLike]
    refuse_on: ExceptionLike | Sequence[ExceptionLike]
    max_hops: int | None
    batch: int
    ordered_by: KeyLike | None
    entity: KeyLike | None
    dated_by: KeyLike | None
    databases: str | Sequence[str]
    dispatch_timeout: DurationLike
    previous: Sequence[Previous]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            findings = describe_errors(error, type(self).model_fields)
            raise ConfigurationError(f"{type(self).__name__}: {'; '.join(findings)}") from None


class Previous(_Strict):
    """What identified messages of this type before the current deploy.

    While claims of the former kind still count (one retention window), both are claimed: a message that the former
    version handled is a duplicate for the new one.

    Attributes:
        key: the former key; the current one when left out.
        message: the former message class, where its key's fields had another type, default or name in JSON: the former id is
            read from the body as this class. What that class does not take was not handled by the former version.
        type: the former canonical type name.
        consumer: the former consumer name.
        entity: what the type's messages were about, for stores that keep one document or one stream for each: ids are looked
            for there, too. They are not noted there, so end the former release before you start this one.
        opted_in: `False` when the type was not idempotent before; then there is nothing to look for.

    Example:
        >>> Previous(key="order_no").key.name
        'field:order_no'
    """

    key: KeySpec | None = None
    message: _MessageClass | None = None
    type: str | None = None
    consumer: str | None = None
    entity: KeySpec | None = None
    opted_in: bool = True

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[PreviousOptions]) -> None: ...


class Policy(_Strict):
    """How messages of one type are handled. All times are durations (`timedelta`, seconds, or text such as "7d").

    Attributes:
        idempotent: opted in: claim the id, store the outputs, skip redeliveries.
        key: where the id is read from; default the envelope's message id.
        retention: how long a claim counts as handled.
        redispatch: on a redelivery send "always" all stored outputs, or only those "pending" a confirm.
        claim: "early" (before the handler) or "late" (after it; only for handlers whose effects are all in the database).
        claim_wait: how long a claim waits for another holder of the same id before it is in flight.
        fingerprint: what of the payload must be equal in redeliveries: "all", "off", fields, or all except some.
        on_conflict: "park" a message whose id was taken with another payload, or "redispatch" the first one's outputs.
        late: "park" or "handle" a message that is known to be older than the retention window; or ask the "guard", and
            handle it only if it was certainly not handled before.
        attempts: deliveries that a failing handler gets before the message is parked.
        retry_delays: pauses between attempts: one, a list whose last one repeats, or `exponential(…)`; in files
            `{first = "1s", factor = 2, longest = "10m"}`.
        retry_jitter: by which share of itself a pause may be shorter or longer (0 to 1), so that what failed together
            does not come again together.
        retry_on: exceptions after which the message is tried again; if any are named, all others park it at once.
        refuse_on: exceptions that park it at once; where both name a class's ancestors, the nearest one decides.
        max_hops: how many messages, each caused by the one before, may have led to this one; a longer chain is parked.
            Without it a chain may be endless, as that of a tick that sends the next tick is meant to be.
        batch: most deliveries that share a transaction in a worker, if so many are at hand; 1 for none. Only for types that
            are opted in and whose handlers' effects are all in the database: when one of them fails, those beside it run
            again. A batch takes what the broker has sent ahead and waits 2 ms at most.
        ordered_by: handle messages with an equal value of this (written like `key`) in the order in which they came, all
            types with this option together; one that fails holds back those after it. Only for types that are opted in, and
            where the broker hands a queue to one consumer at a time; a queue that exists has to be made anew for it.
        entity: which thing the message is about (written like `key`), for stores that keep one document or one stream for
            each: a handling reads and writes that of its message alone. Only for types that are opted in.
        dated_by: where the time stands at which the message was made (written like `key`): a datetime, or an id that carries
            its time (UUIDv7). By default that is the time in the envelope's id, else the timestamp; never that of a key.
        databases: other databases that the handler writes to, as the app's `databases` names them: two-phase commit, which
            is slow (see `TwoPhase`). Only for types that are opted in, with early claims and without batches.
        dispatch_timeout: how long to wait for the broker's confirms of one handling's outputs.
        previous: former identities that still count, see `Previous`.

    Raises:
        ConfigurationError: an unknown option (the nearest valid one is named) or a wrong value.

    Example:
        >>> Policy(idempotent=True, key="order_id", retention="7d").retention
        datetime.timedelta(days=7)
    """

    idempotent: bool = False
    key: KeySpec = Field(default_factory=Key.message_id)
    retention: Duration = timedelta(days=7)
    redispatch: Literal["always", "pending"] = "always"
    claim: Literal["early", "late"] = "early"
    claim_wait: Duration = timedelta(seconds=2)
    fingerprint: FingerprintSpec = Field(default_factory=Fingerprint)
    on_conflict: Literal["park", "redispatch"] = "park"
    late: Literal["park", "handle", "guard"] = "park"
    attempts: Whole = Field(default=7, ge=1, le=1000)
    retry_delays: Delays = tuple(timedelta(seconds=seconds) for seconds in (1, 5, 15, 60))
    retry_jitter: Share = Field(default=0.0, ge=0, le=1)
    retry_on: Exceptions = ()
    refuse_on: Exceptions = ()
    max_hops: Whole | None = Field(default=None, ge=0)
    batch: Whole = Field(default=1, ge=1, le=MOST_IN_BATCH)
    ordered_by: KeySpec | None = None
    entity: KeySpec | None = None
    dated_by: KeySpec | None = None
    databases: Names = ()
    dispatch_timeout: Duration = timedelta(seconds=10)
    previous: tuple[Previous, ...] = ()

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[PolicyOptions]) -> None: ...

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        for name in ("retention", "claim_wait", "dispatch_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be longer than nothing")
        if self.batch > 1 and not self.idempotent:
            raise ValueError("batch is for types that are opted in: use Idempotent(batch=…)")
        if self.batch > 1 and self.claim == "late":
            raise ValueError('a batch claims before its handlers run: leave out claim="late", or batch')
        if self.entity is not None and not self.idempotent:
            raise ValueError("entity is for types that are opted in: use Idempotent(entity=…)")
        self._check_order()
        self._check_databases()
        if both := set(self.retry_on) & set(self.refuse_on):
            names = ", ".join(sorted(each.__name__ for each in both))
            raise ValueError(f"retry_on and refuse_on both name {names}")
        return self

    def _check_order(self) -> None:
        if self.ordered_by is None:
            return
        if not self.idempotent:
            raise ValueError(
                "ordered_by is for types that are opted in, since only a claim keeps a worker that was cut off from "
                "handling a message beside its successor: use Idempotent(ordered_by=…)"
            )
        if self.batch > 1:
            raise ValueError("ordered_by and batch can't be combined: leave one of them out")
        pauses = (self.retry_delays[min(number, len(self.retry_delays)) - 1] for number in range(1, self.attempts))
        if (longest := sum(pauses, timedelta(0)) * (1 + self.retry_jitter)) > LONGEST_HELD:
            raise ValueError(
                f"ordered_by: a failing message would hold back others for {longest}, and {LONGEST_HELD} is the limit, "
                "since RabbitMQ takes deliveries back after twice that time: say fewer attempts or shorter retry_delays"
            )

    def _check_databases(self) -> None:
        if not self.databases:
            return
        if len({*self.databases}) < len(self.databases) or not all(self.databases):
            raise ValueError("databases names one twice, or one without a name")
        if len(self.databases) > MOST_DATABASES:
            raise ValueError(f"databases names more than {MOST_DATABASES}")
        if not self.idempotent:
            raise ValueError("databases is for types that are opted in: use TwoPhase(…)")
        if self.claim == "late":
            raise ValueError('the claim decides about all databases and comes first: leave out claim="late"')
        if self.batch > 1:
            raise ValueError(
                "databases and batch can't be combined: a batch has one transaction, in the inbox's database"
            )

    @property
    def all_delays(self) -> frozenset[timedelta]:
        """Every pause that there may be, jitter included."""
        return frozenset(each for delay in self.retry_delays for each in spread(delay, self.retry_jitter))

    def with_former_headers(self) -> Self:
        """Return this policy, with ids of headers as earlier releases derived them among `previous`."""
        if not self.idempotent:
            return self
        bare = [
            each.model_copy(update={"key": replace(key, by_type=False)})
            for each in (Previous(), *self.previous)
            if each.opted_in and (key := each.key or self.key).scope == "header" and key.by_type
        ]
        known = {(each.key.descriptor, each.type, each.consumer) for each in self.previous if each.key is not None}
        missing = [each for each in bare if each.key and (each.key.descriptor, each.type, each.consumer) not in known]
        return self.model_copy(update={"previous": (*self.previous, *missing)}) if missing else self

    def retries(self, error: BaseException) -> bool:
        """Whether a handling that failed of this is tried again, if attempts are left.

        Example:
            >>> Policy(refuse_on=[ValueError]).retries(ValueError()), Policy().retries(ValueError())
            (False, True)
        """
        return self.refusing_rule(error) is None

    def refusing_rule(self, error: BaseException) -> str | None:
        """Which rule says that a handling that failed of this is not tried again; `None` if none does.

        Example:
            >>> Policy(refuse_on=[ValueError]).refusing_rule(ValueError())
            'refuse_on names ValueError'
        """
        return refusing_rule(error, self.retry_on, self.refuse_on)

    def retry_delay(self, attempt: int) -> timedelta:
        """The pause after failed attempt number `attempt` (from 1).

        Example:
            >>> Policy(retry_delays=["1s", "1m"]).retry_delay(5)
            datetime.timedelta(seconds=60)
        """
        delay = self.retry_delays[min(attempt, len(self.retry_delays)) - 1]
        return random.choice(spread(delay, self.retry_jitter))  # noqa: S311 - jitter, not a secret


class Idempotent(Policy):
    """A policy that opts its message type in. Options as in `Policy`.

    Example:
        >>> Idempotent(key="order_id", retention="7d").idempotent
        True
    """

    idempotent: bool = True

    if TYPE_CHECKING:

        def __init__(self, **options: Unpack[PolicyOptions]) -> None: ...


class TwoPhase(Idempotent):
    """A policy for handlers that write to other databases, too: all commit or none does, by two-phase commit.

    The handler gets them as `ctx.database("ledger").session`. Slow: each handling costs several commits more, and what it
    locked in the other database stays locked until all is decided. Prefer to send a message to a consumer that has its inbox
    in the other database, where that will do.

    Args:
        names: the databases, as the app's `databases` names them.
        options: as in `Policy`.

    Raises:
        ConfigurationError: no database is named, or an option can't be combined with it.

    Example:
        >>> TwoPhase("ledger", key="order_id").databases
        ('ledger',)
    """

    def __init__(self, *names: str, **options: Unpack[PolicyOptions]) -> None:
        if names:
            options["databases"] = names
        if not options.get("databases"):
            raise ConfigurationError(
                "TwoPhase names no database.", fix='Say which ones the handler writes to: TwoPhase("ledger", key=…).'
            )
        super().__init__(**options)
