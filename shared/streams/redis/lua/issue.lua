-- Issue tasks against the budget.
-- KEYS: tasks stream, ledger, outstanding, state, consumed, the later streams, what was handed over with tasks
-- ARGV: id of the first task, limit, then (header, payload, version) of each.
-- Returns {number issued, next id, 1 if a stream is full}; none issued and another next id: the cursor had moved.
local first, limit = tonumber(ARGV[1]), tonumber(ARGV[2])
local next_id = tonumber(redis.call('HGET', KEYS[4], 'next_group_id') or '0')
if next_id ~= first then return {0, next_id, 0} end
if is_full(KEYS[4], KEYS[1], KEYS[8]) or is_full(KEYS[4], KEYS[6]) or is_full(KEYS[4], KEYS[7]) then
  return {0, next_id, 1}
end
local used = redis.call('ZCARD', KEYS[3])
for _, consumed in ipairs(redis.call('HVALS', KEYS[5])) do used = used + tonumber(consumed) end
local count = math.max(0, math.min((#ARGV - 2) / 3, limit - used))
for index = 0, count - 1 do
  local header, payload, version = ARGV[3 + 3 * index], ARGV[4 + 3 * index], ARGV[5 + 3 * index]
  redis.call('XADD', KEYS[1], '*', 'header', header, 'payload', payload)
  redis.call('ZADD', KEYS[3], version, string.format('%d', next_id + index))
end
if count > 0 then
  redis.call('HSET', KEYS[4], 'next_group_id', string.format('%d', next_id + count))
  redis.call('HINCRBY', KEYS[2], 'issued', string.format('%d', count))
end
return {count, next_id + count, 0}
