"""The Lua scripts: each is one atomic transition. Redis 6.2 commands only.

Keys, all with one hash tag so that a Redis Cluster keeps them together: term, clock, seq, bytes (counters), op (what
the last save was, and its event numbers), kv (hash: key -> "REVISION:VALUE") and events (stream, ids SEQ-0).
`clock` counts transitions; a server whose clock is behind what its client saw has lost some. `bytes` is the length of
all events together.
"""

from __future__ import annotations

BEGIN_TERM = """
-- KEYS term clock; ARGV floor
local term = math.max(tonumber(redis.call('GET', KEYS[1]) or '0'), tonumber(ARGV[1]))
redis.call('SET', KEYS[1], string.format('%.0f', term + 1))
return {term + 1, redis.call('INCR', KEYS[2])}
"""
"""Take over: a term above the stored one and the floor. Every older term is fenced from here on."""

SAVE = """
-- KEYS term clock seq op kv events bytes
-- ARGV term, op, most events, most bytes of them, number of writes, (key, revision | '', '=' value | '-')*, event*
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return {'fenced', 'term', redis.call('GET', KEYS[1]) or 'none'}
end
local last = redis.call('LRANGE', KEYS[4], 0, -1)
if last[1] == ARGV[2] then
  -- The answer to this very call was lost on the way.
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
"""Writes of several keys plus events, fenced by the term and by the revisions of those keys that name one; all or
nothing. The same call twice has one effect. Events that are more than may be kept are dropped, the oldest first."""
