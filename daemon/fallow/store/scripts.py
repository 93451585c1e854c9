"""The Lua scripts: each is one atomic transition. Redis 6.2 commands only.

Keys, all with one hash tag so that a Redis Cluster keeps them together: term, clock, seq (counters), op (what the
last save was, and its event numbers), kv (hash: key -> "REVISION:VALUE") and events (stream, ids SEQ-0).
`clock` counts transitions; a server whose clock is behind what its client saw has lost some.
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
-- KEYS term clock seq op kv events
-- ARGV term, op, cap, number of writes, (key, revision, '=' value | '-')*, event*
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return {'fenced', 'term', redis.call('GET', KEYS[1]) or 'none'}
end
local last = redis.call('LRANGE', KEYS[4], 0, -1)
if last[1] == ARGV[2] then
  -- The answer to this very call was lost on the way.
  return {'done', redis.call('GET', KEYS[2]), last[2], last[3]}
end
local writes, at = tonumber(ARGV[4]), 5
for i = 1, writes do
  local held = redis.call('HGET', KEYS[5], ARGV[at])
  local revision = held and string.match(held, '^%d+') or '0'
  if revision ~= ARGV[at + 1] then
    return {'fenced', ARGV[at], revision}
  end
  at = at + 3
end
at = 5
for i = 1, writes do
  local value = ARGV[at + 2]
  if string.sub(value, 1, 1) == '-' then
    redis.call('HDEL', KEYS[5], ARGV[at])
  else
    local revision = string.format('%.0f', tonumber(ARGV[at + 1]) + 1)
    redis.call('HSET', KEYS[5], ARGV[at], revision .. ':' .. string.sub(value, 2))
  end
  at = at + 3
end
local first = tonumber(redis.call('GET', KEYS[3]) or '0') + 1
local seq = first
for i = at, #ARGV do
  redis.call('XADD', KEYS[6], 'MAXLEN', '~', ARGV[3], string.format('%.0f-0', seq), 'e', ARGV[i])
  seq = seq + 1
end
redis.call('SET', KEYS[3], string.format('%.0f', seq - 1))
redis.call('DEL', KEYS[4])
redis.call('RPUSH', KEYS[4], ARGV[2], string.format('%.0f', first), string.format('%.0f', seq - first))
return {'done', redis.call('INCR', KEYS[2]), first, seq - first}
"""
"""Compare-and-set of several keys plus events, fenced by the term; the same call twice has one effect."""
