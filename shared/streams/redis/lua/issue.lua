-- Issue tasks, or groups that are finished already, against the budget.
-- KEYS: stream that takes them, ledger, outstanding, state, consumed, what was handed over with tasks, streams in order
-- ARGV: id of the first, how many, limit, counters of the tokens that have come so far, then of each task (header,
--   payload, version), or of each group (header, payload, version, grades, tokens). With counters they are groups, for
--   which what was consumed since the last publication takes no room.
-- Returns {number issued, next id, 1 if a stream is full}; none issued and another next id: the cursor had moved.
local destination, ledger, outstanding, state, consumed, handed_over = unpack(KEYS, 1, 6)
local streams = after(6, KEYS)
local first, number, limit, counters = unpack(ARGV, 1, 4)
local parts = after(4, ARGV)
first, number, limit = tonumber(first), tonumber(number), tonumber(limit)
local are_groups = counters ~= ''
local next_id = tonumber(redis.call('HGET', state, 'next_group_id') or '0')
if next_id ~= first then return {0, next_id, 0} end
for index, stream in ipairs(streams) do
  if is_full(state, stream, index == 1 and handed_over or nil) then return {0, next_id, 1} end
end
local used = redis.call('ZCARD', outstanding)
if not are_groups then
  for _, groups in ipairs(redis.call('HVALS', consumed)) do used = used + tonumber(groups) end
end
local count = math.max(0, math.min(number, limit - used))
local size, total = #parts / number, 0
for index = 0, count - 1 do
  local header, payload, version, grades, tokens = unpack(parts, size * index + 1, size * index + size)
  if are_groups then
    redis.call('XADD', destination, '*', 'header', header, 'payload', payload, 'grades', grades)
    total = total + tonumber(tokens)
  else
    redis.call('XADD', destination, '*', 'header', header, 'payload', payload)
  end
  redis.call('ZADD', outstanding, version, string.format('%d', next_id + index))
end
if count > 0 then
  redis.call('HSET', state, 'next_group_id', string.format('%d', next_id + count))
  redis.call('HINCRBY', ledger, 'issued', string.format('%d', count))
  for counter in string.gmatch(counters, '%S+') do
    redis.call('HINCRBY', ledger, counter, string.format('%d', total))
  end
end
return {count, next_id + count, 0}
