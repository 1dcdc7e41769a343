-- Find the lowest id of a group that may still be trained: one that is outstanding or planned, or the next to come.
-- KEYS: outstanding, state, plans. ARGV: 'next_group_id' where groups are issued here, 'lowest_to_come' where those of
-- another experiment are taken. Returns the id.
local outstanding, state, plans = unpack(KEYS)
local field = unpack(ARGV)
local lowest = tonumber(redis.call('HGET', state, field) or '0')
for _, group in ipairs(redis.call('ZRANGEBYSCORE', outstanding, '-inf', '+inf')) do
  lowest = math.min(lowest, tonumber(group))
end
for _, encoded in ipairs(redis.call('HVALS', plans)) do
  for _, group in ipairs(cmsgpack.unpack(encoded).group_ids) do lowest = math.min(lowest, group) end
end
return lowest
