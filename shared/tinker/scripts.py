"""What the queue does in one step of Redis each, in Lua.

Of each owner ``open`` has the requests that were taken and are not done, and a hash has what they weigh: ``bytes``, and
of those the ``held_bytes`` of ``held`` requests that wait for an earlier one of their model; ``accepted``, ``done`` and
``failed`` count apart from them.
"""

from typing import Final

FULL: Final = """
local function full(open, owner, most, most_bytes, size, is_next)
  local count = redis.call('SCARD', open)
  local bytes = tonumber(redis.call('HGET', owner, 'bytes') or '0')
  if is_next then
    -- What is held waits for this one: it must not keep it out.
    count = count - tonumber(redis.call('HGET', owner, 'held') or '0')
    bytes = bytes - tonumber(redis.call('HGET', owner, 'held_bytes') or '0')
  end
  return count >= tonumber(most) or bytes + size > tonumber(most_bytes)
end
local function take(open, owner, id, size)
  redis.call('SADD', open, id)
  redis.call('HINCRBY', owner, 'accepted', 1)
  redis.call('HINCRBY', owner, 'bytes', size)
end
"""
HAND_ON: Final = """
local function hand_on(stream, owners, bell, whose, id)
  redis.call('XADD', stream, '*', 'request', id)
  redis.call('SADD', owners, whose)
  redis.call('XADD', bell, 'MAXLEN', '1', '*', 'request', id)
end
"""
HAND_ON_READY: Final = """
local function hand_on_ready(model, pending, stream, owners, bell, owner, gaps, whose, model_id, requests, next)
  local first = next
  while true do
    local ready = redis.call('HGET', pending, next)
    if not ready then break end
    hand_on(stream, owners, bell, whose, ready)
    redis.call('HDEL', pending, next)
    redis.call('HINCRBY', owner, 'held', -1)
    redis.call('HINCRBY', owner, 'held_bytes', -redis.call('HSTRLEN', requests .. ready, 'body'))
    next = next + 1
  end
  redis.call('HSET', model, 'next', next)
  if redis.call('HLEN', pending) == 0 then
    redis.call('ZREM', gaps, model_id)
  elseif next == first then
    -- However much comes behind the one that is missing, it is missing since then.
    redis.call('ZADD', gaps, 'NX', redis.call('TIME')[1], model_id)
  else
    redis.call('ZADD', gaps, redis.call('TIME')[1], model_id)
  end
end
"""
SUBMIT: Final = (
    FULL
    + HAND_ON
    + HAND_ON_READY
    + """
local request, model, pending, stream, created = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local owners, bell, open, owner, session = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local id, digest, body, size = ARGV[1], ARGV[3], ARGV[5], string.len(ARGV[5])
local known = redis.call('HGET', request, 'digest')
if known then
  if known == digest then return 'same' end
  return 'other'
end
local next = tonumber(redis.call('HGET', model, 'next') or '0')
local seq = tonumber(ARGV[2])
if seq > 0 and not redis.call('HGET', model, 'record') then return 'unknown' end
local closed = redis.call('HGET', model, 'closed')
if closed then return 'closed ' .. closed end
if seq < next then return 'passed' end
if full(open, owner, ARGV[10], ARGV[11], size, seq == next) then return 'full' end
if ARGV[7] ~= '' then
  if redis.call('SCARD', session) >= tonumber(ARGV[12]) then return 'models' end
  if redis.call('ZCARD', KEYS[12]) >= tonumber(ARGV[14]) then return 'owned' end
end
redis.call('HSET', request, 'digest', digest, 'verb', ARGV[4], 'seq', ARGV[2], 'model', ARGV[6], 'body', body)
redis.call('HSET', request, 'owner', ARGV[9])
if ARGV[7] ~= '' then
  redis.call('HSET', model, 'record', ARGV[7], 'owner', ARGV[9])
  redis.call('ZADD', created, ARGV[8], ARGV[6])
  redis.call('ZADD', KEYS[12], ARGV[8], ARGV[6])
  redis.call('SADD', session, ARGV[6])
end
take(open, owner, id, size)
redis.call('HINCRBY', model, 'accepted', 1)
redis.call('HSET', model, 'seen', ARGV[8])
redis.call('HSET', pending, seq, id)
redis.call('HINCRBY', owner, 'held', 1)
redis.call('HINCRBY', owner, 'held_bytes', size)
hand_on_ready(model, pending, stream, owners, bell, owner, KEYS[11], ARGV[9], ARGV[6], ARGV[13], next)
return 'new'
"""
)
ASK: Final = (
    FULL
    + HAND_ON
    + """
local request, open, owner = KEYS[1], KEYS[2], KEYS[3]
local known = redis.call('HGET', request, 'digest')
if known then
  if known == ARGV[2] then return 'same' end
  return 'other'
end
if full(open, owner, ARGV[5], ARGV[6], string.len(ARGV[3]), false) then return 'full' end
take(open, owner, ARGV[1], string.len(ARGV[3]))
redis.call('HSET', request, 'digest', ARGV[2], 'body', ARGV[3], 'owner', ARGV[4], 'parts', #KEYS / 3 - 1)
for at = 4, #KEYS, 3 do hand_on(KEYS[at], KEYS[at + 1], KEYS[at + 2], ARGV[4], ARGV[1]) end
return 'new'
"""
)
ATTEMPT: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
return redis.call('HINCRBY', KEYS[1], ARGV[1], 1)
"""
GAPS: Final = """
local found = {}
local now = tonumber(redis.call('TIME')[1])
for _, id in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local first = nil
  for _, seq in ipairs(redis.call('HKEYS', ARGV[2] .. id)) do
    if not first or tonumber(seq) < first then first = tonumber(seq) end
  end
  local next = redis.call('HGET', ARGV[1] .. id, 'next') or '0'
  if first then
    table.insert(found, {id, next, tostring(first), tostring(now - tonumber(redis.call('ZSCORE', KEYS[1], id)))})
  else
    redis.call('ZREM', KEYS[1], id)
  end
end
return found
"""
"""List models whose requests wait for an earlier one: which is missing, which waits first, and since when."""
SKIP: Final = (
    HAND_ON
    + HAND_ON_READY
    + """
local model, pending = KEYS[1], KEYS[2]
local next = tonumber(ARGV[2]) + 1
-- The client may have sent some of them again since the gap was seen.
if tonumber(redis.call('HGET', model, 'next') or '0') ~= tonumber(ARGV[5]) then return 0 end
for _, seq in ipairs(redis.call('HKEYS', pending)) do
  if tonumber(seq) < next then return 0 end
end
redis.call('HSET', model, 'done', ARGV[2], 'kept_from', next)
hand_on_ready(model, pending, KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], ARGV[3], ARGV[1], ARGV[4], next)
return 1
"""
)
"""Continue behind requests that were lost after they were done, unless one of them came again."""
ANSWER: Final = """
local request, answer, stream, owners, done, model = KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local samplers, open, owner, answers = KEYS[8], KEYS[9], KEYS[10], KEYS[11]
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[7] ~= '' then redis.call('HSET', model, 'done', ARGV[7]) end
redis.call('XDEL', stream, ARGV[5])
if redis.call('XLEN', stream) == 0 then redis.call('SREM', owners, ARGV[10]) end
local is_new = redis.call('EXISTS', request) == 1 and redis.call('HSETNX', request, 'answered ' .. ARGV[11], 1) == 1
if is_new then
  redis.call('SET', answer, ARGV[3], 'EX', ARGV[4])
  if ARGV[13] ~= '' then redis.call('HSET', request, 'sampled', ARGV[13]) end
  if ARGV[16] ~= '' then redis.call('HSET', request, 'failed', ARGV[16]) end
  local parts = tonumber(redis.call('HGET', request, 'parts') or '1')
  if redis.call('HINCRBY', request, 'answers', 1) == parts and redis.call('SREM', open, ARGV[2]) == 1 then
    redis.call('HINCRBY', owner, 'bytes', -redis.call('HSTRLEN', request, 'body'))
    local ended = redis.call('HEXISTS', request, 'failed') == 1 and 'failed' or 'done'
    redis.call('HINCRBY', owner, ended, 1)
    if ARGV[7] ~= '' then
      redis.call('HINCRBY', model, ended == 'done' and 'answered' or ended, 1)
      if ended == 'done' and redis.call('HGET', request, 'verb') == 'optim_step' then
        redis.call('HINCRBY', model, 'updates', 1)
      end
      if ARGV[19] ~= '' then
        local loss = tonumber(redis.call('HGET', model, 'loss') or '0') + tonumber(ARGV[19])
        redis.call('HSET', model, 'loss', string.format('%.17g', loss))
      elseif ARGV[20] ~= '' then
        local number = redis.call('HINCRBY', model, 'points', 1)
        local loss = redis.call('HGET', model, 'loss') or ''
        local point = {number, redis.call('TIME')[1], ARGV[20], loss}
        redis.call('RPUSH', KEYS[13], table.concat(point, ' '))
        redis.call('LTRIM', KEYS[13], -ARGV[21], -1)
      end
      -- Of gradients that were used, refused or replaced, the losses count in no later update.
      local verb = redis.call('HGET', request, 'verb')
      if verb == 'optim_step' or verb == 'load_weights' then redis.call('HDEL', model, 'loss') end
    end
    if ARGV[12] ~= '' then redis.call('HDEL', request, 'body') end
    if redis.call('HEXISTS', request, 'parts') == 1 then redis.call('EXPIRE', request, ARGV[4]) end
  end
  local now = tonumber(redis.call('TIME')[1])
  local size = string.len(ARGV[3])
  redis.call('ZADD', answers, now, size .. '|' .. ARGV[2] .. '|' .. answer)
  local kept = redis.call('HINCRBY', owner, 'answer_bytes', size)
  while true do
    local oldest = redis.call('ZRANGE', answers, 0, 0, 'WITHSCORES')
    local is_over = tonumber(oldest[2]) < now - tonumber(ARGV[4])
    if not is_over and (kept <= tonumber(ARGV[14]) or redis.call('ZCARD', answers) == 1) then break end
    local its_size, its_request, its_key = string.match(oldest[1], '^(%d+)|(.*)|([^|]*)$')
    redis.call('ZREM', answers, oldest[1])
    redis.call('DEL', its_key)
    kept = redis.call('HINCRBY', owner, 'answer_bytes', -its_size)
    -- A sample may be asked for again; a place among a model's requests stays taken.
    local key = ARGV[15] .. its_request
    if redis.call('HEXISTS', key, 'parts') == 1 and redis.call('SISMEMBER', open, its_request) == 0 then
      redis.call('DEL', key)
    end
  end
end
redis.call('XADD', done, 'MAXLEN', '~', ARGV[6], '*', 'request', ARGV[2])
if ARGV[8] ~= '' then redis.call('HSET', samplers, ARGV[8], ARGV[9]) end
if ARGV[18] ~= '' then redis.call('HSET', KEYS[12], ARGV[17], ARGV[18]) end
return 1
"""
OPEN: Final = """
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[1])
redis.call('SADD', KEYS[3], ARGV[5])
redis.call('HSET', KEYS[4], 'actor', ARGV[6])
return 1
"""
"""Open a session, unless its owner has too many."""
CLOSE: Final = """
local model, pending, open, owner = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
redis.call('HSET', model, 'closed', ARGV[3])
for _, id in ipairs(redis.call('HVALS', pending)) do
  local request = ARGV[1] .. id
  if redis.call('SREM', open, id) == 1 then
    local size = redis.call('HSTRLEN', request, 'body')
    redis.call('HINCRBY', owner, 'held', -1)
    redis.call('HINCRBY', owner, 'held_bytes', -size)
    redis.call('HINCRBY', owner, 'bytes', -size)
    redis.call('HINCRBY', owner, 'failed', 1)
    redis.call('HINCRBY', model, 'failed', 1)
  end
  redis.call('DEL', request)
  if ARGV[5] ~= '' then
    redis.call('HSET', request, 'failed', 'server', 'answered train', 1)
    redis.call('EXPIRE', request, ARGV[6])
    redis.call('SET', ARGV[4] .. id, ARGV[5], 'EX', ARGV[6])
    redis.call('XADD', KEYS[6], 'MAXLEN', '~', ARGV[7], '*', 'request', id)
  end
end
redis.call('DEL', pending)
redis.call('ZREM', KEYS[5], ARGV[2])
return 1
"""
"""Take no more requests of a model; release those that wait for an earlier one, or answer them if that is given."""
RUNS: Final = """
local found = {}
-- Earlier releases kept them without an order.
for _, id in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  local of = redis.call('HMGET', ARGV[1] .. id, 'record', 'owner')
  if of[1] then
    local made = cjson.decode(of[1])['created']
    redis.call('ZADD', KEYS[4], made, id)
    if of[2] then redis.call('ZADD', ARGV[6] .. of[2], made, id) end
  end
end
redis.call('DEL', KEYS[3])
local ids = ARGV[3] ~= '' and {ARGV[3]}
  or redis.call('ZREVRANGE', KEYS[1], ARGV[4], tonumber(ARGV[4]) + tonumber(ARGV[5]) - 1)
for _, id in ipairs(ids) do
  local of = redis.call('HMGET', ARGV[1] .. id, 'record', 'seen', 'closed', 'updates', 'accepted', 'answered', 'failed',
    'next', 'done')
  if of[1] then
    -- Handed on and not answered, and those that wait for an earlier one.
    local waiting = tonumber(of[8] or '0') - 1 - tonumber(of[9] or '-1') + redis.call('HLEN', ARGV[2] .. id)
    local session = redis.call('HGET', KEYS[2], string.match(id, '^[^:]*'))
    table.insert(found, {of[1], of[2] or '0', of[3] or '', of[4] or '0', of[5] or '0', of[6] or '0', of[7] or '0',
      waiting, session or ''})
  end
end
return {redis.call('ZCARD', KEYS[1]), found}
"""
"""Which models there are, newest first, how far they are, and what became of their requests."""
LEDGER: Final = """
local found = redis.call('HMGET', KEYS[1], 'actor', 'accepted', 'done', 'failed')
return {found[1], found[2], found[3], found[4], redis.call('SCARD', KEYS[2]), redis.call('HGET', KEYS[1], 'bytes')}
"""
