"""Redis: a message is taken and noted as unacknowledged in one step, so that the death of its taker loses nothing.

kombu's own consumer pops a message and notes it in a second step, or leaves a popped one unread in its socket while a
handler runs. Queues and messages here are kombu's, so that its producers and consumers can share them. What is
unacknowledged stands under names of our own: kombu's consumers would give it back by their visibility timeout, and we
theirs by ours.
"""

from __future__ import annotations

import json
import ssl
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kombu.utils import json as kombu_json
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from idemp.broker.kombu.settling import arrived_by_kombu
from idemp.broker.kombu.virtual.line import Held, Line, delay_name

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from idemp.broker.kombu.settling import Arrived
    from idemp.clock import Clock

#: Sorted set: when each unacknowledged message was taken.
UNACKED_INDEX: Final = "idemp.unacked_index"
#: Hash: the queue key and the message of each.
UNACKED: Final = "idemp.unacked"

_dumps: Callable[[Any], str] = kombu_json.dumps
_loads: Callable[[bytes], Any] = kombu_json.loads
_PAGE: Final = 100
_SEPARATOR: Final = b"\n"

# KEYS: index, unacked, then the lists to look into. ARGV: now, tag.
_TAKE: Final = """
for position = 3, #KEYS do
    local raw = redis.call('RPOP', KEYS[position])
    if raw then
        redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
        redis.call('HSET', KEYS[2], ARGV[2], KEYS[position] .. '\\n' .. raw)
        return {position - 3, raw}
    end
end
return false
"""
# KEYS: index, unacked, one list. ARGV: now, tag, the message.
_TAKE_THIS: Final = """
if redis.call('LREM', KEYS[3], -1, ARGV[3]) == 0 then return 0 end
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[2], KEYS[3] .. '\\n' .. ARGV[3])
return 1
"""
# KEYS: index, unacked. ARGV: tag.
_ACK: Final = """
redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('HDEL', KEYS[2], ARGV[1])
"""
# KEYS: index, unacked, one list. ARGV: tag, the message as it shall stand there.
_GIVE_BACK: Final = """
redis.call('ZREM', KEYS[1], ARGV[1])
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('RPUSH', KEYS[3], ARGV[2])
return 1
"""
# KEYS: waiting, one list. ARGV: the message.
_DUE: Final = """
if redis.call('ZREM', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('LPUSH', KEYS[2], ARGV[1])
return 1
"""


class RedisLine(Line):
    """A connection to Redis.

    Args:
        url: `redis://` or `rediss://user:password@host:6379/0`.
        timeout: seconds for connecting, and for each answer.
        clock: by which delayed messages come due.
        visibility_timeout: seconds after which a message comes again whose taker said nothing more; the same in all
            processes, and more than their clocks differ.
    """

    errors: ClassVar = (*Line.errors, RedisError)
    refusals: ClassVar = (ResponseError,)
    denials: ClassVar = (AuthenticationError, AuthorizationError, NoPermissionError, ValueError)

    def __init__(self, url: str, *, timeout: float, clock: Clock, visibility_timeout: float) -> None:
        self._visibility_timeout = visibility_timeout
        self._touched = clock.monotonic()
        self._unsure: str | None = None
        options = {
            "socket_timeout": timeout,
            "socket_connect_timeout": timeout,
            "socket_keepalive": True,
            "health_check_interval": 0,
            "visibility_timeout": visibility_timeout,
            "unacked_key": UNACKED,
            "unacked_index_key": UNACKED_INDEX,
        }
        # Left out, kombu would accept any certificate.
        secure = {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True} if url.startswith("rediss:") else None
        super().__init__(url, timeout=timeout, clock=clock, options=options, ssl=secure)
        # A command whose answer is missing is never sent again behind our back.
        self.channel.pool.connection_kwargs["retry"] = Retry(NoBackoff(), 0)
        with self.channel.conn_or_acquire() as client:
            self._client = client
        self._take, self._take_this, self._ack, self._give_back, self._due = map(
            self._client.register_script, (_TAKE, _TAKE_THIS, _ACK, _GIVE_BACK, _DUE)
        )

    def limit(self, seconds: float) -> None:
        """Let each answer from now on take no longer."""
        pool = self.channel.pool
        for name in {"socket_timeout", "socket_connect_timeout"} & pool.connection_kwargs.keys():
            pool.connection_kwargs[name] = seconds
        connection = pool.get_connection()
        try:
            _limit(connection, seconds)
        finally:
            pool.release(connection)

    def depth(self, queue: str) -> int:
        """How many messages are ready."""
        if self._client.type(queue) == b"zset":
            return int(self._client.zcard(queue))
        return super().depth(queue)

    def take(self, queues: Sequence[str]) -> Held | None:
        """The next message of the first of these queues that has one; more urgent ones first."""
        keys = [(key, queue) for keys in zip(*map(self._keys, queues), strict=True) for key, queue in keys]
        self._recover()
        tag = self._unsure = str(uuid.uuid4())
        found = self._take(keys=[UNACKED_INDEX, UNACKED, *(key for key, _ in keys)], args=[self._now(), tag])
        self._unsure = None
        if not found:
            return None
        position, raw = found
        return self._held(keys[int(position)][1], tag, raw)

    def ack(self, held: Held) -> bool:
        """Forget it for good. `False` if it went back meanwhile and comes again."""
        return bool(self._ack(keys=[UNACKED_INDEX, UNACKED], args=[held.tag]))

    def give_back(self, held: Sequence[Held]) -> None:
        """Put them back before all others, in this order."""
        for each in reversed(held):
            self._return(each.tag, self._key(each.queue, each.raw), each.raw)

    def hold(self, queue: str, wanted: Collection[str] | None, limit: int) -> list[Held]:
        """Take up to `limit` messages, of these ids or any; the others stay where they are."""
        kept = list[Held]()
        for key, raw in self._standing(queue):
            if len(kept) == limit:
                break
            arrived = self._held(queue, "", raw).arrived
            if arrived is None or (wanted is not None and arrived.properties.get("message_id") not in wanted):
                continue
            tag = str(uuid.uuid4())
            if self._take_this(keys=[UNACKED_INDEX, UNACKED, key], args=[self._now(), tag, raw]):
                kept.append(self._held(queue, tag, raw))
        return kept

    def browse(self, queue: str, limit: int) -> list[Arrived]:
        """Up to `limit` messages, left where they are."""
        found = list[Any]()
        for _, raw in self._standing(queue, limit):
            if (arrived := self._held(queue, "", raw).arrived) is not None:
                found.append(arrived)
        return found[:limit]

    def tend(self, queues: Sequence[str]) -> None:
        """Delayed messages that are due, and those whose takers are silent, go to their queue."""
        now = self._now()
        for queue in queues:
            waiting = delay_name(queue)
            for raw in self._client.zrangebyscore(waiting, "-inf", now, start=0, num=_PAGE):
                self._due(keys=[waiting, self._key(queue, raw)], args=[raw])
        for tag in self._client.zrangebyscore(
            UNACKED_INDEX, "-inf", now - self._visibility_timeout, start=0, num=_PAGE
        ):
            self._return_noted(tag)

    def touch(self, held: Sequence[Held]) -> None:
        """Say that we still hold them, each third of the visibility timeout."""
        now = self._clock.monotonic()
        if held and now - self._touched > self._visibility_timeout / 3:
            self._touched = now
            self._client.zadd(UNACKED_INDEX, {each.tag: self._now() for each in held}, xx=True)

    def close(self) -> None:
        """Close the connection; raises nothing."""
        with suppress(*self.errors):
            self._recover()
        super().close()

    def _put_delayed(self, queue: str, message: dict[str, Any], due: float) -> None:
        self.channel._inplace_augment_message(message, "", queue)  # noqa: SLF001 - what basic_publish begins with
        self._client.zadd(delay_name(queue), {_dumps(message): due})

    def _return(self, tag: Any, key: Any, raw: bytes) -> None:
        self._give_back(keys=[UNACKED_INDEX, UNACKED, key], args=[tag, _redelivered(raw)])

    def _return_noted(self, tag: Any) -> None:
        key, _, raw = (self._client.hget(UNACKED, tag) or b"").partition(_SEPARATOR)
        self._return(tag, key, raw)

    def _recover(self) -> None:
        """Give back what the last take may have brought, if its answer never came."""
        if self._unsure is not None:
            self._return_noted(self._unsure)
            self._unsure = None

    def _held(self, queue: str, tag: str, raw: bytes) -> Held:
        try:
            payload = _loads(raw)
            message = self.channel.Message(payload, channel=self.channel)
            redelivered = bool(message.delivery_info.get("redelivered"))
            return Held(queue, tag, arrived_by_kombu(message), redelivered, raw)
        except Exception:  # noqa: BLE001 - a stranger wrote it, and any codec may have read it
            return Held(queue, tag, None, redelivered=False, raw=raw)

    def _keys(self, queue: str) -> list[tuple[str, str]]:
        """The lists that a queue is made of, and its name."""
        return [(self.channel._q_for_pri(queue, step), queue) for step in self.channel.priority_steps]  # noqa: SLF001

    def _key(self, queue: str, raw: bytes) -> str:
        """The list of a queue that a message belongs to."""
        channel: Any = self.channel
        try:
            return str(channel._q_for_pri(queue, channel._get_message_priority(json.loads(raw))))  # noqa: SLF001
        except ValueError:
            return queue

    def _standing(self, queue: str, most: int | None = None) -> list[tuple[str, bytes]]:
        """What stands in a queue now, in order, with its list."""
        found = list[tuple[str, bytes]]()
        if self._client.type(queue) == b"zset":
            return [(queue, raw) for raw in self._client.zrange(queue, 0, -1 if most is None else most - 1)]
        for key, _ in self._keys(queue):
            start = 0 if most is None else -most
            found += [(key, raw) for raw in reversed(self._client.lrange(key, start, -1))]
        return found


def _limit(connection: Any, seconds: float) -> None:
    """Change the timeout of an open connection: its socket, and the parser that resets the socket after each look."""
    parser = connection._parser  # noqa: SLF001 - redis-py has no other way
    connection._sock.settimeout(seconds)  # noqa: SLF001
    places = (connection, "socket_timeout"), (getattr(parser, "_buffer", None), "socket_timeout")
    for place, name in (*places, (parser, "_socket_timeout")):
        if hasattr(place, name):
            setattr(place, name, seconds)


def _redelivered(raw: bytes) -> bytes:
    """The message, marked as given back; as it is if it is none of kombu's."""
    try:
        payload: Mapping[str, Any] = json.loads(raw)
        payload["properties"]["delivery_info"]["redelivered"] = True
    except (ValueError, LookupError, TypeError):
        return raw
    return json.dumps(payload).encode()
