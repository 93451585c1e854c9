"""Client of the durable state in Redis. Every call has a deadline, and every write is fenced.

A head takes a *term* with `begin_term`. Then `save` succeeds only while that term is the newest and the keys have the
revisions that the caller expects. So a head that was stopped and continues after its successor can write nothing.

Both calls are Lua scripts, each one atomic transition, with Redis 6.2 commands only. Their keys share one hash tag, so
that a Redis Cluster keeps them together: term, clock, seq, bytes (counters), op (id of the last save and its event
numbers), kv (hash: key -> "REVISION:VALUE") and events (stream, ids SEQ-0). `clock` counts transitions: a server whose
clock is lower than its client has seen has lost data. `bytes` is the total size of all events.
"""

import asyncio
import hashlib
import os
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from fallow.model import EventRecord, Exit, FallowError, NewEvent

T = TypeVar("T")

DEADLINE_S = 5.0
EVENT_CAP, EVENT_LOG_BYTES = 100_000, 64 * 1024 * 1024
"Maximum number and total size in bytes of stored events; the oldest are dropped."
EVENT_BYTES = 64 * 1024
"Maximum size of one event; a larger event loses its data and the end of its text."
EVENT_SCHEMA = 1
_CUT_TEXT = 10_000
_PAGE = 1000
_CONNECTIONS = 100
"More than the number of concurrent readers (`control.server.MAX_CONNECTIONS`), so that `save` always finds one."


class Unavailable(FallowError):
    """The store did not answer in time. A write may or may not have happened; repeating it is safe."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.UNAVAILABLE)


class Fenced(FallowError):
    """A newer head has taken over, or somebody else has changed a key. Nothing was written."""

    def __init__(self, where: str, what: str, stored_value: str) -> None:
        super().__init__(
            f"store {where}: refused a write (its {what} is {stored_value}); another head has taken over, end this one",
            Exit.TEMPFAIL,
        )


class Write(NamedTuple):
    """Set or delete `key`. An absent key has revision 0, and each write adds 1."""

    key: str
    revision: int | None
    "revision that the key must have, otherwise the whole call writes nothing; None: any revision"
    value: bytes | None
    "new value; None: delete the key"


class Store:
    """Connection to one namespace of a Redis server. Create it with `open`."""

    def __init__(self, client: redis.asyncio.Redis, where: str, namespace: str, deadline_s: float) -> None:
        self._client = client
        self._where = where
        self._deadline_s = deadline_s
        keys = [f"{{{namespace}}}:{name}" for name in ("term", "clock", "seq", "op", "kv", "events", "bytes")]
        self._save_keys = keys
        self._term_key, self._clock_key, self._seq_key, _, self._kv_key, self._events_key, _ = keys
        self._begin_term, self._save = map(client.register_script, (_BEGIN_TERM, _SAVE))
        self._clock = 0
        self._saves = 0
        self._lock = asyncio.Lock()
        self.term = 0
        "term of this head; 0 before `begin_term`"

    @classmethod
    async def open(cls, where: str | Path, *, namespace: str | None = None, deadline_s: float = DEADLINE_S) -> "Store":
        """Connect to a Unix socket (a path) or a URL (redis://, rediss://, unix://) and check the server.

        Several heads on one site server need different namespaces; the default has the user's uid in it.
        """
        options: dict[str, Any] = {
            "socket_timeout": deadline_s,
            "socket_connect_timeout": deadline_s,
            # Retry once, at once: a pooled connection may lead to a server that has been restarted since.
            "retry": Retry(NoBackoff(), 1),
            # Or it leads to a server that is a replica now, while the address leads to the new primary.
            "retry_on_error": [ReadOnlyError],
            "max_connections": _CONNECTIONS,
        }
        display_name = text = str(where)
        if "://" in text:
            try:
                # Show scheme and host only: an error of the parser may quote the password.
                parts = urlsplit(text)
                display_name = f"{parts.scheme}://{parts.hostname or parts.path.rpartition('@')[2]}"
                client = redis.asyncio.Redis.from_url(text, **options)
            except ValueError:
                advice = "write / as %2F, # as %23, ? as %3F and @ as %40 in its password"
                raise FallowError(f"store: not a Redis URL; {advice}", Exit.CONFIG) from None
        else:
            client = redis.asyncio.Redis(unix_socket_path=text, **options)
        store = cls(client, display_name, namespace or f"fallow:{os.getuid()}", deadline_s)
        try:
            await store._check_server()
        except TypeError as error:
            # The client library does not know an option of the URL. The error's text may quote the password.
            await store.close()
            raise FallowError(f"store {display_name}: not a Redis URL (unknown option)", Exit.CONFIG) from error
        except BaseException:
            await store.close()
            raise
        return store

    async def _check_server(self) -> None:
        info: dict[str, Any] = await self._call(self._client.info())
        version = str(info.get("redis_version", "0"))
        if tuple(int(part) for part in version.split(".")[:2]) < (6, 2):
            raise FallowError(f"store {self._where}: Redis {version} is too old; use 6.2 or newer", Exit.CONFIG)
        policy = str(info.get("maxmemory_policy", ""))
        if info.get("maxmemory") and policy.startswith("allkeys"):
            text = (
                f"it forgets what it holds when its memory is full (maxmemory-policy {policy}); use one with noeviction"
            )
            raise FallowError(f"store {self._where}: {text}", Exit.CONFIG)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    # -- terms ----------------------------------------------------------------------------------------------

    async def begin_term(self, floor: int) -> int:
        """Take a new term, above the stored one and above `floor`. Writes of older terms fail from then on."""
        term, clock = await self._call(self._begin_term([self._term_key, self._clock_key], [floor]))
        self.term, self._clock, self._saves = int(term), int(clock), 0
        return self.term

    async def check(self) -> bool:
        """Return False if the server has lost writes that it had acknowledged, or has another term."""
        term, clock = await self._call(self._client.mget(self._term_key, self._clock_key))
        return int(term or 0) == self.term and int(clock or 0) >= self._clock

    # -- state ----------------------------------------------------------------------------------------------

    async def save(self, writes: list[Write], events: list[NewEvent]) -> list[int]:
        """Write all or nothing. Returns the numbers of the events.

        After `Unavailable`, repeat the same call: it takes effect once, even if the first call succeeded.
        """
        args: list[str | bytes] = [str(self.term), "", str(EVENT_CAP), str(EVENT_LOG_BYTES), str(len(writes))]
        for write in writes:
            revision = "" if write.revision is None else str(write.revision)
            args += [write.key, revision, b"-" if write.value is None else b"=" + write.value]
        args += map(_encoded, events)
        async with self._lock:
            # Only an answered call increments the counter, so a repetition has the same number and content.
            content = hashlib.sha256(msgspec.msgpack.encode(args)).hexdigest()
            args[1] = f"{self.term}.{self._saves}.{content}"
            answer = await self._call(self._save(self._save_keys, args))
            self._saves += 1
            if answer[0] == b"fenced":
                raise Fenced(self._where, _text(answer[1]), _text(answer[2]))
            self._clock = max(self._clock, int(answer[1]))
            first, count = int(answer[2]), int(answer[3])
            return list(range(first, first + count))

    async def load(self, prefix: str) -> dict[str, tuple[int, bytes]]:
        """Return all keys that begin with `prefix`, sorted: key -> (revision, value)."""
        pattern = "".join(f"\\{letter}" if letter in "*?[]^-\\" else letter for letter in prefix) + "*"
        entries: dict[str, tuple[int, bytes]] = {}
        cursor = 0
        while True:
            cursor, page = await self._call(self._client.hscan(self._kv_key, cursor, pattern, _PAGE))
            for key, entry in page.items():
                revision, _, value = entry.partition(b":")
                entries[_text(key)] = (int(revision), value)
            if cursor == 0:
                return dict(sorted(entries.items()))

    # -- events ---------------------------------------------------------------------------------------------

    async def events(self, since: int, limit: int, run: str | None = None) -> list[EventRecord]:
        """Return the newest `limit` events with numbers above `since`, oldest first; `run`: of this run only."""
        records: list[EventRecord] = []
        upto = "+"
        while len(records) < limit:
            page = await self._call(self._client.xrevrange(self._events_key, upto, f"{since + 1}-0", _PAGE))
            events = [_event(number, fields) for number, fields in page]
            records += [event for event in events if run is None or run == event.run]
            if len(page) < _PAGE:
                break
            upto = f"{events[-1].seq - 1}-0"
        return records[:limit][::-1]

    async def last_event(self) -> int:
        """Return the number of the newest event; 0: no event."""
        return int(await self._call(self._client.get(self._seq_key)) or 0)

    async def _call(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await cast(Awaitable[Any], call)
        except TimeoutError:
            raise self._unavailable(f"no answer within {self._deadline_s:g} s") from None
        except ResponseError as error:
            raise self._unavailable(f"refused a command ({str(error)[:200]})") from error
        except (RedisError, OSError) as error:
            raise self._unavailable(str(error)[:200] or type(error).__name__) from error

    def _unavailable(self, what: str) -> Unavailable:
        return Unavailable(f"store {self._where}: {what}; check that the server runs and that its disk has space")


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


_stored_event = msgspec.msgpack.Decoder(tuple[int, NewEvent])


def _encoded(event: NewEvent) -> bytes:
    data = msgspec.msgpack.encode((EVENT_SCHEMA, event))
    if len(data) > EVENT_BYTES:
        short = event._replace(text=event.text[:_CUT_TEXT], data={"left_out_bytes": len(data)})
        data = msgspec.msgpack.encode((EVENT_SCHEMA, short))
    return data


def _event(number: bytes, fields: dict[bytes, bytes]) -> EventRecord:
    try:
        schema, event = _stored_event.decode(fields[b"e"])
        if schema != EVENT_SCHEMA:
            raise ValueError(f"its schema is {schema}, this Fallow reads {EVENT_SCHEMA}")
    except (msgspec.MsgspecError, ValueError) as error:
        event = NewEvent(0.0, None, "unreadable", f"event cannot be read: {error}", {})
    return EventRecord(seq=int(number.split(b"-")[0]), **event._asdict())


_BEGIN_TERM = """
-- KEYS term clock; ARGV floor
local term = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%.0f', term + 1))
return {term + 1, redis.call('INCR', KEYS[2])}
"""
"""Take a term above the stored one and the floor. All older terms are fenced from then on."""

_SAVE = """
-- KEYS term clock seq op kv events bytes
-- ARGV term, op, most events, most bytes of them, number of writes, (key, revision | '', '=' value | '-')*, event*
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return {'fenced', 'term', redis.call('GET', KEYS[1]) or 'none'}
end
local last = redis.call('LRANGE', KEYS[4], 0, -1)
if last[1] == ARGV[2] then
  -- This is a repetition of the last call, whose answer was lost.
  return {'done', redis.call('GET', KEYS[2]), last[2], last[3]}
end
local first_write, after_writes = 6, 6 + 3 * tonumber(ARGV[5])
local revisions = {}
for at = first_write, after_writes - 1, 3 do
  local held = redis.call('HGET', KEYS[5], ARGV[at])
  local revision = held and string.match(held, '^%d+') or '0'
  if ARGV[at + 1] ~= '' and ARGV[at + 1] ~= revision then
    return {'fenced', ARGV[at], revision}
  end
  revisions[at] = string.format('%.0f', tonumber(revision) + 1)
end
for at = first_write, after_writes - 1, 3 do
  local value = ARGV[at + 2]
  if string.sub(value, 1, 1) == '-' then
    redis.call('HDEL', KEYS[5], ARGV[at])
  else
    redis.call('HSET', KEYS[5], ARGV[at], revisions[at] .. ':' .. string.sub(value, 2))
  end
end
local first = tonumber(redis.call('GET', KEYS[3]) or '0') + 1
local seq, bytes = first, tonumber(redis.call('GET', KEYS[7]) or '0')
for at = after_writes, #ARGV do
  redis.call('XADD', KEYS[6], string.format('%.0f-0', seq), 'e', ARGV[at])
  seq, bytes = seq + 1, bytes + #ARGV[at]
end
local events = redis.call('XLEN', KEYS[6])
while events > 0 and (events > tonumber(ARGV[3]) or bytes > tonumber(ARGV[4])) do
  local oldest = redis.call('XRANGE', KEYS[6], '-', '+', 'COUNT', 1)[1]
  redis.call('XDEL', KEYS[6], oldest[1])
  events, bytes = events - 1, bytes - #oldest[2][2]
end
redis.call('SET', KEYS[7], string.format('%.0f', bytes))
redis.call('SET', KEYS[3], string.format('%.0f', seq - 1))
redis.call('DEL', KEYS[4])
redis.call('RPUSH', KEYS[4], ARGV[2], string.format('%.0f', first), string.format('%.0f', seq - first))
return {'done', redis.call('INCR', KEYS[2]), first, seq - first}
"""
"""Write several keys and events, all or nothing, fenced by the term and by the expected revisions. A repeated call has
no further effect. If there are too many events, the oldest are dropped."""
