-- Read the ledger in one instant. KEYS: ledger, outstanding, consumed, then the streams in order.
-- Returns {counters as field, value, ...; outstanding as group, version, ...; consumed; {waiting, claimed} of each stream}.
-- Planned entries count in neither: the counter `planned` must account for them.
local ledger, outstanding, consumed_by_version = unpack(KEYS, 1, 3)
local streams = after(3, KEYS)
local consumed = 0
for _, value in ipairs(redis.call('HVALS', consumed_by_version)) do consumed = consumed + tonumber(value) end
local depths = {}
for index, stream in ipairs(streams) do
  local length = redis.call('XLEN', stream)
  local pending, handed_back, planned = 0, 0, 0
  local summary = redis.pcall('XPENDING', stream, GROUP)
  if is_no_group(summary) then
    -- Nothing was claimed yet. Or the group was destroyed, and its creation will find the planned entries by their plans.
    if index == #streams then planned = tonumber(redis.call('HGET', ledger, 'planned') or '0') end
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
return {redis.call('HGETALL', ledger), redis.call('ZRANGE', outstanding, 0, -1, 'WITHSCORES'), consumed, depths}
