-- Read the ledger in one instant. KEYS: ledger, outstanding, consumed, then the streams in order.
-- Returns {counters as field, value, ...; outstanding; consumed; {waiting, claimed} of each stream}.
-- Planned entries count in neither: the counter `planned` must account for them.
local consumed = 0
for _, value in ipairs(redis.call('HVALS', KEYS[3])) do consumed = consumed + tonumber(value) end
local depths = {}
for index = 4, #KEYS do
  local length = redis.call('XLEN', KEYS[index])
  local pending, handed_back, planned = 0, 0, 0
  local summary = redis.pcall('XPENDING', KEYS[index], GROUP)
  if is_no_group(summary) then
    -- Nothing was claimed yet. Or the group was destroyed, and its creation will find the planned entries by their plans.
    if index == #KEYS then planned = tonumber(redis.call('HGET', KEYS[1], 'planned') or '0') end
    pending = planned
  else
    if summary.err then error(summary.err) end
    pending = summary[1]
    for _, holder in ipairs(summary[4] or {}) do
      if holder[1] == HANDED_BACK then handed_back = tonumber(holder[2]) end
      if holder[1] == PLANNED then planned = tonumber(holder[2]) end
    end
  end
  depths[#depths + 1] = {length - pending + handed_back, pending - handed_back - planned}
end
return {redis.call('HGETALL', KEYS[1]), redis.call('ZCARD', KEYS[2]), consumed, depths}
