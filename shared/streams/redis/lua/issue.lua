-- Issue tasks against the budget.
-- KEYS: tasks stream, ledger, outstanding, state, consumed, generated and scored streams, what was handed over with tasks
-- ARGV: id of the first task, limit, then (header, payload, version) of each.
-- Returns {number issued, next id, 1 if a stream is full}; none issued and another next id: the cursor had moved.
local tasks, ledger, outstanding, state, consumed, generated, scored, handed_over = unpack(KEYS)
local first, limit = unpack(ARGV, 1, 2)
local parts = after(2, ARGV)
first, limit = tonumber(first), tonumber(limit)
local next_id = tonumber(redis.call('HGET', state, 'next_group_id') or '0')
if next_id ~= first then return {0, next_id, 0} end
if is_full(state, tasks, handed_over) or is_full(state, generated) or is_full(state, scored) then
  return {0, next_id, 1}
end
local used = redis.call('ZCARD', outstanding)
for _, groups in ipairs(redis.call('HVALS', consumed)) do used = used + tonumber(groups) end
local count = math.max(0, math.min(#parts / 3, limit - used))
for index = 0, count - 1 do
  local header, payload, version = unpack(parts, 3 * index + 1, 3 * index + 3)
  redis.call('XADD', tasks, '*', 'header', header, 'payload', payload)
  redis.call('ZADD', outstanding, version, string.format('%d', next_id + index))
end
if count > 0 then
  redis.call('HSET', state, 'next_group_id', string.format('%d', next_id + count))
  redis.call('HINCRBY', ledger, 'issued', string.format('%d', count))
end
return {count, next_id + count, 0}
